"""What can be chosen about the tiny checkpoint, and its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_glm53.errors import Glm53Error

FP8_BLOCK = 128  # rows and columns that share one scale in GLM-5.3's FP8 checkpoints
DTYPES = ("bfloat16", "float32")

# The scheme of GLM-5.3: layers 0, 1, 2 run their indexer, then every fourth (6, 10, ...).
INDEX_TOPK_FREQ = 4
INDEX_SKIP_TOPK_OFFSET = 3

# GLM-5.3's own sizes: nothing larger is tiny, or fits where it is made.
LARGE_MODEL = {
    "layers": 78,
    "experts": 256,
    "heads": 64,
    "index_heads": 32,
    "hidden": 6144,
    "vocab": 154880,
}


@dataclass(frozen=True)
class TinyOptions:
    """Sizes of the tiny model; the fields that are not here are fixed in `config_json`.

    Attributes:
        layers: decoder layers of the target; the MTP layer comes on top.
        experts: routed experts of a MoE layer, each token goes to two of them.
        heads: attention heads.
        index_heads: heads of the indexer (128 wide each).
        index_topk: positions that attention reads for a query.
        hidden: width of the residual stream.
        vocab: rows of the embedding, at least 512.
        seed: of every random number; the same options give the same bytes.
        dtype: of the stored weights, `bfloat16` or `float32`.
        fp8: store the projections as e4m3 with one fp32 scale for each 128x128 block.
    """

    layers: int = 8
    experts: int = 8
    heads: int = 4
    index_heads: int = 8
    index_topk: int = 64
    hidden: int = 256
    vocab: int = 1024
    seed: int = 0
    dtype: str = "bfloat16"
    fp8: bool = False

    def check(self) -> None:
        """Refuse sizes that the architecture, or this generator, cannot have.

        Raises:
            Glm53Error: one line that names the option.
        """
        least = {
            "layers": 3,
            "experts": 2,
            "heads": 1,
            "index_heads": 1,
            "index_topk": 1,
            "hidden": 128,
            "vocab": 512,
            "seed": 0,
        }
        for name, low in least.items():
            value = getattr(self, name)
            if value < low:
                raise Glm53Error(f"--{name.replace('_', '-')} is {value}; use at least {low}")
            if value > LARGE_MODEL.get(name, value):
                most = LARGE_MODEL[name]
                raise Glm53Error(
                    f"--{name.replace('_', '-')} is {value}; use at most GLM-5.3's own {most}"
                )
        if self.hidden % 64:
            raise Glm53Error(f"--hidden is {self.hidden}; use a multiple of 64")
        if self.dtype not in DTYPES:
            raise Glm53Error(f"--dtype is {self.dtype!r}; use one of {', '.join(DTYPES)}")
        if self.fp8 and self.dtype != "bfloat16":
            raise Glm53Error("--fp8 goes with --dtype bfloat16; leave --dtype out")


def indexer_types(layers: int) -> list[str]:
    """`full` or `shared` for each decoder layer, by GLM-5.3's rule."""
    return [
        "full" if max(i - INDEX_SKIP_TOPK_OFFSET + 1, 0) % INDEX_TOPK_FREQ == 0 else "shared"
        for i in range(layers)
    ]


def config_json(options: TinyOptions, special_ids: dict[str, int]) -> dict[str, Any]:
    """The checkpoint's config.json, with the fields of GLM-5.3's own.

    Args:
        options: the sizes.
        special_ids: id of every special token.
    """
    config: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": options.dtype,
        "eos_token_id": stop_token_ids(special_ids),
        "first_k_dense_replace": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": options.hidden,
        "index_head_dim": 128,
        "index_n_heads": options.index_heads,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": INDEX_SKIP_TOPK_OFFSET,
        "index_topk": options.index_topk,
        "index_topk_freq": INDEX_TOPK_FREQ,
        "indexer_rope_interleave": True,
        "indexer_types": indexer_types(options.layers),
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "kv_lora_rank": 512,
        "max_position_embeddings": 16384,
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": options.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": options.heads,
        "num_experts_per_tok": 2,
        "num_hidden_layers": options.layers,
        "num_key_value_heads": options.heads,
        "num_nextn_predict_layers": 1,
        "pad_token_id": special_ids["<|endoftext|>"],
        "q_lora_rank": 128,
        "qk_head_dim": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": 64,
        "vocab_size": options.vocab,
    }
    if options.fp8:
        config["quantization_config"] = fp8_config(config)
    return config


def fp8_config(config: dict[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of a config.json whose projections are stored in FP8."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": modules_not_quantised(config),
    }


def stop_token_ids(special_ids: dict[str, int]) -> list[int]:
    return [special_ids[token] for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]


def modules_not_quantised(config: dict[str, Any]) -> list[str]:
    """Modules that an FP8 checkpoint keeps in bfloat16 or float32, by their name."""
    names = ["lm_head", "model.embed_tokens", "model.norm"]
    for layer, kind in enumerate([*config["indexer_types"], "full"]):
        prefix = f"model.layers.{layer}"
        names += [
            f"{prefix}.input_layernorm",
            f"{prefix}.post_attention_layernorm",
            f"{prefix}.self_attn.q_a_layernorm",
            f"{prefix}.self_attn.kv_a_layernorm",
        ]
        if kind == "full":
            names += [
                f"{prefix}.self_attn.indexer.k_norm",
                f"{prefix}.self_attn.indexer.weights_proj",
            ]
        if layer >= config["first_k_dense_replace"]:
            names += [f"{prefix}.mlp.gate", f"{prefix}.mlp.gate.e_score_correction_bias"]
    mtp = f"model.layers.{config['num_hidden_layers']}"
    names += [f"{mtp}.{part}" for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm")]
    return names
