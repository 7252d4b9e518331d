"""What SGLang makes of each recipe, kept as data (resolved.json), so that showing one is instant.

Made by `python -m sglang_glm53.cookbook.docs`, which resolves every recipe with every supported
version of SGLang; `glm53 recipe check` compares the file with a fresh resolution.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sglang_glm53.cookbook.recipe import Recipe
from sglang_glm53.cookbook.resolve import Resolution
from sglang_glm53.features import FEATURES, REFUSED, RUNS, STANDS_DOWN, Feature

FILE = Path(__file__).with_name("resolved.json")

# Of a server's resolved arguments: what its memory and its speed depend on.
FIELDS = (
    *("tp_size", "pp_size", "ep_size", "attn_dp_size", "attn_cp_size", "moe_a2a_backend"),
    *("moe_dense_tp_size", "enable_dp_lm_head", "kv_cache_dtype", "dsa_prefill_backend"),
    *("dsa_decode_backend", "moe_runner_backend", "mem_fraction_static"),
    *("chunked_prefill_size", "max_running_requests", "max_total_tokens", "context_length"),
    *("speculative_num_steps", "speculative_num_draft_tokens"),
    *("flashinfer_allreduce_fusion_backend", "enable_hierarchical_cache", "hicache_ratio"),
)
# On a CPU these come from the machine that resolves, not from the recipe.
OF_THE_MACHINE = ("mem_fraction_static", "chunked_prefill_size", "decode_graph_max_bs")


@dataclass(frozen=True)
class Resolved:
    """One server of a recipe, as one version of SGLang resolves it on the recipe's hardware.

    Attributes:
        args: `FIELDS`, and `decode_graph_max_bs`.
        rows: names of this package's feature rows that are asked for, by decision.
    """

    args: dict[str, Any]
    rows: dict[str, tuple[str, ...]]

    @property
    def serves(self) -> str:
        """Which class serves there: "ours", "SGLang's own", or "refused"."""
        if self.rows.get(REFUSED):
            return "refused"
        return "SGLang's own" if self.rows.get(STANDS_DOWN) else "ours"

    def features(self, decision: str) -> list[Feature]:
        """The table's rows of that decision."""
        names = self.rows.get(decision, ())
        return [row for row in FEATURES if row.name in names]


def of(resolution: Resolution) -> Resolved:
    """What is kept of a resolution."""
    args = {name: resolution.args.get(name) for name in FIELDS}
    graphs = resolution.args.get("cuda_graph_config") or {}
    args["decode_graph_max_bs"] = (graphs.get("decode") or {}).get("max_bs")
    if resolution.args.get("device") == "cpu":
        args = {name: value for name, value in args.items() if name not in OF_THE_MACHINE}
    return Resolved(args, {key: tuple(names) for key, names in resolution.rows.items()})


def find(recipe: Recipe, role: str, version: str) -> Resolved | None:
    """What is kept of a recipe's server; None of a recipe of the user's own."""
    if not recipe.shipped:
        return None
    entry = _file().get(recipe.name, {}).get(role, {}).get(version)
    return None if entry is None else Resolved(entry["args"], _rows(entry["rows"]))


def text(entries: Mapping[tuple[str, str, str], Resolved]) -> str:
    """The file's content from entries by recipe, role and version."""
    content: dict[str, dict[str, dict[str, str]]] = {}
    for (recipe, role, version), entry in sorted(entries.items()):
        kept = {"args": entry.args, "rows": {key: list(rows) for key, rows in entry.rows.items()}}
        line = json.dumps(kept, sort_keys=True)
        content.setdefault(recipe, {}).setdefault(role, {})[version] = line
    return _object(content, lambda roles: _object(roles, _entries, 1)) + "\n"


def _entries(versions: Mapping[str, str]) -> str:
    return _object(versions, str, 2)  # one a line, so that a change shows as one line


def _object(values: Mapping[str, Any], write: Callable[[Any], str], depth: int = 0) -> str:
    """A JSON object with one value a line."""
    pad = "\n" + " " * (depth + 1)
    inner = f",{pad}".join(f"{json.dumps(key)}: {write(value)}" for key, value in values.items())
    return "{" + pad + inner + "\n" + " " * depth + "}"


def forget() -> None:
    """Read the file again at the next question: it was written anew."""
    _file.cache_clear()


def _rows(rows: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {key: tuple(rows[key]) for key in (RUNS, STANDS_DOWN, REFUSED) if key in rows}


@cache
def _file() -> dict[str, Any]:
    try:
        return json.loads(FILE.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
