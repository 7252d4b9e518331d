"""Quantisation schemes that SGLang's own class serves: whole, and with something left out."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.headers import Headers, Tensor
from sglang_glm53.checks.schemes import misfits

EXPERT = "model.layers.3.mlp.experts.0.down_proj"
ROWS, COLUMNS = 6144, 2048

NVFP4 = {
    f"{EXPERT}.weight": ("U8", (ROWS, COLUMNS // 2)),
    f"{EXPERT}.weight_scale": ("F8_E4M3", (ROWS, COLUMNS // 16)),
    f"{EXPERT}.weight_scale_2": ("F32", ()),
    f"{EXPERT}.input_scale": ("F32", ()),
}
W4AFP8 = {
    f"{EXPERT}.weight": ("I8", (ROWS, COLUMNS // 2)),
    f"{EXPERT}.weight_scale_inv": ("F32", (ROWS, COLUMNS // 128)),
    "model.layers.3.self_attn.o_proj.weight": ("F8_E4M3", (ROWS, 16384)),
    "model.layers.3.self_attn.o_proj.weight_scale_inv": ("F32", (48, 128)),
}
PACKED = {
    f"{EXPERT}.weight_packed": ("I32", (ROWS, COLUMNS // 8)),
    f"{EXPERT}.weight_scale": ("BF16", (ROWS, COLUMNS // 32)),
    f"{EXPERT}.weight_shape": ("I32", (2,)),
}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]] = {
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4),
    "nvfp4-older": ({"quant_method": "modelopt_fp4"}, NVFP4),
    "w4afp8": ({"quant_method": "w4afp8"}, W4AFP8),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}},
        PACKED,
    ),
}


def verdict(declared: dict[str, Any] | None, tensors: dict[str, tuple[str, tuple[int, ...]]]):
    headers = Headers({n: Tensor(dtype, shape, "f") for n, (dtype, shape) in tensors.items()})
    return misfits(Facts.only(headers=headers, raw_config={"quantization_config": declared}))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_one_passes(name: str) -> None:
    assert verdict(*CONFIGS[name]) is None


@pytest.mark.parametrize("name", CONFIGS)
def test_a_weight_without_what_belongs_to_it(name: str) -> None:
    declared, tensors = CONFIGS[name]
    scale = next(n for n in tensors if n.startswith(f"{EXPERT}.weight_scale"))
    found = verdict(declared, {n: t for n, t in tensors.items() if n != scale})
    assert found["file"] == "f" and found["what"].endswith(f"without {scale}")


@pytest.mark.parametrize("name", ["nvfp4", "w4afp8"])
def test_scales_of_another_group_size(name: str) -> None:
    declared, tensors = CONFIGS[name]
    scale = next(n for n in tensors if n.startswith(f"{EXPERT}.weight_scale"))
    dtype, (rows, columns) = tensors[scale]
    found = verdict(declared, {**tensors, scale: (dtype, (rows, columns // 2))})
    assert found["first"] == scale and f"[{rows}, {columns}]" in found["what"]


@pytest.mark.parametrize("name", ["nvfp4", "w4afp8"])
def test_quantised_weights_without_a_config(name: str) -> None:
    found = verdict(None, CONFIGS[name][1])
    assert found["file"] == "config.json" and "is not there" in found["what"]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_of_another_precision(name: str) -> None:
    other = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors = {n: t for n, t in CONFIGS[name][1].items() if EXPERT in n}
    if name == "compressed-tensors":
        other = {"quant_method": "w4afp8"}
        tensors = {n.replace("_packed", ""): t for n, t in tensors.items()}
    assert "no matrix is" in verdict(other, tensors)["what"]


def test_compressed_tensors_without_groups() -> None:
    assert "config_groups" in verdict({"quant_method": "compressed-tensors"}, PACKED)["what"]


def test_a_method_that_is_not_known_is_not_judged() -> None:
    assert verdict({"quant_method": "quark"}, NVFP4) is None
