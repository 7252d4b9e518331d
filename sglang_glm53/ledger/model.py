"""What a config says: names for formulas, parameters, and bytes of the cache."""

from __future__ import annotations

from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.formula import Number, Sheet
from sglang_glm53.memory import page

CONFIG = "config.json"
FP8_WIDTH = 1 + 4 / (128 * 128)  # bytes of an element, with its share of the block's fp32 scale
WIDTH: dict[str, Number] = {"fp8": FP8_WIDTH, "bf16": 2, "fp32": 4}


def names(config: Glm53Config) -> dict[str, Number]:
    """The names that formulas use for the config's fields; sizes in elements."""
    full = len(config.full_layers)
    dense = min(config.num_hidden_layers, config.first_k_dense_replace)
    return {
        "hidden": config.hidden_size,
        "vocab": config.vocab_size,
        "layers": config.num_hidden_layers,
        "dense_layers": dense,
        "moe_layers": config.num_hidden_layers - dense,
        "full_layers": full,
        "shared_layers": config.num_hidden_layers - full,
        "mtp_layers": config.num_nextn_predict_layers,
        "heads": config.num_attention_heads,
        "q_lora": config.q_lora_rank,
        "kv_lora": config.kv_lora_rank,
        "nope": config.qk_nope_head_dim,
        "rope": config.qk_rope_head_dim,
        "v_dim": config.v_head_dim,
        "index_heads": config.index_n_heads,
        "index_dim": config.index_head_dim,
        "index_topk": config.index_topk,
        "experts": config.n_routed_experts,
        "top_k": config.num_experts_per_tok,
        "shared_experts": config.n_shared_experts,
        "expert_inner": config.moe_intermediate_size,
        "dense_inner": config.intermediate_size,
        "tied": int(config.tie_word_embeddings),
        "max_positions": config.max_position_embeddings,
    }


def parameters(config: Glm53Config) -> Sheet:
    """Parameters by part, in elements; norms and biases included, FP8 scales not."""
    sheet = Sheet(names(config))

    def add(name: str, formula: str, title: str) -> None:
        sheet.add(name, formula, "parameters", title, CONFIG)

    add("a_projections", "hidden * (q_lora + kv_lora + rope)", "A projections, a layer")
    add("q_b", "q_lora * heads * (nope + rope)", "query up-projection, a layer")
    add("kv_b", "kv_lora * heads * (nope + v_dim)", "KV up-projection (W_UK, W_UV), a layer")
    add("o_proj", "heads * v_dim * hidden", "output projection, a layer")
    add("attention", "a_projections + q_b + kv_b + o_proj", "attention, a layer")
    add("index_query", "q_lora * index_heads * index_dim", "indexer: query projection")
    add("index_key", "hidden * index_dim", "indexer: key projection")
    add("index_gates", "hidden * index_heads", "indexer: gates")
    add("indexer", "index_query + index_key + index_gates", "indexer, a full layer")
    add("dense_mlp", "3 * hidden * dense_inner", "dense MLP, a layer")
    add("expert", "3 * hidden * expert_inner", "one routed expert")
    add("routed", "experts * expert", "routed experts, a layer")
    add("shared", "shared_experts * expert", "shared expert, a layer")
    add("router", "hidden * experts", "router, a layer")
    add("embedding", "vocab * hidden", "embedding")
    add("lm_head", "0 if tied else vocab * hidden", "lm_head")
    add("layer_norms", "2 * hidden + q_lora + kv_lora", "norms, a layer")
    add("index_norm", "2 * index_dim", "indexer: LayerNorm of the key")
    add("moe_layer", "routed + shared + router + experts", "FFN of a MoE layer")

    add("attention_total", "layers * attention", "attention, all layers")
    add("indexer_total", "full_layers * indexer", "indexers, all full layers")
    add("dense_total", "dense_layers * dense_mlp", "dense MLPs")
    add("routed_total", "moe_layers * routed", "routed experts, all layers")
    add("shared_total", "moe_layers * shared", "shared experts, all layers")
    add("router_total", "moe_layers * (router + experts)", "routers and their biases")
    add("norms_total", "layers * layer_norms + full_layers * index_norm + hidden", "norms")
    add(
        "parameters_total",
        "attention_total + indexer_total + dense_total + routed_total + shared_total"
        " + router_total + norms_total + embedding + lm_head",
        "parameters of the target model",
    )
    add(
        "mtp",
        "mtp_layers * (attention + indexer + layer_norms + index_norm + moe_layer"
        " + 2 * hidden * hidden + 3 * hidden)",
        "MTP layer (embedding and head are the target's)",
    )
    add("parameters_with_mtp", "parameters_total + mtp", "parameters with the MTP layer")
    add(
        "parameters_active",
        "attention_total + indexer_total + dense_total + moe_layers * top_k * expert"
        " + shared_total + router_total + norms_total + vocab * hidden",
        "parameters that one token meets (lm_head included, the embedding is a look-up)",
    )
    add(
        "parameters_active_layers",
        "parameters_active - vocab * hidden",
        "parameters that one token meets, without lm_head",
    )
    return sheet


LATENT_SOURCES = {
    "fp8": "SGLang mem_cache/kv_cache_configurator.py, calculate_mla_kv_cache_dim: FP8 latent, a "
    "float32 scale for each 128 of it, bf16 RoPE key",
    "bf16": "memory/page.py latent_bytes: bf16 latent and RoPE key, SGLang's default on Hopper",
    "fp8-raw": "SGLang mem_cache/kv_cache_configurator.py: FP8 without scales (trtllm, tilelang)",
    "fp32": "memory/page.py: this package's exact cache",
}
_LATENT = {
    "fp8": "kv_lora + kv_lora // 128 * 4 + rope * 2",
    "bf16": "(kv_lora + rope) * 2",
    "fp8-raw": "kv_lora + rope",
    "fp32": "(kv_lora + rope) * 4",
}


def cache(config: Glm53Config, kv: str, *, mtp: bool = False, page_tokens: int = 64) -> Sheet:
    """Bytes that a token, a page and a context cost on each rank that holds the request.

    Attention's ranks all hold the latents: they have one KV head, which cannot be split.
    """
    index = page.IndexPage(
        exact=kv == "fp32", page_size=page_tokens, head_dim=config.index_head_dim
    )
    sheet = Sheet(
        {
            **names(config),
            "page_tokens": page_tokens,
            "index_token": index.token_bytes,
            "drafts": int(mtp),
        }
    )
    sheet.add(
        "latent_elements", "kv_lora + rope", "elements", "latent and RoPE key, a layer", CONFIG
    )
    sheet.add(
        "latent_elements_token",
        "layers * latent_elements",
        "elements",
        "latents of a token, all layers",
        CONFIG,
    )
    sheet.add("latent_token", _LATENT[kv], "B", "latent of a token, a layer", LATENT_SOURCES[kv])
    pages = "memory/page.py IndexPage; SGLang mem_cache/index_key_cache.py"
    sheet.add("index_layer_token", "index_token", "B", "index key of a token, a full layer", pages)
    sheet.add(
        "latents_token", "(layers + drafts) * latent_token", "B", "latents of a token, all layers"
    )
    sheet.add(
        "index_keys_token",
        "(full_layers + drafts) * index_token",
        "B",
        "index keys of a token, all full layers",
        "shared layers have none: SGLang kv_cache_configurator.py _should_elide_dsa_index_k",
    )
    sheet.add(
        "kv_bytes_per_token", "latents_token + index_keys_token", "B", "cache of a token, in all"
    )
    sheet.add("latent_page", "page_tokens * latent_token", "B", "latents of a page, a layer")
    sheet.add("index_page", "page_tokens * index_token", "B", "index keys of a page, a full layer")
    sheet.add("page_bytes", "page_tokens * kv_bytes_per_token", "B", "a page, all layers")
    return sheet


def latent_bytes(config: Glm53Config, kv: str) -> Number:
    """Bytes of one token's latent in one layer."""
    return cache(config, kv)["latent_token"]


def index_bytes(config: Glm53Config, kv: str) -> Number:
    """Bytes of one token's index key in one full layer."""
    return cache(config, kv)["index_layer_token"]
