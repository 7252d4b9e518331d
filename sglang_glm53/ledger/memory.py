"""Bytes of GPU memory: what a rank stores, what a pass over the model must read.

Read, each once a pass: the weights of every distinct routed expert that some row is sent to; all
other weights; of the cache the selected latents of every request, and in full layers the index keys
of its whole context. Several rows of one request (a verification) select nearly the same tokens:
their latents count once, the least that must be read. W_UK and W_UV are bf16, in which SGLang keeps
the absorbed halves of kv_b; lm_head, router and gates are bf16. Not counted as read: norms,
embedding rows and activations (less than 0.1 % together), and whatever is written.
"""

from __future__ import annotations

from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.formula import Number, Sheet
from sglang_glm53.ledger.model import WIDTH, index_bytes, latent_bytes, names
from sglang_glm53.ledger.topology import VOCAB_PADDING, Topology, Workload

# One layer's weights as a rank reads them in a pass.
ATTENTION = (
    "(hidden * (q_lora + kv_lora + rope) + q_lora * heads_here * (nope + rope)"
    " + heads_here * v_dim * hidden) * w + kv_lora * heads_here * (nope + v_dim) * plain"
)
INDEXER = (
    "q_lora * index_heads * index_dim * w + hidden * index_dim * w_index_key"
    " + hidden * index_heads * plain"
)
EXPERT_HERE = "3 * hidden * expert_inner / moe_tp * w"
SHARED_HERE = "shared_experts * 3 * hidden * expert_inner / shared_ranks * w"
ROUTER = "hidden * experts * plain"
LM_HEAD = "vocab_padded / head_ranks * hidden * plain"
EMBEDDING = "vocab_padded / embed_ranks * hidden * plain"
DENSE = "3 * hidden * dense_inner / dense_ranks * w"
EH_PROJ = "2 * hidden * hidden * plain"
KV_B = "kv_lora * heads_here * (nope + v_dim) * w"
NORMS = "(2 * hidden + q_lora + kv_lora) * plain"

READS = {
    "attention": "layers * attention_layer",
    "indexer": "full_layers * indexer_layer",
    "dense MLP": "dense_layers * dense_layer",
    "routed experts": "moe_layers * experts_read * expert_here",
    "shared experts": "moe_layers * shared_layer",
    "router": "moe_layers * router_layer",
    "lm_head": "lm_head_here",
    "latents": "layers * requests * selected * latent_token",
    "index keys": "full_layers * requests * context * index_token",
}
DRAFT_READS = {
    "draft: attention": "attention_layer + selects * indexer_layer",
    # The projection of embedding and hidden state stays bf16 in SGLang.
    "draft: projection": "eh_proj",
    "draft: routed experts": "experts_read * expert_here",
    "draft: shared experts": "shared_layer",
    "draft: router": "router_layer",
    "draft: lm_head": "lm_head_here",
    "draft: cache": "requests * (selected * latent_token + selects * context * index_token)",
}
SOURCE = "the config's shapes; SGLang's layers under this topology"


def weight_names(
    config: Glm53Config,
    topology: Topology,
    *,
    w: Number | None = None,
    w_index_key: Number | None = None,
) -> dict[str, Number]:
    """Names of the formulas above.

    Args:
        w: bytes of an element of a projection; default: as the topology says.
        w_index_key: of the indexer's key projection. It and the gates are one bf16 matrix on a
            GPU, also where the checkpoint has it in FP8; the default.
    """
    form = topology.weights
    plain = 4 if form == "fp32" else 2
    deepep = topology.a2a == "deepep"
    return {
        **names(config),
        "w": WIDTH[form] if w is None else w,
        "plain": plain,
        "w_index_key": plain if w_index_key is None else w_index_key,
        "tp": topology.tp,
        "dp": topology.dp,
        "ep": topology.ep,
        "attn_tp": topology.attn_tp,
        "moe_tp": topology.moe_tp,
        "experts_here": config.n_routed_experts // topology.ep,
        "heads_here": config.num_attention_heads // topology.attn_tp,
        "dense_ranks": 1 if topology.dense_tp else topology.tp,
        "shared_ranks": 1 if deepep else topology.tp,
        "head_ranks": topology.head_ranks,
        "embed_ranks": topology.embed_ranks,
        "vocab_padded": -(-config.vocab_size // VOCAB_PADDING) * VOCAB_PADDING,
        "latent_token": latent_bytes(config, topology.kv),
        "index_token": index_bytes(config, topology.kv),
    }


def layer_weights(sheet: Sheet) -> None:
    """Add what a rank reads of one layer's weights."""
    for name, formula, title in (
        ("attention_layer", ATTENTION, "attention of a layer, on a rank"),
        ("indexer_layer", INDEXER, "indexer of a full layer; every rank has it whole"),
        ("dense_layer", DENSE, "dense MLP of a layer, on a rank"),
        ("expert_here", EXPERT_HERE, "a rank's part of one routed expert"),
        ("shared_layer", SHARED_HERE, "shared expert of a layer, on a rank"),
        ("router_layer", ROUTER, "router of a layer; every rank has it whole"),
        ("lm_head_here", LM_HEAD, "lm_head, on a rank"),
        ("embedding_here", EMBEDDING, "embedding, on a rank"),
        ("eh_proj", EH_PROJ, "projection of embedding and hidden state in the MTP layer"),
        ("kv_b_layer", KV_B, "kv_b as loaded, kept beside its absorbed halves"),
        ("norms_layer", NORMS, "norms of a layer"),
    ):
        sheet.add(name, formula, "B", title, SOURCE)


def distinct_experts(sheet: Sheet, rows: Number, routing: str) -> Number:
    """Distinct routed experts of one rank that `rows` tokens, of all ranks, are sent to."""
    chosen = Sheet({"rows": rows}, sheet)
    formula = {
        "even": "min(experts, rows * top_k) / ep",
        "random": "experts * (1 - (1 - top_k / experts) ** rows) / ep",
    }[routing]
    return chosen.add("distinct", formula).value


def reads(
    parent: Sheet, formulas: dict[str, str], *, prefix: str = "read", **names_: Number
) -> Sheet:
    """A sheet with one figure for each part that a pass reads, and `total`."""
    sheet = Sheet(names_, parent)
    parts = {part: "_".join((prefix, *part.replace(":", "").split())) for part in formulas}
    for part, formula in formulas.items():
        sheet.add(parts[part], formula, "B", part, SOURCE)
    sheet.add("total", " + ".join(parts.values()), "B", "read in a pass")
    return sheet


def stored(config: Glm53Config, topology: Topology, *, mtp: bool) -> Sheet:
    """Bytes of a rank's memory that the loaded weights take."""
    sheet = Sheet({**weight_names(config, topology), "drafts": int(mtp)})
    layer_weights(sheet)
    add = sheet.add
    add("stored_attention", "layers * (attention_layer + kv_b_layer)", "B", "attention", SOURCE)
    add("stored_indexers", "full_layers * indexer_layer", "B", "indexers", SOURCE)
    add("stored_dense", "dense_layers * dense_layer", "B", "dense MLPs", SOURCE)
    add("stored_routed", "moe_layers * experts_here * expert_here", "B", "routed experts", SOURCE)
    add("stored_shared", "moe_layers * shared_layer", "B", "shared experts", SOURCE)
    add("stored_routers", "moe_layers * (router_layer + experts * 4)", "B", "routers", SOURCE)
    add(
        "stored_vocabulary",
        "embedding_here + (0 if tied else lm_head_here)",
        "B",
        "embedding and lm_head",
        SOURCE,
    )
    add(
        "stored_norms",
        "layers * norms_layer + full_layers * 2 * index_dim * plain + hidden * plain",
        "B",
        "norms",
        SOURCE,
    )
    add("stored_rope", "max_positions * rope * 4", "B", "RoPE's table, float32", SOURCE)
    parts = [name for name in sheet.figures if name.startswith("stored_")]
    add("stored_target", " + ".join(parts), "B", "loaded weights of the target")
    add(
        "stored_draft",
        "drafts * (attention_layer + kv_b_layer + indexer_layer + experts_here * expert_here"
        " + shared_layer + router_layer + experts * 4 + norms_layer + eh_proj"
        " + 3 * hidden * plain)",
        "B",
        "loaded weights of the MTP layer (embedding and head are the target's)",
        SOURCE,
    )
    add("stored_bytes", "stored_target + stored_draft", "B", "loaded weights of a rank")
    add(
        "stored_while_sizing",
        "stored_bytes + drafts * (embedding_here + lm_head_here)",
        "B",
        "loaded weights while the cache is sized, with the draft's own embedding and head",
        "SGLang speculative/eagle_worker_v2.py: alloc_memory_pool, then init_lm_head",
    )
    return sheet


def decode_reads(config: Glm53Config, topology: Topology, workload: Workload) -> Sheet:
    """One plain decode step of a rank: one row a request."""
    base = _base(config, topology)
    return reads(
        base,
        READS,
        requests=requests_here(topology, workload),
        context=workload.context,
        selected=min(workload.context, config.index_topk),
        experts_read=distinct_experts(base, workload.batch, workload.routing),
    )


def mtp_reads(config: Glm53Config, topology: Topology, workload: Workload) -> list[Sheet]:
    """Passes of one step with MTP: the verification, the first draft, and the later drafts.

    The first draft comes out of the pass that writes the verified rows into the draft's cache; it
    has as many rows as the verification. The later ones have one row a request.
    """
    base = _base(config, topology)
    verified = distinct_experts(base, workload.batch * workload.tokens, workload.routing)
    drafted = distinct_experts(base, workload.batch, workload.routing)
    shape: dict[str, Number] = {
        "requests": requests_here(topology, workload),
        "context": workload.context,
        "selected": min(workload.context, config.index_topk),
    }
    later = 0 if config.index_share_for_mtp_iteration else 1
    return [
        reads(base, READS, experts_read=verified, **shape),
        reads(base, DRAFT_READS, experts_read=verified, selects=1, **shape),
        reads(base, DRAFT_READS, experts_read=drafted, selects=later, **shape),
    ]


def requests_here(topology: Topology, workload: Workload) -> int:
    """Requests of the rank that has most of them."""
    return -(-workload.batch // topology.dp)


def _base(config: Glm53Config, topology: Topology) -> Sheet:
    sheet = Sheet(weight_names(config, topology))
    layer_weights(sheet)
    return sheet
