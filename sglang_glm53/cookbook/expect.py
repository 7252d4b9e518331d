"""What a recipe's server needs and what fits into it, computed by the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_glm53.config import Glm53Config
from sglang_glm53.cookbook.models import config_of
from sglang_glm53.cookbook.recipe import Recipe, Server
from sglang_glm53.ledger import hardware
from sglang_glm53.ledger.account import Account
from sglang_glm53.ledger.topology import Topology, Workload

# Tokens of a request's context for which the concurrency is told.
CONTEXTS = (9_216, 32_768, 131_072, 262_144, 524_288, 1_048_576)
# Attention kernels that read an FP8 cache with scales, 656 bytes a layer and token.
_SCALED = ("flashmla_kv", "flashmla_sparse", "flashmla_sparse_q8", "flashmla_auto")


@dataclass(frozen=True)
class Expected:
    """Of one rank, where not said otherwise.

    Attributes:
        weights_bytes: loaded weights. cache_bytes: room beside them. token_bytes: of one token.
        tokens: that the cache of an attention group holds. groups: attention groups.
        fits: by context, requests of the whole server at the same time.
        topology: as `glm53 ledger` takes it. mtp: "5-1-6", or "" without.
        fraction: --mem-fraction-static. gpu: the ledger's name of it.
        exact: whether `glm53 ledger` gives these figures; it knows no context parallelism.
    """

    weights_bytes: int
    cache_bytes: int
    token_bytes: int
    tokens: int
    groups: int
    fits: dict[int, int]
    topology: str
    mtp: str
    fraction: float
    gpu: str
    exact: bool


def expected(recipe: Recipe, server: Server, args: Mapping[str, Any]) -> Expected | str:
    """What the ledger says of a server, or why it says nothing.

    Args:
        args: resolved arguments of the server (resolved.FIELDS).
    """
    if server.hardware.gpu == "cpu":
        return "a machine without a GPU: the cache holds two contexts unless told otherwise"
    if recipe.weights == "nvfp4":
        return "the ledger counts no NVFP4 weights"
    config = Glm53Config.from_hf(config_of(recipe))
    groups, prefill_groups = args["attn_dp_size"] or 1, args["attn_cp_size"] or 1
    steps, tokens = args["speculative_num_steps"] or 0, args["speculative_num_draft_tokens"] or 0
    topology = Topology(
        tp=args["tp_size"],
        ep=args["ep_size"],
        # A rank of a context-parallel group holds the whole attention too, and all of the cache.
        dp=groups * prefill_groups,
        a2a="deepep" if args["moe_a2a_backend"] == "deepep" else "none",
        dense_tp=int(args["moe_dense_tp_size"] == 1),
        dp_lm_head=int(bool(args["enable_dp_lm_head"])),
        weights=recipe.weights,
        kv=cache_form(args),
    )
    fraction = args["mem_fraction_static"]
    account = Account(
        config,
        topology,
        Workload(batch=1, context=CONTEXTS[0], steps=steps, tokens=tokens),
        hardware.load(server.hardware.gpu),
        fraction,
    )
    held = int(account.capacity["pool_tokens"])
    if args["max_total_tokens"]:
        held = min(held, args["max_total_tokens"])
    return Expected(
        weights_bytes=int(account.stored["stored_bytes"]),
        cache_bytes=int(account.capacity["pool_bytes"]),
        token_bytes=int(account.kv["kv_bytes_per_token"]),
        tokens=held,
        groups=groups,
        fits={context: groups * (held // context) for context in CONTEXTS},
        topology=topology.name,
        mtp=f"{steps}-1-{tokens}" if tokens else "",
        fraction=fraction,
        gpu=server.hardware.gpu,
        exact=prefill_groups == 1 and not args["max_total_tokens"],
    )


def cache_form(args: Mapping[str, Any]) -> str:
    """The ledger's name of the cache's form."""
    if not str(args["kv_cache_dtype"]).startswith("fp8"):
        return "bf16"
    scaled = args["dsa_decode_backend"] in _SCALED and args["dsa_prefill_backend"] in _SCALED
    return "fp8" if scaled else "fp8-raw"
