"""Makes docs/request-path.md from docs/request-path.md.in: `python -m sglang_glm53.ledger.docs`.

`{{name}}` in the text is one of `values()`, each of which the ledger computes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger import units
from sglang_glm53.ledger.account import Account, Step
from sglang_glm53.ledger.article import Claims
from sglang_glm53.ledger.model import cache
from sglang_glm53.ledger.observations import layouts, observations

DOCS = Path(__file__).resolve().parents[2] / "docs"
SOURCE, TARGET = "request-path.md.in", "request-path.md"


def build(folder: Path = DOCS) -> str:
    """The document's text.

    Raises:
        Glm53Error: the text asks for a value that there is not, or there is no text.
    """
    try:
        text = (folder / SOURCE).read_text(encoding="utf-8")
    except OSError as error:
        raise Glm53Error(f"cannot read {folder / SOURCE}: {error.strerror}") from None
    found = values()

    def put(match: re.Match[str]) -> str:
        if match[1] not in found:
            raise Glm53Error(f"{SOURCE} asks for {match[1]!r}, which ledger/docs.py does not make")
        return found[match[1]]

    return re.sub(r"\{\{(\w+)\}\}", put, text)


def values() -> dict[str, str]:
    """Everything that the text can ask for."""
    claims = Claims()
    tp8, dp8, deepep = (claims.account(name) for name in ("tp8", "dp8", "dp8-deepep"))
    config, sheet = claims.config, tp8.parameters
    fp8, bf16 = cache(config, "fp8"), cache(config, "bf16")
    full = {each.name: each for each in deepep.layer("full")}
    moved = [row for _, _, row in dp8.decode.collectives if row.where.startswith("FFN")]
    prefill_tp8 = [row for each in tp8.prefill for row in each.collectives]
    sent = sum(row.total_busiest for row in prefill_tp8)
    experts = [row for each in deepep.prefill for row in each.collectives if row.where == "experts"]
    breaks = next(claim for claim in claims.found if claim.topic.startswith("accept length"))
    one, many = breaks.shown.split(" and ")
    text = {name: units.count(value) for name, value in sheet.items()}
    text |= {name: str(sheet[name]) for name in ("experts", "hidden", "top_k", "layers")}
    text |= {name: str(sheet[name]) for name in ("moe_layers", "full_layers", "shared_layers")}
    text |= {
        "full_list": "0, 1, 2, then every fourth from 6 to 74",
        "topk": f"{config.index_topk:,}",
        "kv_fp8": units.bytes_(fp8["kv_bytes_per_token"]),
        "kv_bf16": units.bytes_(bf16["kv_bytes_per_token"]),
        "latent_fp8": units.bytes_(fp8["latent_token"]),
        "index_token": units.bytes_(fp8["index_layer_token"]),
        "page_fp8": units.bytes_(fp8["page_bytes"]),
        "million_fp8": units.memory(fp8["kv_bytes_per_token"] * 2**20),
        "embed_prefill": units.size(prefill_tp8[0].bytes.value),
        "a_bytes": units.size(full["A projections"].weights.value),
        "o_bytes": units.size(full["o_proj"].weights.value),
        "index_128k": units.size(sheet["full_layers"] * 131072 * fp8["index_layer_token"]),
        "index_1m": units.size(sheet["full_layers"] * 2**20 * fp8["index_layer_token"]),
        "index_flops": units.flops(sheet["full_layers"] * full["indexer: scores"].flops.value / 4),
        "latents_token": units.size(sheet["layers"] * sheet["index_topk"] * fp8["latent_token"]),
        "experts_rank": units.size(deepep.stored["stored_routed"]),
        "lm_head": units.size(sheet["lm_head"] * 2),
        "logits": units.size(tp8.decode.collectives[-1][2].bytes.value),
        "dp_count": str(sum(row.count for row in moved)),
        "dp_message": units.bytes_(moved[0].bytes.value),
        "dp_total": units.size(sum(row.total_bytes for row in moved)),
        "prefill_tp8": units.size(sent),
        "prefill_tp8_count": str(sum(row.count for row in prefill_tp8)),
        "prefill_tp8_ms": units.milliseconds(tp8.prefill_bound.communication.value),
        "prefill_bound": units.milliseconds(tp8.prefill_bound.bound_ms),
        "prefill_dp8": units.size(sum(row.total_bytes for row in experts)),
        "bandwidth": f"{claims.hardware.bandwidth.best_known / 1e12:.2f}",
        "comm_tp8": units.milliseconds(tp8.decode.bound.communication.value),
        "comm_dp8": units.milliseconds(deepep.decode.bound.communication.value),
        "be_one": one,
        "be_many": many,
        "draft_head": units.memory(
            deepep.stored["embedding_here"] + sheet["vocab"] * sheet["hidden"] * 2
        )
        + " on a rank that has both whole",
        "rows_step": _step_rows(tp8.decode, deepep.decode),
        "rows_fit": _fit_rows(tp8, deepep),
        "table_operators": _operators(deepep),
        "table_tp8": _collectives(tp8.decode),
        "table_dp8": _collectives(deepep.decode),
        "table_observations": _observations(),
        "table_layouts": _layouts(),
        "table_right": "; ".join(
            f"{claim.topic} ({claim.words})" for claim in claims.found if claim.is_right
        )
        + ".",
        "table_differs": _table(
            ("figure", "the article says", "here", "why"),
            (
                (claim.topic, claim.words, claim.here, claim.why)
                for claim in claims.found
                if not claim.is_right
            ),
        ),
    }
    return text


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _step_rows(left: Step, right: Step) -> str:
    parts = sorted(left.bytes_by, key=lambda part: -right.bytes_by[part])
    rows = [
        (part, units.size(left.bytes_by[part]), units.size(right.bytes_by[part])) for part in parts
    ]
    rows.append(("in all", units.size(left.bytes_read), units.size(right.bytes_read)))
    rows.append(("bound", *(units.milliseconds(step.bound.bound_ms) for step in (left, right))))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _fit_rows(*accounts: Account) -> str:
    rows: list[tuple[str, ...]] = [
        ("loaded weights of a rank", *(units.memory(a.stored["stored_bytes"]) for a in accounts)),
        ("room for the cache", *(units.memory(a.capacity["pool_bytes"]) for a in accounts)),
        ("tokens of a rank", *(f"{a.capacity['pool_tokens']:,}" for a in accounts)),
        (
            "requests of 131,072 tokens, all ranks",
            *(str(a.capacity["concurrent"]) for a in accounts),
        ),
        (
            "requests of 1,048,576 tokens",
            *(str(a.capacity["concurrent_longest"]) for a in accounts),
        ),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _operators(account: Account) -> str:
    return _table(
        ("operator", "shape", "FLOPs", "weights", "cache", "FLOP/B", "file"),
        (
            (
                each.name,
                each.shape,
                units.flops(each.flops.value) if each.flops.value else "",
                units.size(each.weights.value) if each.weights.value else "",
                units.size(each.cache.value) if each.cache.value else "",
                f"{each.intensity:.1f}" if each.flops.value else "",
                f"`{each.file}`" if "," not in each.file else each.file,
            )
            for each in account.layer("full")
        ),
    )


def _collectives(step: Step) -> str:
    return _table(
        (
            "where",
            "layers",
            "kind",
            "ranks",
            "count",
            "bytes each",
            "in all",
            "one way, busiest rank",
        ),
        (
            (
                row.where,
                row.layers,
                row.kind,
                str(row.ranks),
                str(row.count),
                units.bytes_(row.bytes.value),
                units.size(row.total_bytes),
                units.size(row.total_busiest),
            )
            for _, _, row in step.collectives
        ),
    )


def _observations() -> str:
    return _table(
        ("seen", "counted", "difference", "note"),
        (
            (each.said, _number(each.figure.value), f"{each.difference:+.1%}", each.note)
            for each in observations()
        ),
    )


def _number(value: float) -> str:
    return f"{value:.4f}" if value < 1 else f"{value:,.2f}" if value < 1e3 else f"{value:,.0f}"


def _layouts() -> str:
    return _table(
        (
            "slice",
            "tensors, GiB",
            "of the free memory, GiB",
            "tokens, SGLang",
            "tokens, estimate",
            "difference, GiB",
        ),
        (
            (
                each.name,
                f"{each.stored:.2f}",
                f"{each.loaded:.2f}",
                f"{each.tokens:,}",
                f"{each.estimated:,}",
                f"{each.difference_gib:+.2f}",
            )
            for each in layouts()
        ),
    )


def main() -> int:
    """Write the document."""
    try:
        (DOCS / TARGET).write_text(build(), encoding="utf-8")
    except Glm53Error as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
