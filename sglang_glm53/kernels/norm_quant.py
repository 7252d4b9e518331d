"""Residual add, RMSNorm and FP8 quantisation of a row in one launch (Triton; twin in torch).

A layer reads its input twice: as FP8 for the block-scaled matrix products, and as bf16 where the
router or the indexer's gates want it. The chain that this replaces reads and writes the row three
times in three launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_glm53.kernels.fp8 import GROUP, SMALLEST, group_scales, quantise_groups
from sglang_glm53.kernels.quantise import to_fp8
from sglang_glm53.memory.quantise import FP8_MAX


@dataclass(frozen=True)
class Normed:
    """One row's normed input in the forms in which a layer reads it.

    Attributes:
        fp8, scales: float8_e4m3fn [T, D], fp32 [T, D / 128] (column-major; value = fp8 * scale).
        bf16: [T, D], None where nobody reads it.
    """

    fp8: torch.Tensor
    scales: torch.Tensor
    bf16: torch.Tensor | None


@triton.jit
def _add_norm_quant(
    x,
    residual,
    weight,
    fp8,
    scales,
    bf16,
    scale_stride,
    eps,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WRITES_BF16: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    at = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    inside = at < WIDTH
    value = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        # The norm reads the sum before it is rounded, as SGLang's add + RMSNorm does.
        tl.store(residual + row * WIDTH + at, value.to(residual.dtype.element_ty), mask=inside)
    mean = tl.sum(tl.sum(value * value, axis=1), axis=0) / WIDTH
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    # Rounded once, so that both forms are of the same values.
    normed = (value * tl.rsqrt(mean + eps) * gain).to(x.dtype.element_ty)
    if WRITES_BF16:
        tl.store(bf16 + row * WIDTH + at, normed, mask=inside)
    quantised, scale = to_fp8(normed.to(tl.float32), 1, SMALLEST_AMAX, LARGEST)
    tl.store(fp8 + row * WIDTH + at, quantised.to(fp8.dtype.element_ty), mask=inside)
    tl.store(scales + group * scale_stride + row, scale, mask=group * GROUP_SIZE < WIDTH)


def add_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    bf16: bool,
) -> Normed:
    """RMSNorm of `x + residual`, as FP8 with one scale for 128 values.

    Args:
        x: [T, D] bf16, contiguous; D a multiple of 128.
        residual: [T, D] bf16 or None; becomes the sum, in place.
        weight: [D], the norm's.
        bf16: whether the bf16 form is wanted too.
    """
    rows, width = x.shape
    fp8 = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = group_scales(rows, width, x.device)
    normed = torch.empty_like(x) if bf16 else None
    if rows:
        _add_norm_quant[(rows,)](
            x,
            residual if residual is not None else x,
            weight,
            fp8,
            scales,
            normed if normed is not None else x,
            scales.stride(1),
            eps,
            WIDTH=width,
            GROUPS=triton.next_power_of_2(width // GROUP),
            GROUP_SIZE=GROUP,
            SMALLEST_AMAX=SMALLEST,
            LARGEST=FP8_MAX,
            HAS_RESIDUAL=residual is not None,
            WRITES_BF16=bf16,
            num_warps=8,
        )
    return Normed(fp8, scales, normed)


def add_norm_quant_torch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    bf16: bool,
) -> Normed:
    """`add_norm_quant` in plain torch."""
    value = x.float()
    if residual is not None:
        value = value + residual.float()
        residual.copy_(value)
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()
    normed = normed.to(x.dtype)
    fp8, scales = quantise_groups(normed)
    return Normed(fp8, scales, normed if bf16 else None)


def sanitizer_cases() -> list[tuple[str, Callable[[], object]]]:
    """Launches for compute-sanitizer: one row, several; a width that is no power of two."""
    cases: list[tuple[str, Callable[[], object]]] = []
    for rows, width in ((1, 6144), (5, 2048), (3, 384)):
        x, residual = (torch.randn(rows, width, device="cuda").bfloat16() for _ in range(2))
        weight = torch.ones(width, device="cuda").bfloat16()
        run = functools.partial(add_norm_quant, x, residual, weight, 1e-5, bf16=True)
        cases.append((f"{rows} x {width}", run))
    return cases
