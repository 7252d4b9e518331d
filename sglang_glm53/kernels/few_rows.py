"""Block-scaled FP8 matrix products of a handful of rows (Triton; twins in torch).

A decode step reads each weight once for 1 to 32 rows, so it is bound by bandwidth, and a matrix of
16 MB is over in 4 us: all of the GPU must read from the first moment on. The weight's rows are the
matrix instruction's long side; the inner dimension is split over programs, and the last program of
a tile to arrive adds the parts, in a fixed order: the result does not depend on who was last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from sglang_glm53.kernels.fp8 import (
    GROUP,
    MOST_ROWS,
    SMALLEST,
    dequantise_blocks,
    dequantise_groups,
    group_scales,
    quantise_groups,
)
from sglang_glm53.kernels.quantise import to_fp8
from sglang_glm53.memory.quantise import FP8_MAX


@triton.jit
def _part(
    x, x_scale, weight, weight_scale, row, token, rows, x_scale_stride, first, last,
    INNER: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Weight rows `row` [TILE] times all tokens [TOKENS], over blocks first .. last - 1 of STEP."""
    inner = tl.arange(0, STEP)
    there = token < rows
    total = tl.zeros((TILE, TOKENS), dtype=tl.float32)
    for block in range(first, last):
        at = block * STEP + inner
        w = tl.load(weight + row.to(tl.int64)[:, None] * INNER + at[None, :])
        v = tl.load(x + token[None, :] * INNER + at[:, None], mask=there[None, :], other=0.0)
        w_scale = tl.load(weight_scale + row // STEP * (INNER // STEP) + block)
        v_scale = tl.load(x_scale + block * x_scale_stride + token, mask=there, other=0.0)
        total += tl.dot(w, v) * w_scale[:, None] * v_scale[None, :]
    return total


@triton.jit
def _few_rows(
    x,
    x_scale,
    weight,
    weight_scale,
    output,
    output_scale,
    parts,
    arrived,
    rows,
    x_scale_stride,
    output_scale_stride,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    STEP: tl.constexpr,
    ACTIVATES: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    LARGEST: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    blocks: tl.constexpr = INNER // STEP
    first, last = split * blocks // SPLIT, (split + 1) * blocks // SPLIT
    row = tile * TILE + tl.arange(0, TILE)
    token = tl.arange(0, TOKENS)
    total = _part(
        x, x_scale, weight, weight_scale, row, token, rows, x_scale_stride, first, last,
        INNER, TILE, TOKENS, STEP,
    )  # fmt: skip
    up = total
    if ACTIVATES:
        up = _part(
            x, x_scale, weight, weight_scale, OUTER + row, token, rows, x_scale_stride, first,
            last, INNER, TILE, TOKENS, STEP,
        )  # fmt: skip
    finishes = True
    if SPLIT > 1:
        sums: tl.constexpr = 2 if ACTIVATES else 1
        cell = tl.arange(0, TILE)[:, None] * TOKENS + token[None, :]
        own = parts + (tile * SPLIT * sums).to(tl.int64) * (TILE * TOKENS)
        tl.store(own + (split * sums) * (TILE * TOKENS) + cell, total)
        if ACTIVATES:
            tl.store(own + (split * sums + 1) * (TILE * TOKENS) + cell, up)
        tl.debug_barrier()  # all of this program's stores, before it says that it has arrived
        finishes = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
        if finishes:
            total = tl.zeros((TILE, TOKENS), dtype=tl.float32)
            up = tl.zeros((TILE, TOKENS), dtype=tl.float32)
            for other in range(SPLIT):
                total += tl.load(own + (other * sums) * (TILE * TOKENS) + cell)
                if ACTIVATES:
                    up += tl.load(own + (other * sums + 1) * (TILE * TOKENS) + cell)
            tl.store(arrived + tile, 0)  # for the next launch
    if finishes:
        place = output + token.to(tl.int64)[None, :] * OUTER + row[:, None]
        there = token[None, :] < rows
        if ACTIVATES:
            # Rounded where the unfused chain hands values on in bf16.
            gate = total.to(tl.bfloat16).to(tl.float32)
            up = up.to(tl.bfloat16).to(tl.float32)
            value = (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16).to(tl.float32)
            value, scale = to_fp8(value, 0, SMALLEST_AMAX, LARGEST)
            tl.store(place, value.to(output.dtype.element_ty), mask=there)
            tl.store(output_scale + tile * output_scale_stride + token, scale, mask=token < rows)
        else:
            tl.store(place, total.to(output.dtype.element_ty), mask=there)


class FewRows:
    """Launches the products on one device; keeps what programs leave for each other.

    Launches of one object must follow each other on one stream (a captured graph's is one).
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._arrived = torch.zeros(4096, dtype=torch.int32, device=self.device)
        self._parts = torch.empty(0, dtype=torch.float32, device=self.device)

    def matmul(
        self,
        x: tuple[torch.Tensor, torch.Tensor],
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        *,
        tile: int = 64,
        split: int = 1,
        stages: int = 4,
        warps: int = 4,
    ) -> torch.Tensor:
        """[T, in] times [out, in] transposed -> [T, out] bf16.

        Args:
            x: e4m3 [T, in] and its fp32 scales [T, in / 128], column-major; T up to `MOST_ROWS`.
            weight, weight_scale: e4m3 [out, in] and fp32 [out / 128, in / 128], rounded up.
            tile: rows of the weight in one program, a divisor of `out`.
            split: programs that share the inner dimension.
            stages, warps: loads ahead of the products, and warps of a program.
        """
        outer = weight.shape[0]
        output = torch.empty(x[0].shape[0], outer, dtype=torch.bfloat16, device=self.device)
        launch = (outer, tile, split, stages, warps)
        self._launch(x, weight, weight_scale, output, None, *launch)
        return output

    def gate_up(
        self,
        x: tuple[torch.Tensor, torch.Tensor],
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        *,
        split: int = 1,
        stages: int = 4,
        warps: int = 4,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """silu(gate) * up of a merged projection, quantised for the next product.

        Args:
            weight: e4m3 [2 * width, in], gate's rows before up's; width a multiple of 128.

        Returns:
            e4m3 [T, width], fp32 scales [T, width / 128].
        """
        rows, outer = x[0].shape[0], weight.shape[0] // 2
        output = torch.empty(rows, outer, dtype=torch.float8_e4m3fn, device=self.device)
        scales = group_scales(rows, outer, self.device)
        launch = (outer, GROUP, split, stages, warps)
        self._launch(x, weight, weight_scale, output, scales, *launch)
        return output, scales

    def _launch(
        self,
        x: tuple[torch.Tensor, torch.Tensor],
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        output: torch.Tensor,
        scales: torch.Tensor | None,
        outer: int,
        tile: int,
        split: int,
        stages: int,
        warps: int,
    ) -> None:
        values, x_scale = x
        rows, inner = values.shape
        if not rows:
            return
        if rows > MOST_ROWS or outer % tile or not 1 <= split <= inner // GROUP:
            raise ValueError(f"{rows} rows, {outer} in tiles of {tile}, split {split}")
        tokens = 16 if rows <= 16 else 32
        wanted = 0 if split == 1 else 2 * split * outer * tokens
        if self._parts.numel() < wanted:
            self._parts = torch.empty(wanted, dtype=torch.float32, device=self.device)
        _few_rows[(outer // tile, split)](
            values,
            x_scale,
            weight,
            weight_scale,
            output,
            scales if scales is not None else x_scale,
            self._parts if split > 1 else x_scale,
            self._arrived,
            rows,
            x_scale.stride(1),
            scales.stride(1) if scales is not None else 0,
            OUTER=outer,
            INNER=inner,
            TILE=tile,
            TOKENS=tokens,
            SPLIT=split,
            STEP=GROUP,
            ACTIVATES=scales is not None,
            SMALLEST_AMAX=SMALLEST,
            LARGEST=FP8_MAX,
            num_warps=warps,
            num_stages=stages,
        )


def matmul_torch(
    x: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """`FewRows.matmul` in plain torch, fp32 sums."""
    dense = dequantise_blocks(weight, weight_scale, torch.float32)
    return (dequantise_groups(*x) @ dense.T).to(torch.bfloat16)


def gate_up_torch(
    x: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, weight_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`FewRows.gate_up` in plain torch."""
    gate, up = matmul_torch(x, weight, weight_scale).float().chunk(2, dim=1)
    return quantise_groups((F.silu(gate) * up).to(torch.bfloat16))


def sanitizer_cases() -> list[tuple[str, Callable[[], object]]]:
    """Launches for compute-sanitizer: whole and split, rows that fill no tile."""
    cases: list[tuple[str, Callable[[], object]]] = []
    weight = torch.zeros(512, 1024, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.ones(4, 8, device="cuda")
    for rows, split in ((1, 1), (17, 3)):
        x = quantise_groups(torch.randn(rows, 1024, device="cuda").bfloat16())
        few = FewRows("cuda")
        product = functools.partial(few.matmul, x, weight, scale, split=split)
        gated = functools.partial(few.gate_up, x, weight, scale, split=split)
        cases += [
            (f"{rows} rows, split {split}", product),
            (f"{rows} rows, split {split}, gate and up", gated),
        ]
    return cases
