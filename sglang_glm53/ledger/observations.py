"""What others, and this project, observed on real servers, computed by the ledger's formulas.

An observation that the formulas do not reach within its tolerance says why in `note`. GB is 10^9
bytes, GiB 2^30: which of them a log's "GB" means is part of the formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_glm53.bench.rank_slice import slice_config
from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger import memory, model
from sglang_glm53.ledger.formula import Figure, Sheet
from sglang_glm53.ledger.glm53 import config_json
from sglang_glm53.ledger.topology import Topology

GIB = 2**30
INFERENCEX = "comments in InferenceX's GLM-5 scripts (public); SGLang before 0.5.22"
SLICE = "docs/benchmarks/slice.json"
# What the driver says is free on an H200 beside a process's own context (slice.json).
FREE_GIB = 139.29


@dataclass(frozen=True)
class Observation:
    """One number that was seen, and the ledger's.

    Attributes:
        said: the observation in its own words. seen: its number. figure: ours.
        tolerance: relative, within which they must agree.
        note: what the difference is; empty where there is none worth a word.
    """

    name: str
    said: str
    seen: float
    figure: Figure
    tolerance: float
    source: str
    note: str = ""

    @property
    def difference(self) -> float:
        """Relative; positive where the ledger counts more."""
        return self.figure.value / self.seen - 1


def observations() -> list[Observation]:
    """All of them."""
    return [*_published(), *_slice()]


def _published() -> list[Observation]:
    config = Glm53Config.from_hf(config_json())
    found = []
    sheets = {}
    for kv in ("bf16", "fp8", "fp8-raw"):
        sheet = Sheet({"gib": GIB}, model.cache(config, kv))
        # SGLang before 0.5.22 kept index keys in the shared layers too.
        sheet.add(
            "token_all_layers",
            "layers * (latent_token + index_layer_token)",
            "B",
            "cache of a token with index keys in all layers",
        )
        sheets[kv] = sheet
    found.append(
        Observation(
            "index-share-fp8",
            '"DSA indexer observed at 20.1 % of the KV pool" (H200, FP8 cache)',
            0.201,
            sheets["fp8"].figure("share", "index_layer_token / latent_token", "", "index : latent"),
            0.002,
            INFERENCEX,
        )
    )
    found.append(
        Observation(
            "index-share-raw",
            '"169 GB pool plus the coupled 38.73 GB DSA indexer" (B200, trtllm)',
            38.73 / 169,
            sheets["fp8-raw"].figure(
                "share", "index_layer_token / latent_token", "", "index : latent"
            ),
            0.002,
            INFERENCEX,
        )
    )
    found.append(
        Observation(
            "pool-mi355x",
            '"124.54 GB / 1.335M tokens per rank" (MI355X, bf16 cache): tokens of 124.54 GiB',
            1.335e6,
            sheets["bf16"].figure("tokens", "124.54 * gib / token_all_layers", "tokens", "tokens"),
            0.001,
            INFERENCEX,
            "the log's GB are GiB: 124.54 GB would be 1.244M tokens",
        )
    )
    stored = memory.stored(config, Topology(tp=8, kv="bf16"), mtp=False)
    pool = Sheet(
        {"stored": stored["stored_bytes"], "memory": 141e9, "fraction": 0.88}, sheets["bf16"]
    )
    found.append(
        Observation(
            "pool-h200-tp8",
            'bf16 cache "holds only ~297K tokens" (H200, TP 8, --mem-fraction-static 0.88)',
            297e3,
            pool.figure(
                "tokens", "(fraction * memory - stored) / token_all_layers", "tokens", "tokens"
            ),
            0.04,
            INFERENCEX,
            "with the 141 GB of the datasheet. The driver gives 150.1 GB, of which NCCL, contexts "
            "and draft take what nobody published, so this agreement is weak",
        )
    )
    return found


# SGLang's pool on the slice: layers, MTP, --mem-fraction-static (glm53 bench slice's own choice for
# 139.8 GiB), tokens of SGLang's class and of ours.
POOLS = {
    "decode": (78, False, 0.82, 147520, 147904),
    "mtp": (78, True, 0.83, 86528, 87552),
    "prefill, 10 layers": (10, False, 0.16, 853120, 858112),
}
LOADED_GIB = 106.66


def _slice() -> list[Observation]:
    config = _slice_config(78)
    stored = memory.stored(config, Topology(), mtp=False)
    loaded = Sheet({"gib": GIB}, stored).figure(
        "loaded", "stored_bytes / gib", "GiB", "loaded weights of the slice"
    )
    pool = Sheet(
        {
            "gib": GIB,
            "free_gib": FREE_GIB,
            "fraction": POOLS["decode"][2],
            "loaded_gib": LOADED_GIB,
            "page_tokens": 64,
        },
        model.cache(config, "fp8"),
    )
    tokens = pool.figure(
        "tokens",
        "floor((fraction * free_gib - loaded_gib) * gib / kv_bytes_per_token / page_tokens)"
        " * page_tokens",
        "tokens",
        "tokens of the pool",
    )
    return [
        Observation(
            "slice-loaded",
            "loaded weights of the slice, SGLang's log: 106.66 GB, which are GiB",
            LOADED_GIB,
            loaded,
            0.01,
            "docs/benchmarks.md",
            "the log's figure is the change of the GPU's free memory, so CUDA's modules and the "
            "allocator's rounding are in it; they are not counted",
        ),
        Observation(
            "slice-pool",
            "tokens of the slice's cache at --mem-fraction-static 0.82: 147,520",
            147520,
            tokens,
            0.021,
            SLICE,
            f"from the logged 106.66 GiB and {FREE_GIB} GiB free: the difference of two large "
            "numbers, 0.15 GiB are 2 % of it",
        ),
    ]


@dataclass(frozen=True)
class Residue:
    """Memory in use when SGLang sized a pool, beside the weights that are counted; GiB.

    used: from the pool's tokens, by SGLang's rule. counted: `stored_while_sizing`.
    """

    name: str
    tokens: int
    used: float
    counted: float

    @property
    def gib(self) -> float:
        return self.used - self.counted


def residues() -> list[Residue]:
    """Of the three shapes that were measured, SGLang's class and ours. No constant is fitted."""
    found = []
    for name, (layers, mtp, fraction, *pools) in POOLS.items():
        config = _slice_config(layers)
        counted = memory.stored(config, Topology(), mtp=mtp)["stored_while_sizing"] / GIB
        token = model.cache(config, "fp8", mtp=mtp)["kv_bytes_per_token"]
        for side, tokens in zip(("stock", "ours"), pools, strict=True):
            used = fraction * FREE_GIB - tokens * token / GIB
            found.append(Residue(f"{name}, {side}", tokens, used, counted))
    return found


def _slice_config(layers: int) -> Glm53Config:
    return Glm53Config.from_hf(slice_config(layers=layers, experts=32))
