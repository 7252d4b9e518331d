"""Every tensor of the tiny checkpoint, under the names that GLM-5.3's checkpoints use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_glm53.tiny import structure
from sglang_glm53.tiny.options import TinyOptions
from sglang_glm53.tiny.randoms import normal

# How much one sublayer writes, in standard deviations of the residual stream it starts from,
# with eight layers. Together they turn about one greedy token in six away from the successor.
ATTENTION_GAIN = 0.36
FFN_GAIN = 0.22
MTP_GAIN = 0.50  # of both sublayers of the MTP layer
HIDDEN_PART = 0.25  # of the previous hidden state in eh_proj's output
QUERY_GAIN = 1.5  # standard deviation of attention scores is about its square
INDEX_BIAS = 0.5  # k_norm.bias on the entries without RoPE
INDEX_COMMON = 1.0  # of the constant part of an index query, against its random part

FLOAT32_NAMES = ("e_score_correction_bias",)  # stored in float32 whatever the dtype


def target_and_mtp(
    config: dict[str, Any], options: TinyOptions, tokenizer: Any
) -> Iterator[tuple[str, Any]]:
    """(name, float32 tensor) of the whole checkpoint, in the order of the files."""
    hidden, vocab, seed = options.hidden, options.vocab, options.seed
    successor, alone = structure.successor_of(tokenizer, vocab, seed)
    token, common = structure.embeddings(hidden, vocab, alone, seed)
    special = set(structure.special_token_ids(tokenizer).values())
    muted = sorted(special | set(range(tokenizer.get_vocab_size(), vocab)))

    yield "model.embed_tokens.weight", token + common
    depth = (8 / options.layers) ** 0.5
    for layer in range(options.layers):
        yield from _layer(config, layer, seed, ATTENTION_GAIN * depth, FFN_GAIN * depth, common)
    yield "model.norm.weight", _norm("model.norm", seed, hidden)
    yield "lm_head.weight", structure.lm_head(token, successor, muted)
    yield from _mtp_layer(config, options.layers, seed, common)


def _norm(name: str, seed: int, size: int) -> Any:
    return 1.0 + 0.05 * normal(f"{name}.weight", seed, (size,))


def _linear(name: str, seed: int, rows: int, columns: int, gain: float = 1.0) -> Any:
    """[rows, columns]; inputs of mean square 1 give outputs of mean square `gain`^2."""
    return normal(f"{name}.weight", seed, (rows, columns)) * (gain / columns**0.5)


def _layer(
    config: dict[str, Any], layer: int, seed: int, attention: float, ffn: float, common: Any
) -> Iterator[tuple[str, Any]]:
    prefix = f"model.layers.{layer}"
    hidden = config["hidden_size"]
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", _norm(f"{prefix}.{norm}", seed, hidden)
    full = layer == config["num_hidden_layers"] or config["indexer_types"][layer] == "full"
    yield from _attention(config, f"{prefix}.self_attn", seed, attention, common, full)
    if layer < config["first_k_dense_replace"]:
        yield from _mlp(f"{prefix}.mlp", seed, hidden, config["intermediate_size"], ffn)
    else:
        yield from _moe(config, f"{prefix}.mlp", seed, ffn)


def _attention(
    config: dict[str, Any], prefix: str, seed: int, gain: float, common: Any, full: bool
) -> Iterator[tuple[str, Any]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_lora, kv_lora = config["q_lora_rank"], config["kv_lora_rank"]
    rope, nope, value = (
        config["qk_rope_head_dim"],
        config["qk_nope_head_dim"],
        config["v_head_dim"],
    )
    # One direction of the query latent answers to the common part; only the indexer reads it.
    direction = normal(f"{prefix}.common", seed, (q_lora,))
    q_a = _linear(f"{prefix}.q_a_proj", seed, q_lora, hidden)
    q_a += direction[:, None] * common[None, :] * (INDEX_COMMON / structure.COMMON / hidden)
    yield f"{prefix}.q_a_proj.weight", q_a
    yield f"{prefix}.q_a_layernorm.weight", _norm(f"{prefix}.q_a_layernorm", seed, q_lora)
    yield (
        f"{prefix}.q_b_proj.weight",
        _linear(f"{prefix}.q_b_proj", seed, heads * (nope + rope), q_lora, QUERY_GAIN),
    )
    kv_a = _linear(f"{prefix}.kv_a_proj_with_mqa", seed, kv_lora + rope, hidden)
    kv_a[:, : structure.common_width(hidden)] = 0.0
    kv_a[kv_lora:] *= QUERY_GAIN
    yield f"{prefix}.kv_a_proj_with_mqa.weight", kv_a
    yield f"{prefix}.kv_a_layernorm.weight", _norm(f"{prefix}.kv_a_layernorm", seed, kv_lora)
    kv_b = _linear(f"{prefix}.kv_b_proj", seed, heads * (nope + value), kv_lora)
    kv_b.view(heads, nope + value, kv_lora)[:, :nope] *= QUERY_GAIN
    yield f"{prefix}.kv_b_proj.weight", kv_b
    # Softmax averages several values: about half of their size is left.
    yield (
        f"{prefix}.o_proj.weight",
        _linear(f"{prefix}.o_proj", seed, hidden, heads * value, 2.0 * gain),
    )
    if full:
        yield from _indexer(config, f"{prefix}.indexer", seed, direction)


def _indexer(
    config: dict[str, Any], prefix: str, seed: int, direction: Any
) -> Iterator[tuple[str, Any]]:
    import torch

    hidden, q_lora, rope = config["hidden_size"], config["q_lora_rank"], config["qk_rope_head_dim"]
    heads, width = config["index_n_heads"], config["index_head_dim"]
    # On the entries without RoPE, keys share k_norm.bias and queries answer to it.
    bias = torch.zeros(width)
    bias[rope:] = structure.signs(f"{prefix}.k_norm.bias", seed, width - rope) * INDEX_BIAS
    toward_bias = (bias / INDEX_BIAS)[:, None] * direction[None, :] / q_lora
    wq_b = _linear(f"{prefix}.wq_b", seed, heads * width, q_lora) + toward_bias.repeat(heads, 1)
    yield f"{prefix}.wq_b.weight", wq_b
    yield f"{prefix}.wk.weight", _linear(f"{prefix}.wk", seed, width, hidden)
    yield f"{prefix}.k_norm.weight", _norm(f"{prefix}.k_norm", seed, width)
    yield f"{prefix}.k_norm.bias", bias
    yield (
        f"{prefix}.weights_proj.weight",
        _linear(f"{prefix}.weights_proj", seed, heads, hidden),
    )


def _mlp(prefix: str, seed: int, hidden: int, inner: int, gain: float) -> Iterator[tuple[str, Any]]:
    yield f"{prefix}.gate_proj.weight", _linear(f"{prefix}.gate_proj", seed, inner, hidden)
    yield f"{prefix}.up_proj.weight", _linear(f"{prefix}.up_proj", seed, inner, hidden)
    # silu(a) * b of two standard normals has a root mean square of 0.6.
    yield (
        f"{prefix}.down_proj.weight",
        _linear(f"{prefix}.down_proj", seed, hidden, inner, gain / 0.6),
    )


def _moe(config: dict[str, Any], prefix: str, seed: int, gain: float) -> Iterator[tuple[str, Any]]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts = config["n_routed_experts"]
    # Two experts of weight about 2.5 / 2 each, and the shared one.
    gain /= (2 * (config["routed_scaling_factor"] / 2) ** 2 + 1) ** 0.5
    yield f"{prefix}.gate.weight", _linear(f"{prefix}.gate", seed, experts, hidden)
    yield (
        f"{prefix}.gate.e_score_correction_bias",
        0.1 * normal(f"{prefix}.gate.e_score_correction_bias", seed, (experts,)),
    )
    for expert in range(experts):
        yield from _mlp(f"{prefix}.experts.{expert}", seed, hidden, inner, gain)
    inner *= config["n_shared_experts"]
    yield from _mlp(f"{prefix}.shared_experts", seed, hidden, inner, gain)


def _mtp_layer(
    config: dict[str, Any], layer: int, seed: int, common: Any
) -> Iterator[tuple[str, Any]]:
    import torch

    prefix, hidden = f"model.layers.{layer}", config["hidden_size"]
    eh_proj = _linear(f"{prefix}.eh_proj", seed, hidden, 2 * hidden, HIDDEN_PART * 2**0.5)
    eh_proj[:, :hidden] = torch.eye(hidden)  # the next token's embedding passes through
    yield f"{prefix}.eh_proj.weight", eh_proj
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{prefix}.{norm}.weight", _norm(f"{prefix}.{norm}", seed, hidden)
    yield from _layer(config, layer, seed, MTP_GAIN, MTP_GAIN, common)
