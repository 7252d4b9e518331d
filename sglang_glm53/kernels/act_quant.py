"""silu(gate) * up and FP8 quantisation in one launch (Triton; twin in torch)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from sglang_glm53.kernels.fp8 import GROUP, SMALLEST, group_scales, quantise_groups
from sglang_glm53.kernels.quantise import to_fp8
from sglang_glm53.memory.quantise import FP8_MAX


@triton.jit
def _silu_mul_quant(
    gate_up,
    fp8,
    scales,
    row_stride,
    scale_row,
    scale_group,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    inside = at < WIDTH
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    # Rounded as the unfused chain hands it on.
    value = value.to(gate_up.dtype.element_ty).to(tl.float32)
    value, scale = to_fp8(value, 1, SMALLEST_AMAX, LARGEST)
    tl.store(fp8 + row * WIDTH + at, value.to(fp8.dtype.element_ty), mask=inside)
    place = scales + row * scale_row + group * scale_group
    tl.store(place, scale, mask=group * GROUP_SIZE < WIDTH)


def silu_mul_quant(
    gate_up: torch.Tensor, *, row_major: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, 2 * I] bf16 (gate, up) -> float8_e4m3fn [T, I] and fp32 scales [T, I / 128].

    Args:
        row_major: scales lie row by row, as the grouped expert kernel reads them.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    fp8 = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=gate_up.device)
    if row_major:
        scales = torch.empty(rows, width // GROUP, dtype=torch.float32, device=gate_up.device)
    else:
        scales = group_scales(rows, width, gate_up.device)
    if rows:
        groups = min(4, triton.next_power_of_2(width // GROUP))
        _silu_mul_quant[(rows, triton.cdiv(width // GROUP, groups))](
            gate_up,
            fp8,
            scales,
            gate_up.stride(0),
            *scales.stride(),
            WIDTH=width,
            GROUPS=groups,
            GROUP_SIZE=GROUP,
            SMALLEST_AMAX=SMALLEST,
            LARGEST=FP8_MAX,
            num_warps=4,
        )
    return fp8, scales


def silu_mul_quant_torch(
    gate_up: torch.Tensor, *, row_major: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu_mul_quant` in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    fp8, scales = quantise_groups((F.silu(gate) * up).to(gate_up.dtype))
    return fp8, scales.contiguous() if row_major else scales


def sanitizer_cases() -> list[tuple[str, Callable[[], object]]]:
    """Launches for compute-sanitizer."""
    cases: list[tuple[str, Callable[[], object]]] = []
    for rows, width in ((1, 2048), (7, 384)):
        gate_up = torch.randn(rows, 2 * width, device="cuda").bfloat16()
        for row_major in (False, True):
            run = functools.partial(silu_mul_quant, gate_up, row_major=row_major)
            cases.append((f"{rows} x {width}, row-major {row_major}", run))
    return cases
