"""The rank slice of GLM-5.3: a model folder whose forward pass is what one rank computes.

With attention data parallelism 8 and expert parallelism 8, a rank holds the whole attention, the
dense layers, the shared experts, the embeddings, and 32 of the 256 routed experts. A model with
GLM-5.3's dimensions and 32 experts is therefore that rank's work without its communication. With
FP8 weights it takes 106.7 GiB, so it fits on one GPU of 141 GB.

The folder holds no weights: load it with `--load-format dummy`. Pure Python.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_glm53.config import FULL, SHARED
from sglang_glm53.errors import Glm53Error

VOCAB = 154880
DENSE_LAYERS = 3
EXPERTS_PER_TOKEN = 8
STOP_TOKENS = (154820, 154827, 154829)
WORDS = 2000  # of the tokenizer, which only has to load: prompts are given as ids


def indexer_types(layers: int) -> list[str]:
    """Per layer whether it runs its indexer: 0, 1, 2, and from 6 on every fourth do."""
    return [FULL if i < 3 or (i >= 6 and (i - 6) % 4 == 0) else SHARED for i in range(layers)]


def slice_config(*, layers: int, experts: int, vocab_size: int = VOCAB) -> dict[str, Any]:
    """The config.json of a slice: GLM-5.3's own, with fewer layers and routed experts.

    Args:
        layers: decoder layers; 78 is all of them. The MTP layer comes on top.
        experts: routed experts of a MoE layer on this rank; 256 over the number of ranks.
        vocab_size: rows of the embedding and of lm_head.

    Raises:
        Glm53Error: a size that no model can have.
    """
    if layers < 1:
        raise Glm53Error(f"a slice of {layers} layers is no model; give at least 1")
    if experts < EXPERTS_PER_TOKEN:
        raise Glm53Error(
            f"{experts} experts are fewer than the {EXPERTS_PER_TOKEN} that a token is sent to; "
            f"give at least {EXPERTS_PER_TOKEN}"
        )
    if vocab_size < WORDS:
        raise Glm53Error(f"a vocabulary of {vocab_size} is too small; give at least {WORDS}")
    stop = [token for token in STOP_TOKENS if token < vocab_size] or [vocab_size - 1]
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": 6144,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "pad_token_id": stop[0],
        "eos_token_id": stop,
        # attention (MLA)
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 192,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "rope_interleave": True,
        # indexer
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "indexer_rope_interleave": True,
        "indexer_types": indexer_types(layers),
        "index_share_for_mtp_iteration": True,
        # feed-forward
        "first_k_dense_replace": DENSE_LAYERS,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [],
        },
    }


def write_slice(folder: Path, *, layers: int, experts: int, vocab_size: int = VOCAB) -> Path:
    """Write config.json and a small tokenizer into `folder`, which is made if it is not there.

    Returns:
        The folder.

    Raises:
        Glm53Error: a size that no model can have, or a folder that cannot be written.
    """
    config = slice_config(layers=layers, experts=experts, vocab_size=vocab_size)
    files = {
        "config.json": config,
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "[UNK]",
        },
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise Glm53Error(
            f"cannot write the slice to {folder}: {error.strerror or error}; name another folder"
        ) from error
    return folder


def _tokenizer() -> dict[str, Any]:
    """tokenizer.json of one token a word, `t1`, `t2`, …"""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {"[UNK]": 0, **{f"t{i}": i for i in range(1, WORDS)}},
            "unk_token": "[UNK]",
        },
    }
