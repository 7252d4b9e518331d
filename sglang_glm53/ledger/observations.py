"""What others, and this project, observed on real servers, computed by the ledger's formulas.

An observation that the formulas do not reach within its tolerance says why in `note`. GB is 10^9
bytes, GiB 2^30: which of them a log's "GB" means is part of the formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_glm53.bench.rank_slice import slice_config
from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger import hardware, model
from sglang_glm53.ledger.account import Account
from sglang_glm53.ledger.formula import Figure, Sheet
from sglang_glm53.ledger.glm53 import config_json
from sglang_glm53.ledger.topology import Topology, Workload

GIB = 2**30
INFERENCEX = "comments in InferenceX's GLM-5 scripts (public); SGLang before 0.5.22"
RECORDED = "docs/benchmarks/memory.json"


@dataclass(frozen=True)
class Observation:
    """One number that was seen, and the ledger's.

    Attributes:
        said: the observation in its own words. seen: its number. figure: ours.
        tolerance: relative, within which they must agree.
        note: what the difference is; empty where there is none worth a word.
        reproduced: whether they do agree.
    """

    name: str
    said: str
    seen: float
    figure: Figure
    tolerance: float
    source: str
    note: str = ""
    reproduced: bool = True

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
    pool = Sheet({"pool_bytes": _tp8(False).capacity["pool_bytes"]}, sheets["bf16"])
    found.append(
        Observation(
            "pool-h200-tp8",
            'bf16 cache "holds only ~297K tokens" (H200, TP 8, --mem-fraction-static 0.88)',
            297e3,
            pool.figure("tokens", "pool_bytes / token_all_layers", "tokens", "tokens"),
            0.04,
            INFERENCEX,
            "**not reproduced**: of what a log of the time had free among eight ranks (137.29 "
            f"GiB), SGLang's rule makes {_by_the_rule(False):,}, with MTP {_by_the_rule(True):,}. "
            "What else that server held nobody published",
            reproduced=False,
        )
    )
    return found


# What SGLang's logs said of rank slices on an H200 (docs/benchmarks/memory.json): layers, MTP,
# --mem-fraction-static (glm53 bench slice's own choice), GiB free before loading (None: not logged;
# a GPU of its own), then for SGLang's class and for ours the tokens of the cache.
POOLS: dict[str, tuple[int, bool, float, float | None, int, int]] = {
    "78-fp8": (78, False, 0.82, None, 147520, 147904),
    "78-fp8-mtp": (78, True, 0.83, 139.13, 86528, 87552),
    "10-fp8-prefill": (10, False, 0.16, 126.38, 853120, 858112),
}
LOADED_GIB = 106.66


def _tp8(mtp: bool) -> Account:
    """TP 8, fraction 0.88, bf16 cache."""
    return Account(
        Glm53Config.from_hf(config_json()),
        Topology(tp=8, kv="bf16"),
        Workload(steps=5, tokens=6) if mtp else Workload(),
        hardware.load("h200"),
        0.88,
    )


def _by_the_rule(mtp: bool) -> int:
    """Tokens of it, in whole thousands, with index keys in all layers."""
    account = _tp8(mtp)
    kv = account.kv
    token = (kv["layers"] + kv["drafts"]) * (kv["latent_token"] + kv["index_layer_token"])
    return int(account.capacity["pool_bytes"] / token) // 1000 * 1000


def _slice() -> list[Observation]:
    account = _slice_account("78-fp8")
    loaded = Sheet({"gib": GIB, "loaded": account.loaded.target}).figure(
        "loaded_gib", "loaded / gib", "GiB", "loaded weights of the slice", "ledger/loading.py"
    )
    return [
        Observation(
            "slice-loaded",
            "loaded weights of the slice, SGLang's log: 106.66 GB, which are GiB",
            LOADED_GIB,
            loaded,
            0.001,
            RECORDED,
            "the tensors are 105.82 GiB; the log's figure is the change of the GPU's free memory, "
            "and the loader for random weights leaves copies in the allocator",
        ),
        Observation(
            "slice-pool",
            "tokens of the slice's cache at --mem-fraction-static 0.82: 147,520",
            147520,
            account.capacity.figures["pool_tokens"],
            0.007,
            RECORDED,
            "0.05 GiB, most likely kernels that the driver loaded meanwhile",
        ),
    ]


@dataclass(frozen=True)
class Layout:
    """One recorded rank beside the estimate of it.

    Attributes:
        name: of the shape, and the side. tokens: that SGLang's cache held. estimated: by the
            ledger's rule. token_bytes: of one.
        stored: tensors, GiB. loaded: with what the allocator keeps, GiB. Draft included.
    """

    name: str
    tokens: int
    estimated: int
    token_bytes: int
    stored: float
    loaded: float

    @property
    def difference_gib(self) -> float:
        """Of the cache; positive where the estimate has more."""
        return (self.estimated - self.tokens) * self.token_bytes / GIB


def layouts() -> list[Layout]:
    """Of the shapes that were recorded, SGLang's class and ours. No constant is fitted."""
    found = []
    for name, (*_, stock, ours) in POOLS.items():
        account = _slice_account(name)
        for side, tokens in (("stock", stock), ("ours", ours)):
            found.append(
                Layout(
                    f"{name}, {side}",
                    tokens,
                    int(account.capacity["pool_tokens"]),
                    int(account.kv["kv_bytes_per_token"]),
                    account.stored["stored_while_sizing"] / GIB,
                    account.loaded.total / GIB,
                )
            )
    return found


def _slice_account(name: str) -> Account:
    layers, mtp, fraction, free, *_ = POOLS[name]
    return Account(
        _slice_config(layers),
        Topology(),
        Workload(steps=5, tokens=6) if mtp else Workload(),
        hardware.load("h200"),
        fraction,
        dummy=True,
        free_bytes=None if free is None else free * GIB,
    )


def _slice_config(layers: int) -> Glm53Config:
    return Glm53Config.from_hf(slice_config(layers=layers, experts=32))
