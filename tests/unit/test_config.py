"""config.py: what is read, what is filled in, what is refused with one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_glm53.checkpoint import checkpoint_tensors, layer_tensors, scale_shape
from sglang_glm53.config import (
    FULL,
    MODEL_DEFINITION,
    SHARED,
    Glm53Config,
    fill_model_definition,
    schedule,
)
from sglang_glm53.errors import Glm53Error

# The published configuration (zai-org/GLM-5.3), without what transformers drops when it re-saves.
GLM53 = {
    "vocab_size": 154880,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
}


def read(**changes: object) -> Glm53Config:
    return Glm53Config.from_hf({**GLM53, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"first_k_dense_replace": "x"},
        {"first_k_dense_replace": -1},
        {"vocab_size": "x"},
        {"hidden_size": -4},
        {"hidden_size": True},
        {"num_attention_heads": 64.0},
        {"n_routed_experts": []},
        {"n_group": "1"},
        {"num_hidden_layers": 10**9},
        {"rms_norm_eps": float("nan")},
        {"routed_scaling_factor": "2.5"},
        {"rope_parameters": [8000000]},
        {"rope_parameters": {"rope_theta": "x"}},
        {"rope_scaling": "yarn"},
        {"indexer_types": 78},
        {"indexer_types": [1] * 78},
        {"index_topk_pattern": 4},
        {"mlp_layer_types": "dense"},
    ],
    ids=str,
)
def test_a_wrong_type_is_one_line_that_names_the_field(changes: dict[str, object]) -> None:
    (name,) = changes
    with pytest.raises(Glm53Error, match=r"config\.json: \w+") as told:
        read(**changes)
    assert len(str(told.value)) < 200 and "\n" not in str(told.value)


def test_published_numbers() -> None:
    config = read()
    assert config.full_layers == (0, 1, 2, *range(6, 78, 4))
    assert len(config.full_layers) == 21
    sizes = {name: _product(shape) for name, shape in checkpoint_tensors(config)}
    mtp = sum(n for name, n in sizes.items() if name.startswith("model.layers.78."))
    # 743.38 B and 9.95 B: the model card's figures, from the matrix shapes
    assert round((sum(sizes.values()) - mtp) / 1e9, 2) == 743.38
    assert round(mtp / 1e9, 2) == 9.95
    assert len(layer_tensors(config, 78)) == 791
    assert scale_shape((576, 6144)) == (5, 48)


def test_fills_what_transformers_drops_and_says_so() -> None:
    config = read()
    assert set(config.filled) == {f"{k}={v}" for k, v in MODEL_DEFINITION.items()}
    hf = SimpleNamespace(**GLM53)
    fill_model_definition(hf)
    assert hf.indexer_rope_interleave is True and hf.topk_method == "noaux_tc"
    assert Glm53Config.from_hf(hf).filled == ()


def test_an_object_reads_as_its_dict() -> None:
    assert Glm53Config.from_hf(SimpleNamespace(**GLM53)) == read()


@pytest.mark.parametrize(
    ("freq", "offset", "expected"),
    [
        (4, 3, "FFFSSSFSSSFS"),
        (1, None, "FFFFFFFFFFFF"),
        (4, None, "FFSSSFSSSFSS"),
        (3, 1, "FSSFSSFSSFSS"),
    ],
)
def test_schedule(freq: int, offset: int | None, expected: str) -> None:
    wanted = tuple(FULL if letter == "F" else SHARED for letter in expected)
    assert schedule(12, freq, offset) == wanted


def test_pattern() -> None:
    pattern = "FS" * 39
    config = read(index_topk_freq=None, index_topk_pattern=pattern)
    assert config.full_layers == tuple(range(0, 78, 2))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"attention_bias": True}, "attention_bias"),
        ({"index_init_tokens": 4}, "index_init_tokens"),
        ({"index_local_tokens": 4}, "index_local_tokens"),
        ({"index_kpool": 2}, "index_kpool"),
        ({"router_fp32": True}, "router_fp32"),
        ({"mla_nope": True}, "mla_nope"),
        ({"swiglu_limit": 7.0}, "swiglu_limit is 7.0 where GLM-5.3 has None"),
        ({"index_head_dim": 64}, "index_head_dim"),
        ({"index_topk": 0}, "index_topk"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "yarn"),
        ({"indexer_types": [SHARED] + [FULL] * 77, "index_topk_freq": None}, "layer 0"),
        ({"indexer_types": [FULL] * 77, "index_topk_freq": None}, "77 entries for 78"),
        ({"indexer_types": ["none"] * 78, "index_topk_freq": None}, "'none'"),
        # an IndexCache override that SGLang would silently ignore
        ({"indexer_types": [FULL] * 78, "index_topk_freq": 4}, "would do nothing"),
        ({"indexer_types": [FULL] * 78, "index_topk_pattern": "FS" * 39}, "would do nothing"),
        ({"index_topk_pattern": "SF" * 39}, "layer 0"),
        ({"index_topk_pattern": "FS"}, "78 letters"),
        ({"index_topk_freq": 0}, "1 or more"),
        ({"index_topk_freq": "4"}, "'4'"),
        # what transformers makes of a config.json without a theta
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 8e6, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 2}, "topk_group"),
        ({"mlp_layer_types": ["sparse"] * 78}, "mlp_layer_types"),
        ({"num_nextn_predict_layers": 2}, "one MTP layer"),
        ({"num_experts_per_tok": 300}, "exceeds"),
    ],
)
def test_refuses_with_one_line(changes: dict, says: str) -> None:
    with pytest.raises(Glm53Error) as error:
        read(**changes)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_indexer_types_null_makes_an_override_work() -> None:
    config = read(indexer_types=None, index_topk_freq=2, index_skip_topk_offset=1)
    assert config.full_layers == tuple(range(0, 78, 2))


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
