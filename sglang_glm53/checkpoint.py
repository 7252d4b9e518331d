"""The tensors of a GLM-5.3 checkpoint: names and shapes, from the configuration alone.

Pure Python. The loader holds what it reads against this table; so does the checkpoint scan.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_glm53.config import Glm53Config

Shape = tuple[int, ...]

FP8_BLOCK = 128
SCALE_SUFFIX = "_scale_inv"


def layer_prefix(layer_id: int) -> str:
    return f"model.layers.{layer_id}."


def model_tensors(config: Glm53Config) -> dict[str, Shape]:
    """Tensors outside the layers: embedding, final norm, lm_head (absent when tied)."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def layer_tensors(config: Glm53Config, layer_id: int) -> dict[str, Shape]:
    """Tensors of one decoder layer, or of the MTP layer at index ``num_hidden_layers``."""
    is_mtp = layer_id == config.num_hidden_layers
    prefix = layer_prefix(layer_id)
    shapes: dict[str, Shape] = {
        f"{prefix}input_layernorm.weight": (config.hidden_size,),
        f"{prefix}post_attention_layernorm.weight": (config.hidden_size,),
    }
    shapes.update(_attention(config, prefix + "self_attn."))
    if is_mtp or config.runs_indexer(layer_id):
        shapes.update(_indexer(config, prefix + "self_attn.indexer."))
    if is_mtp or config.is_sparse(layer_id):
        shapes.update(_moe(config, prefix + "mlp."))
    else:
        shapes.update(_mlp(config.hidden_size, config.intermediate_size, prefix + "mlp."))
    if is_mtp:
        hidden = config.hidden_size
        shapes[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
    return shapes


def mtp_duplicates(config: Glm53Config) -> dict[str, Shape]:
    """Copies of the target's embedding and head that some checkpoints store with the MTP layer."""
    prefix = layer_prefix(config.num_hidden_layers)
    shape = (config.vocab_size, config.hidden_size)
    return {f"{prefix}embed_tokens.weight": shape, f"{prefix}shared_head.head.weight": shape}


def checkpoint_tensors(config: Glm53Config) -> Iterator[tuple[str, Shape]]:
    """Every tensor of a BF16 checkpoint, in layer order."""
    yield from model_tensors(config).items()
    for layer_id in range(config.num_hidden_layers + config.num_nextn_predict_layers):
        yield from layer_tensors(config, layer_id).items()


def scale_shape(shape: Shape) -> Shape:
    """Shape of the FP32 scales of a 128 x 128 block-scaled FP8 matrix."""
    return tuple(-(-size // FP8_BLOCK) for size in shape)


def _attention(config: Glm53Config, prefix: str) -> dict[str, Shape]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    return {
        f"{prefix}q_a_proj.weight": (config.q_lora_rank, hidden),
        f"{prefix}q_a_layernorm.weight": (config.q_lora_rank,),
        f"{prefix}q_b_proj.weight": (heads * config.qk_head_dim, config.q_lora_rank),
        f"{prefix}kv_a_proj_with_mqa.weight": (config.latent_dim, hidden),
        f"{prefix}kv_a_layernorm.weight": (config.kv_lora_rank,),
        f"{prefix}kv_b_proj.weight": (
            heads * (config.qk_nope_head_dim + config.v_head_dim),
            config.kv_lora_rank,
        ),
        f"{prefix}o_proj.weight": (hidden, heads * config.v_head_dim),
    }


def _indexer(config: Glm53Config, prefix: str) -> dict[str, Shape]:
    width = config.index_n_heads * config.index_head_dim
    return {
        f"{prefix}wq_b.weight": (width, config.q_lora_rank),
        f"{prefix}wk.weight": (config.index_head_dim, config.hidden_size),
        f"{prefix}k_norm.weight": (config.index_head_dim,),
        f"{prefix}k_norm.bias": (config.index_head_dim,),
        f"{prefix}weights_proj.weight": (config.index_n_heads, config.hidden_size),
    }


def _mlp(hidden: int, inner: int, prefix: str) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _moe(config: Glm53Config, prefix: str) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    shapes: dict[str, Shape] = {
        f"{prefix}gate.weight": (config.n_routed_experts, hidden),
        f"{prefix}gate.e_score_correction_bias": (config.n_routed_experts,),
    }
    for expert in range(config.n_routed_experts):
        shapes.update(_mlp(hidden, inner, f"{prefix}experts.{expert}."))
    if config.n_shared_experts:
        shapes.update(_mlp(hidden, inner * config.n_shared_experts, f"{prefix}shared_experts."))
    return shapes
