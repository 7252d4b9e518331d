"""The kernels of the decode chain: equal to their twins, and compiled for Hopper."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
HOPPER = 90
FP8, FP32, BF16, INT, LONG = "*fp8e4nv", "*fp32", "*bf16", "*i32", "*i64"
GROUPS = {"GROUP_SIZE": 128, "SMALLEST_AMAX": 1e-10, "LARGEST": 448.0}


@pytest.mark.parametrize("script", ["interpreted_chain", "interpreted_layer"])
def test_kernels_equal_their_twins(script: str) -> None:
    """Each alone on random, zero, tiny and huge rows with poisoned outputs, and put together to a
    step of attention and of an MLP; in Triton's interpreter."""
    command = [sys.executable, "-W", "ignore", str(HERE / f"{script}.py")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.strip().endswith("ok")


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> str:
    """PTX of a kernel for Hopper, which needs no GPU; `types` of those that are no pointer."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    # As at a launch, where Triton looks at the values.
    aligned = [
        i
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith(("_stride", "_bytes"))
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options).asm["ptx"]


def test_a_product_of_few_rows_runs_on_the_tensor_cores() -> None:
    from sglang_glm53.kernels.few_rows import _few_rows

    types = dict.fromkeys(("x", "weight"), FP8) | dict.fromkeys(
        ("x_scale", "weight_scale", "output_scale", "parts"), FP32
    )
    types |= dict.fromkeys(("rows", "x_scale_stride", "output_scale_stride"), "i32")
    types |= {"arrived": INT}
    shape = {"INNER": 6144, "TOKENS": 16, "STEP": 128, "SMALLEST_AMAX": 1e-10, "LARGEST": 448.0}
    for output, more in (
        (BF16, {"OUTER": 2624, "TILE": 64, "SPLIT": 4, "ACTIVATES": False}),
        (FP8, {"OUTER": 2048, "TILE": 128, "SPLIT": 8, "ACTIVATES": True}),
    ):
        ptx = compiled(_few_rows, types | {"output": output}, shape | more, num_stages=4)
        assert "wgmma" in ptx and "cp.async" in ptx  # loads run ahead of the products


def test_the_experts_run_on_the_tensor_cores() -> None:
    from sglang_glm53.kernels.experts import _down, _gate_up, _sum

    shape = {"HIDDEN": 6144, "WIDTH": 2048, "TOKENS": 16, "CHOICES": 8, "TILE": 128}
    scales = ("x_scale", "weight_scale", "inner_scale", "router_weight")
    types = dict.fromkeys(("x", "weight", "inner"), FP8) | dict.fromkeys(scales, FP32)
    types |= {"chosen": INT, "output": BF16, "rows": "i32", "x_scale_stride": "i32"}
    limits = {"SMALLEST_AMAX": 1e-10, "LARGEST": 448.0}
    for kernel, more in ((_gate_up, limits), (_down, {})):
        ptx = compiled(kernel, types, shape | more, num_stages=4)
        assert "wgmma" in ptx and "cp.async" in ptx
    parts = dict.fromkeys(("parts", "shared", "output"), BF16) | {"chosen": INT}
    sizes = {"HIDDEN": 6144, "CHOICES": 8, "BLOCK": 1024, "HAS_SHARED": True}
    assert compiled(_sum, parts | {"experts": "i32", "factor": "fp32"}, sizes)


@pytest.mark.parametrize("groups", [(1, 0, 0), (4, 2, 0), (4, 2, 1), (4, 4, 0)])
def test_index_scores_run_on_the_tensor_cores(groups: tuple[int, int, int]) -> None:
    from sglang_glm53.kernels.index_scores import _paged_scores

    types = dict.fromkeys(("q", "cache"), FP8) | dict.fromkeys(
        ("gates", "cache_scales", "scores"), FP32
    )
    types |= dict.fromkeys(("table", "lengths"), INT) | {"page_bytes": "i64", "row_stride": "i64"}
    types |= {"table_stride": "i64", "pages_each": "i32"}
    shape = dict(zip(("FIRST", "SECOND", "THIRD"), groups, strict=True)) | {"ROWS": sum(groups)}
    shape |= {"HEADS": 32, "TOKENS": 64, "WIDTH": 128}
    ptx = compiled(_paged_scores, types, shape, num_stages=4)
    assert "wgmma" in ptx and "cp.async" in ptx


def test_the_products_of_absorbed_attention_compile() -> None:
    from sglang_glm53.kernels.absorb import _fold_queries, _unfold_values

    shape = {"HEADS": 64, "NOPE": 192, "V": 256, "KV": 512, "TILE": 16, "COLUMNS": 128}
    types = {"weight": FP8, "weight_scale": FP32, "rows": "i32"}
    fold = {"q": BF16, "rope_table": FP32, "positions": LONG, "folded": BF16, "q_stride": "i32"}
    assert "mma" in compiled(_fold_queries, types | fold, {**shape, "ROPE": 64, "STEP": 64})
    unfold = {"attended": BF16, "fp8": FP8, "scales": FP32, "scale_stride": "i32"}
    limits = {"SMALLEST_AMAX": 1e-10, "LARGEST": 448.0}
    assert "mma" in compiled(_unfold_values, types | unfold, shape | limits)


def test_the_row_kernels_compile() -> None:
    from sglang_glm53.kernels.act_quant import _silu_mul_quant
    from sglang_glm53.kernels.latents import _latents
    from sglang_glm53.kernels.norm_quant import _add_norm_quant

    norm = dict.fromkeys(("x", "residual", "weight", "bf16"), BF16) | {"fp8": FP8, "scales": FP32}
    norm |= {"scale_stride": "i32", "eps": "fp32"}
    flags = {"WIDTH": 6144, "GROUPS": 64, "HAS_RESIDUAL": True, "WRITES_BF16": True}
    assert compiled(_add_norm_quant, norm, GROUPS | flags, num_warps=8)
    act = {"gate_up": BF16, "fp8": FP8, "scales": FP32}
    act |= dict.fromkeys(("row_stride", "scale_row", "scale_group"), "i32")
    assert compiled(_silu_mul_quant, act, GROUPS | {"WIDTH": 2048, "GROUPS": 4})
    latents = dict.fromkeys(("joined", "q_weight", "kv_weight", "cache_rope"), BF16)
    latents |= dict.fromkeys(("q_fp8", "cache"), FP8)
    latents |= dict.fromkeys(("rope_table", "q_scales", "cache_scales"), FP32)
    latents |= dict.fromkeys(("positions", "slots", "page_bytes"), LONG) | {"page_bytes": "i64"}
    latents |= dict.fromkeys(("joined_stride", "scale_stride", "row_bytes"), "i32")
    sizes = {"Q": 2048, "KV": 512, "ROPE": 64, "Q_GROUPS": 16, "KV_GROUPS": 4, "PAGE_TOKENS": 64}
    assert compiled(_latents, latents | {"eps": "fp32"}, GROUPS | sizes)
