"""Rules on memory: what fits, what lies outside the fraction, and limits that follow from sizes."""

from __future__ import annotations

import math

from sglang_glm53.checks import deployment
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.reading import attention_groups, mtp, on_gpu
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict

GIB = 2**30
# DeepEP's kernels count up to this in one message.
MOST_DISPATCHED = 1024
HOST_RESERVE = 10 * GIB  # that SGLang leaves to the host
LIMIT = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"


def _does_not_fit(facts: Facts) -> Verdict:
    found = deployment.account(facts)
    if found is None or found.capacity["pool_tokens"] > 0:
        return None
    sheet = found.capacity
    least = found.loaded.total / sheet["free_before"]
    return {
        "weights": f"{found.loaded.total / GIB:.1f}",
        "free": f"{sheet['free_before'] / GIB:.1f}",
        "fraction": f"{found.mem_fraction:g}",
        "do": f"give --mem-fraction-static above {math.ceil(least * 1000) / 1000:.3f}"
        if least < 0.97
        else "use more GPUs (--tp-size, --ep-size), or GPUs with more memory",
    }


def _context_does_not_fit(facts: Facts) -> Verdict:
    found = deployment.account(facts)
    if found is None:
        return None
    asked, held = deployment.context(facts), deployment.tokens_held(facts, found)
    if held == 0 or asked <= held:
        return None
    return {
        "asked": f"{asked:,}",
        "whence": "--context-length"
        if facts.arg("context_length")
        else "config.json's, as no --context-length is given",
        "held": f"{held:,}",
        "longest": held,
        "missing": f"{(asked - held) * found.kv['kv_bytes_per_token'] / GIB:.1f}",
        "ways": ("FP8 cache, " if deployment.cache_form(facts) == "bf16" else "")
        + "higher --mem-fraction-static, more ranks",
    }


def _outside(facts: Facts) -> Verdict:
    found = deployment.account(facts)
    if found is None or found.capacity["pool_tokens"] == 0:
        return None
    needed = deployment.beside(facts, found)
    room = found.capacity["outside"]
    if needed["needed"] <= room:
        return None
    parts = sorted(
        (figure for name, figure in needed.figures.items() if name != "needed"),
        key=lambda figure: -figure.value,
    )
    largest = parts[0]
    return {
        "context": f"{deployment.context(facts):,}",
        "needed": f"{needed['needed'] / GIB:.1f}",
        "room": f"{room / GIB:.1f}",
        "largest": f"{largest.title}, {largest.value / GIB:.1f}",
        "fraction": f"{found.mem_fraction:g}",
    }


def _dispatch_limit(facts: Facts) -> Verdict:
    if not deployment.low_latency(facts):
        return None
    requests = deployment.requests_of_a_group(facts) or 0
    batch = requests or max(deployment.graph_sizes(facts), default=0)
    tokens = facts.arg("speculative_num_draft_tokens", 1) if mtp(facts) else 1
    ranks = max(1, facts.arg("tp_size", 1) // attention_groups(facts))
    rows, limit = -(-batch * tokens // ranks), deployment.dispatch_limit(facts)
    if limit > MOST_DISPATCHED:
        return {
            "what": f"{LIMIT} is {limit:,}",
            "limit": f"{MOST_DISPATCHED:,} at most",
            "do": f"set it to {MOST_DISPATCHED} or less",
        }
    if rows <= limit:
        return None
    needed = -(-rows // 8) * 8
    fits = MOST_DISPATCHED * ranks // tokens * attention_groups(facts)
    return {
        "what": f"a rank would send {rows:,} rows in a step ({batch:,} requests x {tokens} tokens "
        f"over {ranks} rank{'s' if ranks > 1 else ''})",
        "limit": f"{limit:,}",
        "do": f"set {LIMIT}={needed}"
        if needed <= MOST_DISPATCHED
        else f"set {LIMIT}={MOST_DISPATCHED} and give --max-running-requests {fits} or less",
    }


def _graphs_miss(facts: Facts) -> Verdict:
    """SGLang drops sizes whose rows the attention ranks cannot share, and replays none above the
    largest."""
    sizes, requests = deployment.graph_sizes(facts), deployment.requests_of_a_group(facts)
    if not sizes or not on_gpu(facts):
        return None
    tokens = facts.arg("speculative_num_draft_tokens", 1) if mtp(facts) else 1
    groups = attention_groups(facts)
    ranks = max(1, facts.arg("tp_size", 1) // groups // facts.arg("attn_cp_size", 1))
    # Rows are gathered over ranks, and so split evenly, with attention groups or DeepEP.
    gathers = groups > 1 or facts.arg("moe_a2a_backend", "none") != "none"
    step = ranks if gathers else 1
    kept = [size for size in sizes if size * tokens % step == 0]
    if not kept:
        return {
            "what": f"none of {_shown(sizes)} requests x {tokens} tokens is a multiple of {step}",
            "then": "SGLang ends at capture",
            "do": f"give --cuda-graph-bs-decode multiples of {step // math.gcd(step, tokens)}",
        }
    if requests is not None and requests > max(kept):
        return {
            "what": f"the largest has {max(kept)} requests, and {requests} may run in a group",
            "then": "larger batches run without a graph",
            "do": f"let --cuda-graph-bs-decode end with {requests}, or give "
            f"--max-running-requests {max(kept) * groups}",
        }
    return None


def _shown(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:6])) + (", ..." if len(sizes) > 6 else "")


def _host_memory(facts: Facts) -> Verdict:
    if not facts.arg("enable_hierarchical_cache"):
        return None
    found = deployment.account(facts)
    if found is None:
        return None
    size = facts.arg("hicache_size", 0)
    ratio = facts.arg("hicache_ratio", 2.0)
    pool = deployment.tokens_held(facts, found) * found.kv["kv_bytes_per_token"]
    each = size * 1e9 if size > 0 else ratio * pool
    ranks = -(-facts.arg("tp_size", 1) // facts.arg("nnodes", 1))
    free = facts.host_memory_bytes - HOST_RESERVE
    if ranks * each <= free:
        return None
    fits = max(0, free) / ranks
    return {
        "needed": f"{ranks * each / GIB:,.0f}",
        "ranks": ranks,
        "each": f"{each / GIB:.1f}",
        "how": f"--hicache-size {size:g}" if size > 0 else f"--hicache-ratio {ratio:g}",
        "has": f"{facts.host_memory_bytes / GIB:,.0f}",
        "do": f"give --hicache-size {int(fits / 1e9)} or less" if fits >= 1e9 else "leave it out",
    }


KNOWN = ("args", "config", "hardware", "precision")

RULES: tuple[Rule, ...] = (
    Rule(
        id="memory-does-not-fit",
        title="weights leave room for a cache",
        severity=FAIL,
        reads=KNOWN,
        condition=_does_not_fit,
        message="a rank loads {weights} GiB of the {free} GiB that are free, which leaves no cache "
        "at --mem-fraction-static {fraction}",
        cure="{do}",
        symptom="After all weights were read: `Loaded weights leave no GPU memory for the KV "
        "cache`.",
        cause="The fraction is of what is free before loading. With MTP the draft's own embedding "
        "and head count too while the cache is sized.",
        source=("SGLang mem_cache/kv_cache_configurator.py", "docs/benchmarks/memory.json"),
        at_start=False,
    ),
    Rule(
        id="memory-long-context",
        title="a request of the longest context fits into the cache",
        severity=WARN,
        reads=KNOWN,
        condition=_context_does_not_fit,
        message="the longest context, {asked} tokens ({whence}), is more than the {held} that the "
        "cache of a rank holds",
        cure="give --context-length {longest} or less, or {missing} GiB more a rank ({ways})",
        symptom="Long requests are refused with the cache's size, which the log alone says.",
        cause="All of a request lies in one attention group's cache, whose ranks each hold all of "
        "it; other ranks' memory does not help.",
        source=("sgl-project/sglang#30531", "docs/request-path.md"),
        at_start=False,
    ),
    Rule(
        id="memory-indexer-logits",
        title="what lies outside the memory fraction has room",
        severity=WARN,
        reads=KNOWN,
        condition=_outside,
        message="at a context of {context}, tables, the indexer's scores and buffers take {needed} "
        "GiB, and --mem-fraction-static {fraction} leaves {room} outside (largest: {largest} GiB)",
        cure="lower --mem-fraction-static, --context-length, --max-running-requests or "
        "--cuda-graph-max-bs-decode",
        symptom="All ranks end out of memory: at capture, or in the first long prefill.",
        cause="The scores are float32, rows x context. A prefill's are bounded and cut; those of "
        "decode graphs are made for the longest context. Neither is in the fraction.",
        source=(
            "sgl-project/sglang#37712",
            "sgl-project/sglang#38507",
            "sgl-project/sglang#35201",
            "sgl-project/sglang#39095",
        ),
        at_start=False,
    ),
    Rule(
        id="deepep-dispatch-limit",
        title="DeepEP's buffers take all rows of a decode step",
        severity=FAIL,
        reads=("args",),
        condition=_dispatch_limit,
        message="{what}, and DeepEP takes {limit}",
        cure="{do}",
        symptom="`x.size(0) <= num_max_dispatch_tokens_per_rank` fails, at capture or once the "
        "server is busy.",
        cause="The low-latency kernels' buffers are made for a number of rows; a verification "
        "has several a request.",
        source=(
            "sgl-project/sglang#28985",
            "sgl-project/sglang#28914",
            "sgl-project/sglang#29942",
        ),
    ),
    Rule(
        id="graph-sizes-miss-verify",
        title="decode graphs fit the batches that run",
        severity=WARN,
        reads=("args",),
        condition=_graphs_miss,
        message="decode graphs miss batches: {what}; {then}",
        cure="{do}",
        symptom="Time a token jumps at some concurrency, or capture ends with an empty list of "
        "sizes.",
        cause="A graph has rows = requests x verified tokens; where rows are split over attention "
        "ranks, sizes that cannot be are dropped.",
        source=("SGLang model_executor/runner/base_cuda_graph_runner.py",),
        at_start=False,
    ),
    Rule(
        id="hicache-host-memory",
        title="the host has memory for all pools' copies",
        severity=FAIL,
        reads=(*KNOWN, "host_memory_bytes"),
        condition=_host_memory,
        message="{how} makes {ranks} ranks ask for {each} GiB each, {needed} in all, and the host "
        "has {has} GiB, 10 of which stay free",
        cure="{do}",
        symptom="`Not enough host memory available` after the weights were read.",
        cause="Each rank copies all four pools: latents and index keys, of target and draft; ranks "
        "of an attention group hold the same tokens, each its own copy.",
        source=("SGLang mem_cache/pool_host/base.py",),
        at_start=False,
    ),
)
