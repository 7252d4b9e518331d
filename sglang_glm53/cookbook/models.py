"""config.json of the checkpoints that recipes name, as far as SGLang's resolution reads it."""

from __future__ import annotations

from typing import Any

from sglang_glm53.cookbook.recipe import MINIATURE, Recipe
from sglang_glm53.ledger.glm53 import config_json

# What NVIDIA's modelopt writes: routed experts in blocks of 16, the rest as it was.
_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "ignore": ["lm_head", "*self_attn*", "*shared_experts*", "*mlp.gate", "*layers.[0-2].*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "input_activations": {
                "num_bits": 4,
                "type": "float",
                "group_size": 16,
                "dynamic": False,
            },
        }
    },
}


def config_of(recipe: Recipe) -> dict[str, Any]:
    """The config.json of a recipe's model."""
    if recipe.model == MINIATURE:
        from sglang_glm53.tiny.options import TinyOptions
        from sglang_glm53.tiny.options import config_json as tiny_config
        from sglang_glm53.tiny.tokenizer import SPECIAL_TOKENS

        return tiny_config(TinyOptions(), {token: i for i, token in enumerate(SPECIAL_TOKENS)})
    config = config_json()
    if recipe.weights == "bf16":
        del config["quantization_config"]
    elif recipe.weights == "nvfp4":
        config["quantization_config"] = _NVFP4
    return config
