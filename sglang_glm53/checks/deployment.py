"""The ledger's account of a deployment that the doctor knows by its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.reading import attention_groups, mtp, on_gpu
from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger.account import Account
from sglang_glm53.ledger.formula import Sheet
from sglang_glm53.ledger.outside import BUDGET_OF_OUTSIDE, DISPATCH_LIMIT, Use, outside
from sglang_glm53.ledger.topology import Topology, Workload

# Attention kernels that read an FP8 cache with scales, 656 bytes a layer and token.
SCALED = ("flashmla_kv", "flashmla_sparse", "flashmla_sparse_q8", "flashmla_auto")
# What moves part of weights or cache elsewhere, so that the account would be another.
ELSEWHERE = ("cpu_offload_gb", "offload_group_size", "enable_hisparse", "enable_kv_cache_sharding")


def account(facts: Facts) -> Account | None:
    """None where the arguments say too little, or the ledger does not count such a server."""
    fraction = facts.arg("mem_fraction_static")
    if not on_gpu(facts) or fraction is None or not facts.arg("tp_size"):
        return None
    if any((facts.arg(name) or 0) > 0 for name in ELSEWHERE):
        return None
    if facts.arg("pp_size", 1) > 1 or facts.arg("dcp_size", 1) > 1:
        return None
    if facts.precision is None:
        return None
    tp = facts.arg("tp_size", 1)
    topology = Topology(
        tp=tp,
        ep=facts.arg("ep_size", 1),
        # A rank of a context-parallel group holds the whole attention too, and all of the cache.
        dp=attention_groups(facts) * facts.arg("attn_cp_size", 1),
        a2a="deepep" if facts.arg("moe_a2a_backend") == "deepep" else "none",
        dense_tp=int(facts.arg("moe_dense_tp_size") == 1),
        dp_lm_head=int(bool(facts.arg("enable_dp_lm_head"))),
        weights=facts.precision,
        kv=cache_form(facts),
    )
    tokens = facts.arg("speculative_num_draft_tokens", 0) if mtp(facts) else 0
    # A tree of drafts costs the cache what a chain does.
    work = Workload(batch=1, context=64, steps=max(0, tokens - 1), tokens=tokens)
    try:
        return Account(
            facts.config,
            topology,
            work,
            facts.hardware,
            fraction,
            dummy=facts.arg("load_format") == "dummy",
        )
    except Glm53Error:
        return None  # another rule says so


def beside(facts: Facts, found: Account) -> Sheet:
    """What the deployment allocates beside weights and cache."""
    drafts = found.workload.drafts
    use = Use(
        context=context(facts),
        pool_tokens=tokens_held(facts, found),
        requests=requests_of_a_group(facts),
        graph_batch=graph_batch(facts),
        tokens=found.workload.tokens if drafts else 1,
        steps=found.workload.steps if drafts else 0,
        chunk=prefill_chunk(facts),
        dispatch_limit=dispatch_limit(facts) if low_latency(facts) else 0,
        budget=_number(facts, "SGLANG_DSA_MQA_LOGITS_FREE_MEM_FRACTION", BUDGET_OF_OUTSIDE),
    )
    return outside(
        found.config,
        found.topology,
        use,
        memory=found.capacity["memory"],
        outside=found.capacity["outside"],
    )


def tokens_held(facts: Facts, found: Account) -> int:
    """Tokens of an attention group's cache."""
    held = int(found.capacity["pool_tokens"])
    return min(held, facts.arg("max_total_tokens", held))


def context(facts: Facts) -> int:
    return facts.arg("context_length") or facts.config.max_position_embeddings


def requests_of_a_group(facts: Facts) -> int | None:
    """--max-running-requests of one attention group; None: SGLang's own choice."""
    requests = facts.arg("max_running_requests")
    return None if requests is None else max(1, requests // attention_groups(facts))


def prefill_chunk(facts: Facts) -> int:
    """Tokens of a prefill pass of one attention group."""
    if facts.arg("disaggregation_mode", "null") == "decode":
        return 0
    chunk = facts.arg("chunked_prefill_size", -1)
    return chunk if chunk > 0 else facts.arg("max_prefill_tokens", 16384)


def graph_sizes(facts: Facts) -> list[int]:
    """Requests of the decode graphs that are captured; empty without graphs, or unknown."""
    phase = _read(facts.arg("cuda_graph_config"), "decode")
    backend = _read(phase, "backend")
    if str(getattr(backend, "value", backend)).lower().endswith("disabled"):
        return []
    return sorted(_read(phase, "bs") or [])


def graph_batch(facts: Facts) -> int:
    """Requests of the largest decode graph of an attention group."""
    largest = max(graph_sizes(facts), default=0)
    requests = requests_of_a_group(facts)
    return largest if requests is None else min(largest, requests)


def low_latency(facts: Facts) -> bool:
    """Whether decode sends its rows through DeepEP's low-latency kernels."""
    return (
        facts.arg("moe_a2a_backend") == "deepep"
        and facts.arg("deepep_mode", "auto") != "normal"
        and facts.arg("disaggregation_mode", "null") != "prefill"
    )


def dispatch_limit(facts: Facts) -> int:
    return int(
        _number(facts, "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", float(DISPATCH_LIMIT))
    )


def cache_form(facts: Facts) -> str:
    """The ledger's name of the cache's form."""
    if not str(facts.arg("kv_cache_dtype", "auto")).startswith("fp8"):
        return "bf16"
    kernels = (facts.arg("dsa_decode_backend"), facts.arg("dsa_prefill_backend"))
    return "fp8" if all(kernel in SCALED for kernel in kernels) else "fp8-raw"


def _number(facts: Facts, name: str, default: float) -> float:
    try:
        return float((facts.environment or {}).get(name, default))
    except ValueError:
        return default


def _read(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
