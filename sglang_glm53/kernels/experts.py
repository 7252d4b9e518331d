"""Routed experts for a handful of rows (Triton; twins in torch).

With up to 32 rows a step reads each chosen expert once and computes next to nothing, so nothing is
sorted or aligned: a program takes one tile of one expert's weight, looks whether any row chose that
expert, and multiplies it with all rows at once (the matrix instruction is that wide anyway). Rows
that did not choose it are not written. Three launches: gate and up with activation and
quantisation; down with the router's weight; the sum over a row's experts, with the shared expert.
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
    quantise_groups,
)
from sglang_glm53.kernels.quantise import to_fp8
from sglang_glm53.memory.quantise import FP8_MAX


@triton.jit
def _choices(chosen, expert, token, rows, CHOICES: tl.constexpr):
    """For each token, 1 + which of its choices is the expert; 0 where none is."""
    which = tl.arange(0, CHOICES)
    there = token[:, None] < rows
    ids = tl.load(chosen + token[:, None] * CHOICES + which[None, :], mask=there, other=-1)
    return tl.max(tl.where(ids == expert, which[None, :] + 1, 0), axis=1)


@triton.jit
def _gate_up(
    x,
    x_scale,
    weight,
    weight_scale,
    chosen,
    inner,
    inner_scale,
    rows,
    x_scale_stride,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    TILE: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    LARGEST: tl.constexpr,
):
    tile, expert = tl.program_id(0), tl.program_id(1)
    token = tl.arange(0, TOKENS)
    choice = _choices(chosen, expert, token, rows, CHOICES)
    if tl.max(choice, axis=0) > 0:
        at = tl.arange(0, TILE)
        row = tile * TILE + at
        own = weight + expert.to(tl.int64) * (2 * WIDTH * HIDDEN)
        blocks: tl.constexpr = HIDDEN // TILE
        scales = weight_scale + expert * (2 * WIDTH // TILE * blocks) + tile * blocks
        there = token < rows
        gate = tl.zeros((TILE, TOKENS), dtype=tl.float32)
        up = tl.zeros((TILE, TOKENS), dtype=tl.float32)
        for block in range(blocks):
            column = block * TILE + at
            v = tl.load(
                x + token[None, :] * HIDDEN + column[:, None], mask=there[None, :], other=0.0
            )
            v_scale = tl.load(x_scale + block * x_scale_stride + token, mask=there, other=0.0)
            w = tl.load(own + row[:, None] * HIDDEN + column[None, :])
            gate += tl.dot(w, v) * (tl.load(scales + block) * v_scale)[None, :]
            w = tl.load(own + (WIDTH + row)[:, None] * HIDDEN + column[None, :])
            second = tl.load(scales + WIDTH // TILE * blocks + block)
            up += tl.dot(w, v) * (second * v_scale)[None, :]
        # Rounded where the unfused chain hands values on in bf16.
        gate = gate.to(tl.bfloat16).to(tl.float32)
        up = up.to(tl.bfloat16).to(tl.float32)
        value = (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16).to(tl.float32)
        value, scale = to_fp8(value, 0, SMALLEST_AMAX, LARGEST)
        pair = token * CHOICES + choice - 1
        wanted = choice > 0
        tl.store(
            inner + pair[None, :] * WIDTH + row[:, None],
            value.to(inner.dtype.element_ty),
            mask=wanted[None, :],
        )
        tl.store(inner_scale + pair * (WIDTH // TILE) + tile, scale, mask=wanted)


@triton.jit
def _down(
    inner,
    inner_scale,
    weight,
    weight_scale,
    chosen,
    router_weight,
    output,
    rows,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    TILE: tl.constexpr,
):
    tile, expert = tl.program_id(0), tl.program_id(1)
    token = tl.arange(0, TOKENS)
    choice = _choices(chosen, expert, token, rows, CHOICES)
    if tl.max(choice, axis=0) > 0:
        at = tl.arange(0, TILE)
        row = tile * TILE + at
        own = weight + expert.to(tl.int64) * (HIDDEN * WIDTH)
        blocks: tl.constexpr = WIDTH // TILE
        scales = weight_scale + expert * (HIDDEN // TILE * blocks) + tile * blocks
        wanted = choice > 0
        pair = token * CHOICES + tl.maximum(choice - 1, 0)
        total = tl.zeros((TILE, TOKENS), dtype=tl.float32)
        for block in range(blocks):
            column = block * TILE + at
            v = tl.load(
                inner + pair[None, :] * WIDTH + column[:, None], mask=wanted[None, :], other=0.0
            )
            v_scale = tl.load(inner_scale + pair * blocks + block, mask=wanted, other=0.0)
            w = tl.load(own + row[:, None] * WIDTH + column[None, :])
            total += tl.dot(w, v) * (tl.load(scales + block) * v_scale)[None, :]
        total *= tl.load(router_weight + pair, mask=wanted, other=0.0)[None, :]
        place = output + pair.to(tl.int64)[None, :] * HIDDEN + row[:, None]
        tl.store(place, total.to(output.dtype.element_ty), mask=wanted[None, :])


@triton.jit
def _sum(
    parts,
    chosen,
    shared,
    output,
    experts,
    factor,
    HIDDEN: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HIDDEN
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = row * CHOICES + choice
        expert = tl.load(chosen + pair)
        here = (expert >= 0) & (expert < experts)
        total += tl.load(parts + pair * HIDDEN + at, mask=inside & here, other=0.0).to(tl.float32)
    total = (total * factor).to(output.dtype.element_ty).to(tl.float32)
    if HAS_SHARED:
        total += tl.load(shared + row * HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * HIDDEN + at, total.to(output.dtype.element_ty), mask=inside)


Pair = tuple[torch.Tensor, torch.Tensor]  # e4m3 values and their fp32 scales


def expert_parts(
    x: Pair,
    gate_up: Pair,
    down: Pair,
    chosen: torch.Tensor,
    router_weight: torch.Tensor,
    *,
    stages: int = 4,
    warps: int = 4,
) -> torch.Tensor:
    """Each chosen expert's output for each row, times the router's weight.

    Args:
        x: e4m3 [T, D] and fp32 scales [T, D / 128], column-major; T up to `MOST_ROWS`.
        gate_up: e4m3 [E, 2 * I, D] (gate's rows first) and fp32 [E, 2 * I / 128, D / 128].
        down: e4m3 [E, D, I] and fp32 [E, D / 128, I / 128].
        chosen: [T, K] int32, no expert twice in a row, K a power of two.
        router_weight: [T, K] fp32.

    Returns:
        [T, K, D] bf16; where `chosen` is not in 0 .. E - 1 nothing is written.
    """
    rows, hidden = x[0].shape
    count, double, _ = gate_up[0].shape
    width, choices, device = double // 2, chosen.shape[1], chosen.device
    if rows > MOST_ROWS or choices & (choices - 1):
        raise ValueError(f"{rows} rows of {choices} choices; at most {MOST_ROWS}, a power of two")
    parts = torch.empty(rows, choices, hidden, dtype=torch.bfloat16, device=device)
    if not rows:
        return parts
    inner = torch.empty(rows * choices, width, dtype=torch.float8_e4m3fn, device=device)
    inner_scale = torch.empty(rows * choices, width // GROUP, dtype=torch.float32, device=device)
    shape = {
        "HIDDEN": hidden,
        "WIDTH": width,
        "TOKENS": 16 if rows <= 16 else 32,
        "CHOICES": choices,
        "TILE": GROUP,
        "num_warps": warps,
        "num_stages": stages,
    }
    limits = {"SMALLEST_AMAX": SMALLEST, "LARGEST": FP8_MAX}
    _gate_up[(width // GROUP, count)](
        *x, *gate_up, chosen, inner, inner_scale, rows, x[1].stride(1), **shape, **limits
    )
    _down[(hidden // GROUP, count)](
        inner, inner_scale, *down, chosen, router_weight, parts, rows, **shape
    )
    return parts


def sum_parts(
    parts: torch.Tensor,
    chosen: torch.Tensor,
    count: int,
    shared: torch.Tensor | None,
    *,
    factor: float,
) -> torch.Tensor:
    """`factor` times the sum over a row's parts, plus the shared expert's output.

    Args:
        parts: [T, K, D] bf16, as `expert_parts` gives them.
        chosen: [T, K] int32; count: experts that have parts, E.
        shared: [T, D] bf16 or None.

    Returns:
        [T, D] bf16.
    """
    rows, choices, hidden = parts.shape
    output = torch.empty(rows, hidden, dtype=parts.dtype, device=parts.device)
    if rows:
        block = 1024
        _sum[(rows, triton.cdiv(hidden, block))](
            parts,
            chosen,
            shared if shared is not None else parts,
            output,
            count,
            factor,
            HIDDEN=hidden,
            CHOICES=choices,
            BLOCK=block,
            HAS_SHARED=shared is not None,
            num_warps=4,
        )
    return output


def expert_parts_torch(
    x: Pair, gate_up: Pair, down: Pair, chosen: torch.Tensor, router_weight: torch.Tensor
) -> torch.Tensor:
    """`expert_parts` in plain torch; zeros where nothing is chosen."""
    values = dequantise_groups(*x)
    parts = torch.zeros(*chosen.shape, values.shape[1], dtype=torch.bfloat16, device=values.device)
    for expert in range(gate_up[0].shape[0]):
        row, choice = (chosen == expert).nonzero(as_tuple=True)
        if not len(row):
            continue
        first, second = (
            dequantise_blocks(weight[expert], scale[expert], torch.float32)
            for weight, scale in (gate_up, down)
        )
        gate, up = (values[row] @ first.T).bfloat16().float().chunk(2, dim=1)
        inner = dequantise_groups(*quantise_groups((F.silu(gate) * up).bfloat16()))
        parts[row, choice] = ((inner @ second.T) * router_weight[row, choice, None]).bfloat16()
    return parts


def sum_parts_torch(
    parts: torch.Tensor,
    chosen: torch.Tensor,
    count: int,
    shared: torch.Tensor | None,
    *,
    factor: float,
) -> torch.Tensor:
    """`sum_parts` in plain torch."""
    here = ((chosen >= 0) & (chosen < count))[..., None]
    output = (parts.float().where(here, 0.0).sum(1) * factor).to(parts.dtype)
    return output if shared is None else (output.float() + shared.float()).to(parts.dtype)


def sanitizer_cases() -> list[tuple[str, Callable[[], object]]]:
    """Launches for compute-sanitizer: one row, and more than a tile, with choices outside."""
    cases: list[tuple[str, Callable[[], object]]] = []
    count, hidden, width = 4, 512, 256
    gate_up = (
        torch.zeros(count, 2 * width, hidden, device="cuda").to(torch.float8_e4m3fn),
        torch.ones(count, 2 * width // GROUP, hidden // GROUP, device="cuda"),
    )
    down = (
        torch.zeros(count, hidden, width, device="cuda").to(torch.float8_e4m3fn),
        torch.ones(count, hidden // GROUP, width // GROUP, device="cuda"),
    )
    for rows in (1, 17):
        x = quantise_groups(torch.randn(rows, hidden, device="cuda").bfloat16())
        chosen = torch.rand(rows, 6, device="cuda").argsort(1)[:, :2].int() - 1
        weight, shared = torch.rand(rows, 2, device="cuda"), torch.ones(rows, hidden, device="cuda")
        parts = functools.partial(expert_parts, x, gate_up, down, chosen, weight)
        filled = torch.ones(rows, 2, hidden, device="cuda").bfloat16()
        total = functools.partial(sum_parts, filled, chosen, count, shared.bfloat16(), factor=2.5)
        cases += [(f"{rows} rows", parts), (f"{rows} rows, sum", total)]
    return cases
