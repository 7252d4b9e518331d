"""Recordings of real passes beside the ledger: equal, or which rows differ. Pure Python."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger import operators
from sglang_glm53.ledger.collectives import Pass, Rows, collectives
from sglang_glm53.ledger.topology import Topology

# SGLang's forward mode of the target, and of the draft, -> the ledger's pass.
TARGET = {"EXTEND": "prefill", "DECODE": "decode", "TARGET_VERIFY": "verify"}
DRAFT = {"EXTEND": "draft-prefill", "DECODE": "draft"}
DRAFT_EXTEND = "DRAFT_EXTEND"  # and its later versions
IDLE = "IDLE"


@dataclass(frozen=True)
class Row:
    """One row of the comparison.

    Attributes:
        what: the ledger's words, or those of what ran and is not in the ledger.
        detail: shape and bytes, or rows, depth and width. counted, ran: times a pass.
    """

    what: str
    detail: str
    counted: int
    ran: int

    @property
    def equal(self) -> bool:
        return self.counted == self.ran


@dataclass
class Compared:
    """A pass with these rows, and how often it ran like this.

    Attributes:
        kind: of the pass. rows: of each attention group. times: passes that were compared.
        collectives, products: rows, of one pass.
    """

    kind: Pass
    rows: tuple[int, ...]
    form: str
    times: int = 0
    collectives: list[Row] = field(default_factory=list)
    products: list[Row] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return all(row.equal for row in (*self.collectives, *self.products))


def read(folder: Path) -> list[list[dict[str, Any]]]:
    """The passes of each rank, in rank order.

    Raises:
        Glm53Error: nothing was recorded, or ranks ran another number of passes.
    """
    ranks = []
    for file in folder.glob("*.jsonl"):
        passes = [json.loads(line) for line in file.read_text().splitlines()]
        if passes:
            ranks.append(passes)
    if not ranks:
        raise Glm53Error(f"no pass was recorded in {folder}; the log there says why")
    ranks.sort(key=lambda passes: passes[0]["rank"])
    counts = {len(passes) for passes in ranks}
    if len(counts) > 1:
        raise Glm53Error(f"the ranks ran {sorted(counts)} passes; all of them should run as many")
    return ranks


def compare(
    ranks: Sequence[Sequence[dict[str, Any]]], config: Glm53Config, topology: Topology
) -> list[Compared]:
    """Each kind of pass that ran, once for each set of rows, beside the ledger."""
    found: dict[tuple[Any, ...], Compared] = {}
    for together in zip(*ranks, strict=True):
        kind = pass_kind(together)
        rows = _rows(together, topology, kind)
        forms = tuple(_form(each, config, topology) for each in together)
        key = (kind, rows, forms)
        shown = "expanded" if "expanded" in forms else "absorbed"
        one = found.setdefault(key, Compared(kind, rows.by_rank, shown))
        for each, form in zip(together, forms, strict=True):
            _add(one.collectives, _collectives(each, config, topology, kind, rows))
            if each["mode"] != IDLE or each["rows"]:
                _add(one.products, _products(each, config, topology, kind, rows, form))
        one.times += 1
    return list(found.values())


def _form(each: dict[str, Any], config: Glm53Config, topology: Topology) -> str:
    """Form of attention on a rank: dense while a prefill is short, else over a selection.

    The backend decides: SGLang's goes by the pass alone (dsa_backend.py set_dsa_prefill_impl), the
    one without a GPU keeps the draft's passes absorbed (backends/torch_dsa.py).
    """
    short = each["mode"] == "EXTEND" and each["longest"] <= config.index_topk
    absorbed_draft = topology.device == "cpu" and "NextN" in each["model"]
    return "expanded" if short and not absorbed_draft else "absorbed"


# Passes that ranks of different attention groups run together: what both are to the ranks.
TOGETHER: dict[frozenset[Pass], Pass] = {
    frozenset(("prefill", "decode")): "prefill",
    frozenset(("prefill", "verify")): "prefill",
    frozenset(("draft-prefill", "draft-extend")): "draft-prefill",
}


def pass_kind(together: Sequence[dict[str, Any]]) -> Pass:
    """The ledger's name of a pass; an idle rank takes it from the others.

    Raises:
        Glm53Error: a mode that the ledger does not count, or ranks in different passes.
    """
    kinds = {_kind(each) for each in together if each["mode"] != IDLE}
    if frozenset(kinds) in TOGETHER:
        return TOGETHER[frozenset(kinds)]
    if len(kinds) != 1:
        modes = sorted({f"{each['model']} {each['mode']}" for each in together})
        raise Glm53Error(f"the ledger has no pass in which ranks run {', '.join(modes)}")
    (kind,) = kinds
    return kind


def _kind(each: dict[str, Any]) -> Pass:
    draft, mode = "NextN" in each["model"], each["mode"]
    if draft and mode.startswith(DRAFT_EXTEND):
        return "draft-extend"
    kind = (DRAFT if draft else TARGET).get(mode)
    if kind is None:
        raise Glm53Error(f"the ledger has no pass {mode} of {each['model']}")
    return kind  # type: ignore[return-value]


def _rows(together: Sequence[dict[str, Any]], topology: Topology, kind: Pass) -> Rows:
    """Rows of each attention group, before padding."""
    first = [each for each in together if each["mode"] != IDLE][0]
    if topology.dp == 1:
        extend = kind in ("prefill", "draft-prefill")
        logits = first["requests"] if extend else first["rows"]
        return Rows((first["rows"],), (logits,))
    return Rows(tuple(first["rows_by_rank"]), tuple(first["logits_by_rank"]))


def _collectives(
    each: dict[str, Any], config: Glm53Config, topology: Topology, kind: Pass, rows: Rows
) -> dict[tuple[str, str], tuple[int, int]]:
    counted: Counter[tuple[str, int, int]] = Counter()
    words: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    shapes: dict[tuple[str, int, int], str] = {}
    for row in collectives(config, topology, kind, rows):
        key = (row.kind, row.ranks, int(row.bytes.value))
        counted[key] += row.count
        words[key].append(f"{row.where} {row.layers}".strip())
        shapes[key] = " x ".join(map(str, row.shape))
    ran: Counter[tuple[str, int, int]] = Counter()
    for entry in each["collectives"]:
        key = (entry["kind"], len(entry["ranks"]), entry["bytes"])
        ran[key] += 1
        shapes.setdefault(key, " x ".join(map(str, entry["shape"])) + f" {entry['dtype']}")
    result = {}
    for key in dict.fromkeys((*counted, *ran)):
        kind_, size, nbytes = key
        what = f"{kind_} over {size}: {', '.join(words[key]) or 'not in the ledger'}"
        result[what, f"{shapes[key]}, {nbytes:,} B"] = (counted[key], ran[key])
    return result


def _products(
    each: dict[str, Any],
    config: Glm53Config,
    topology: Topology,
    kind: Pass,
    rows: Rows,
    form: str,
) -> dict[tuple[str, str], tuple[int, int]]:
    """Matrix products of all layers: the ledger's, and those of our modules."""
    padded = each["rows"]
    gathered = _gathered(each, config, topology, kind, rows)
    shape = operators.Shape(
        padded,
        gathered,
        requests=1,
        context=max(1, each["longest"]),
        scored=0,
        attended=0,
        form=form,  # type: ignore[arg-type]
        seeds="NextN" in each["model"],
    )
    counted: Counter[tuple[str, tuple[int, int, int]]] = Counter()
    names: dict[str, str] = {}
    own = kind if each["mode"] == IDLE else _kind(each)
    for layer_kind, count in _layers(config, own).items():
        for operator in operators.layer_operators(config, topology, layer_kind, shape):  # type: ignore[arg-type]
            for module in operator.modules:
                names[module] = operator.name
            if operator.product is not None:
                counted[operator.name, operator.product] += count
    ran: Counter[tuple[str, tuple[int, int, int]]] = Counter()
    beside: dict[tuple[str, str], list[list[int]]] = defaultdict(list)
    for name, *sizes in each["products"]:
        layer, _, module = _split(name)
        if module in names:
            beside[layer, names[module]].append(sizes)
    for (_, operator_name), parts in beside.items():
        row, depth = parts[0][:2]
        ran[operator_name, (row, depth, sum(part[2] for part in parts))] += 1
    return {
        (name, "{} x {} -> {}".format(*sizes)): (counted[name, sizes], ran[name, sizes])
        for name, sizes in dict.fromkeys((*counted, *ran))
    }


def _gathered(
    each: dict[str, Any], config: Glm53Config, topology: Topology, kind: Pass, rows: Rows
) -> int:
    """Rows of the buffer that an FFN under attention DP sees."""
    if topology.dp == 1:
        return each["rows"]
    for row in collectives(config, topology, kind, rows):
        if row.where == "FFN input, attention DP":
            return row.shape[0]
    return sum(rows.by_rank)


def _layers(config: Glm53Config, kind: Pass) -> dict[str, int]:
    """How many layers of a kind a pass runs; see operators.KINDS."""
    if kind == "draft":
        return {"shared" if config.index_share_for_mtp_iteration else "full": 1}
    if kind in ("draft-extend", "draft-prefill"):
        return {"full": 1}
    found: Counter[str] = Counter()
    for index in range(config.num_hidden_layers):
        dense, full = not config.is_sparse(index), config.runs_indexer(index)
        found["dense" if dense else "full" if full else "shared"] += 1
    return dict(found)


def _split(name: str) -> tuple[str, str, str]:
    """`layers.3.mlp.gate` -> (`layers.3`, `.`, `mlp.gate`); `decoder.mlp.gate` likewise."""
    head, _, rest = name.partition(".")
    if head == "layers":
        number, _, rest = rest.partition(".")
        return f"layers.{number}", ".", rest
    return head, ".", rest


def _add(rows: list[Row], found: dict[tuple[str, str], tuple[int, int]]) -> None:
    """Merge one rank's pass into the rows: equal ones stand once."""
    have = {(row.what, row.detail, row.counted, row.ran) for row in rows}
    for (what, detail), (counted, ran) in found.items():
        if (what, detail, counted, ran) not in have:
            rows.append(Row(what, detail, counted, ran))


def outside(ranks: Iterable[Iterable[dict[str, Any]]]) -> Counter[str]:
    """Collectives between passes: the scheduler's own messages."""
    found: Counter[str] = Counter()
    for passes in ranks:
        for each in passes:
            for entry in each["outside"]:
                shape = " x ".join(map(str, entry["shape"]))
                found[f"{entry['kind']} {shape} {entry['dtype']}, {entry['bytes']:,} B"] += 1
    return found
