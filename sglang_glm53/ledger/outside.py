"""What a rank allocates beside weights and cache, from what `--mem-fraction-static` leaves.

Only what follows from sizes: tables, the indexer's scores, DeepEP's buffers. Activations of a
prefill and the graphs' own memory do not; the recorded slices had 3.5 GiB for a prefill graph of
8,192 tokens and 0.2 GiB for verifying 8 requests (docs/benchmarks/memory.json).
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.formula import Number, Sheet
from sglang_glm53.ledger.topology import Topology

# SGLang layers/attention/mqa_logits_utils.py: shares of what lies outside, and of all memory.
BUDGET_OF_OUTSIDE, BUDGET_OF_ALL = 0.2, 0.3
DISPATCH_LIMIT = 128  # SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK
FEWEST_REQUESTS, MOST_REQUESTS = 2048, 4096


@dataclass(frozen=True)
class Use:
    """How a rank is used.

    Attributes:
        context: the longest request, tokens. pool_tokens: of the rank's cache.
        requests: --max-running-requests of an attention group; None: SGLang's own choice.
        graph_batch: requests of the largest decode graph; 0 without graphs.
        tokens, steps: verified tokens and drafts of a step with MTP; 1 and 0 without.
        chunk: tokens of a prefill pass, of one attention group; 0 where nothing is prefilled.
        dispatch_limit: tokens that a rank may send to DeepEP's low-latency kernels; 0: not used.
        budget: share of what lies outside that one pass's scores may take in a prefill.
    """

    context: int
    pool_tokens: int
    requests: int | None = None
    graph_batch: int = 0
    tokens: int = 1
    steps: int = 0
    chunk: int = 8192
    dispatch_limit: int = 0
    budget: float = BUDGET_OF_OUTSIDE


def outside(
    config: Glm53Config, topology: Topology, use: Use, *, memory: Number, outside: Number
) -> Sheet:
    """Bytes by part, and `needed`.

    Args:
        memory: of the GPU. outside: what the memory fraction leaves.
    """
    requests = use.requests
    if requests is None:
        requests = min(
            max(use.pool_tokens * 512 // use.context, FEWEST_REQUESTS),
            MOST_REQUESTS,
            use.pool_tokens // 2,
        )
    names: dict[str, Number] = {
        "requests": requests,
        "context": use.context,
        "extra": max(4 + (use.tokens if use.steps else 0), 64 if use.steps else 0),
        "graph_batch": use.graph_batch,
        "verified": use.tokens,
        "steps": use.steps,
        "chunk": use.chunk,
        "hidden": config.hidden_size,
        "experts": config.n_routed_experts,
        "dispatch": use.dispatch_limit,
        "memory": memory,
        "outside": outside,
        "budget": use.budget,
        "budget_of_all": BUDGET_OF_ALL,
    }
    sheet = Sheet(names)
    add = sheet.add
    add(
        "request_table",
        "(requests + 1) * (context + extra) * 4",
        "B",
        "table of each request's places",
        "SGLang mem_cache/memory_pool.py ReqToTokenPool",
    )
    add(
        "graph_tables",
        "(2 * graph_batch * verified + (steps - 1) * graph_batch) * (context + extra) * 4"
        " if steps > 0 else 0",
        "B",
        "graphs: tables of places, for verification, draft-extend and drafts",
        "SGLang layers/attention/dsa_backend.py init_cuda_graph_state; without MTP it needs none",
    )
    add(
        "graph_scores",
        "graph_batch * verified * ceil((context + extra) / 256) * 256 * 4",
        "B",
        "graphs: the indexer's scores, of the longest context",
        "SGLang layers/attention/dsa/dsa_indexer.py _get_topk_paged: float32, not bounded",
    )
    add(
        "prefill_scores",
        "min(chunk * context * 4, budget * outside, budget_of_all * memory)",
        "B",
        "prefill: the indexer's scores",
        "SGLang layers/attention/mqa_logits_utils.py; SGLANG_DSA_MQA_LOGITS_FREE_MEM_FRACTION",
    )
    add("dispatch_message", "16 + 2 * hidden", "B", "DeepEP: a row that is sent", "csrc/config.hpp")
    add(
        "combine_message",
        "2 * hidden + hidden // 128 * 4",
        "B",
        "DeepEP: a row that comes back",
        "csrc/config.hpp",
    )
    add(
        "deepep",
        "4 * experts * dispatch * max(dispatch_message, combine_message)",
        "B",
        "DeepEP's low-latency buffers: two to send, two to receive",
        "DeepEP csrc/config.hpp LowLatencyLayout",
    )
    add(
        "needed",
        "request_table + graph_tables + graph_scores + prefill_scores + deepep",
        "B",
        "in all",
    )
    return sheet
