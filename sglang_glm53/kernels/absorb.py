"""The two products of absorbed MLA with kv_b_proj's own FP8 blocks (Triton; twins in torch).

`fold_queries`: RoPE, q W_UK and the layout [T, heads, kv_lora + rope] that the attention kernel
reads, in one launch. `unfold_values`: attention's latents times W_UV, quantised for o_proj. Stock
keeps W_UK and W_UV in bf16, twice the bytes, and takes three and two launches.

kv_b_proj is [heads * (nope + v), kv_lora] e4m3 in blocks of 128 x 128 with fp32 scales; a head's
rows begin at a multiple of 64, so that no 64 rows of it lie in two blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sglang_glm53.kernels.fp8 import (
    GROUP,
    SMALLEST,
    dequantise_blocks,
    group_scales,
    quantise_groups,
)
from sglang_glm53.kernels.quantise import to_fp8
from sglang_glm53.memory.quantise import FP8_MAX

ROWS = 16  # tokens of one program: the least that a matrix instruction takes
HALF = 64  # rows of the weight that surely lie in one block


@triton.jit
def _fold_queries(
    q,
    weight,
    weight_scale,
    rope_table,
    positions,
    folded,
    rows,
    q_stride,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    KV: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    head, part = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2) * TILE + tl.arange(0, TILE)
    there = token[:, None] < rows
    wide = token.to(tl.int64)
    source = q + wide[:, None] * q_stride + head * (NOPE + ROPE)
    target = folded + (wide[:, None] * HEADS + head) * (KV + ROPE)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, STEP)
    total = tl.zeros((TILE, COLUMNS), dtype=tl.float32)
    for start in tl.static_range(0, NOPE, STEP):
        row = head * (NOPE + V) + start + inner
        queries = tl.load(source + start + inner[None, :], mask=there, other=0.0)
        block = tl.load(weight + row[:, None] * KV + column[None, :])
        first = head * (NOPE + V) + start
        scale = tl.load(weight_scale + first // COLUMNS * (KV // COLUMNS) + part)
        total += tl.dot(queries, block.to(queries.dtype)) * scale
    tl.store(target + column[None, :], total.to(folded.dtype.element_ty), mask=there)
    if part == 0:
        half = tl.arange(0, ROPE // 2)
        position = tl.load(positions + token, mask=token < rows, other=0).to(tl.int64)
        table = rope_table + position[:, None] * ROPE + half[None, :]
        cos, sin = tl.load(table), tl.load(table + ROPE // 2)
        pair = NOPE + 2 * half[None, :]
        even = tl.load(source + pair, mask=there, other=0.0).to(tl.float32)
        odd = tl.load(source + pair + 1, mask=there, other=0.0).to(tl.float32)
        kind = folded.dtype.element_ty
        behind = target + KV + 2 * half[None, :]
        tl.store(behind, (even * cos - odd * sin).to(kind), mask=there)
        tl.store(behind + 1, (odd * cos + even * sin).to(kind), mask=there)


def fold_queries(
    q: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    *,
    heads: int,
    v_head_dim: int,
) -> torch.Tensor:
    """Queries as absorbed attention reads them.

    Args:
        q: [T, heads * (nope + rope)] bf16, rows contiguous.
        weight, weight_scale: kv_b_proj, e4m3 [heads * (nope + v), kv_lora] and its fp32 scales.
        rope_table: [positions, rope] fp32, cosines then sines; positions: [T] int64.

    Returns:
        [T, heads, kv_lora + rope] bf16: q_nope W_UK, then the rotated part.
    """
    rows, kv, rope = q.shape[0], weight.shape[1], rope_table.shape[1]
    nope = q.shape[1] // heads - rope
    folded = q.new_empty(rows, heads, kv + rope)
    if rows:
        _fold_queries[(heads, kv // GROUP, triton.cdiv(rows, ROWS))](
            q,
            weight,
            weight_scale,
            rope_table,
            positions,
            folded,
            rows,
            q.stride(0),
            HEADS=heads,
            NOPE=nope,
            ROPE=rope,
            V=v_head_dim,
            KV=kv,
            TILE=ROWS,
            COLUMNS=GROUP,
            STEP=HALF,
            num_warps=4,
        )
    return folded


def fold_queries_torch(
    q: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    *,
    heads: int,
    v_head_dim: int,
) -> torch.Tensor:
    """`fold_queries` in plain torch."""
    rope = rope_table.shape[1]
    q = q.unflatten(1, (heads, -1)).float()
    q_nope, q_rope = q.split([q.shape[2] - rope, rope], dim=2)
    per_head = dequantise_blocks(weight, weight_scale, torch.float32).unflatten(0, (heads, -1))
    w_uk = per_head[:, :-v_head_dim]
    folded = torch.einsum("thn,hnk->thk", q_nope, w_uk)
    cos, sin = (part[:, None] for part in rope_table[positions].chunk(2, dim=1))
    even, odd = q_rope[..., 0::2], q_rope[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(2)
    return torch.cat((folded, rotated), dim=2).to(torch.bfloat16)


@triton.jit
def _unfold_values(
    attended,
    weight,
    weight_scale,
    fp8,
    scales,
    rows,
    scale_stride,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    V: tl.constexpr,
    KV: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    LARGEST: tl.constexpr,
):
    head, part = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2) * TILE + tl.arange(0, TILE)
    there = token[:, None] < rows
    wide = token.to(tl.int64)
    inner = tl.arange(0, COLUMNS)
    row = head * (NOPE + V) + NOPE + part * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((TILE, COLUMNS), dtype=tl.float32)
    for start in tl.static_range(0, KV, COLUMNS):
        source = attended + (wide[:, None] * HEADS + head) * KV + start + inner[None, :]
        latents = tl.load(source, mask=there, other=0.0)
        block = tl.load(weight + row[None, :] * KV + start + inner[:, None])
        scale = tl.load(weight_scale + row // COLUMNS * (KV // COLUMNS) + start // COLUMNS)
        total += tl.dot(latents, block.to(latents.dtype)) * scale[None, :]
    # Rounded as the unfused chain hands it on.
    value = total.to(attended.dtype.element_ty).to(tl.float32)
    value, scale = to_fp8(value, 1, SMALLEST_AMAX, LARGEST)
    place = wide[:, None] * (HEADS * V) + head * V + part * COLUMNS + inner[None, :]
    tl.store(fp8 + place, value.to(fp8.dtype.element_ty), mask=there)
    group = head * (V // COLUMNS) + part
    tl.store(scales + group * scale_stride + token, scale, mask=token < rows)


def unfold_values(
    attended: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, *, v_head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention's latents [T, heads, kv_lora] bf16 times W_UV, as o_proj reads them.

    Returns:
        float8_e4m3fn [T, heads * v_head_dim] and fp32 scales [T, heads * v_head_dim / 128].
    """
    rows, heads, kv = attended.shape
    width = heads * v_head_dim
    fp8 = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=attended.device)
    scales = group_scales(rows, width, attended.device)
    if rows:
        _unfold_values[(heads, v_head_dim // GROUP, triton.cdiv(rows, ROWS))](
            attended,
            weight,
            weight_scale,
            fp8,
            scales,
            rows,
            scales.stride(1),
            HEADS=heads,
            NOPE=weight.shape[0] // heads - v_head_dim,
            V=v_head_dim,
            KV=kv,
            TILE=ROWS,
            COLUMNS=GROUP,
            SMALLEST_AMAX=SMALLEST,
            LARGEST=FP8_MAX,
            num_warps=4,
        )
    return fp8, scales


def unfold_values_torch(
    attended: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, *, v_head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`unfold_values` in plain torch."""
    heads = attended.shape[1]
    per_head = dequantise_blocks(weight, weight_scale, torch.float32).unflatten(0, (heads, -1))
    values = torch.einsum("thk,hvk->thv", attended.float(), per_head[:, -v_head_dim:])
    return quantise_groups(values.flatten(1).to(attended.dtype))


def sanitizer_cases() -> list[tuple[str, Callable[[], object]]]:
    """Launches for compute-sanitizer: one row, and one more than a tile."""
    cases: list[tuple[str, Callable[[], object]]] = []
    heads, nope, rope, v, kv = 8, 192, 64, 256, 512
    weight = torch.zeros(heads * (nope + v), kv, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.ones(-(-heads * (nope + v) // GROUP), kv // GROUP, device="cuda")
    table = torch.rand(128, rope, device="cuda")
    for rows in (1, ROWS + 1):
        q = torch.randn(rows, heads * (nope + rope), device="cuda").bfloat16()
        at = torch.arange(rows, device="cuda")
        fold = functools.partial(
            fold_queries, q, weight, scale, table, at, heads=heads, v_head_dim=v
        )
        attended = torch.randn(rows, heads, kv, device="cuda").bfloat16()
        unfold = functools.partial(unfold_values, attended, weight, scale, v_head_dim=v)
        cases += [(f"fold, {rows} rows", fold), (f"unfold, {rows} rows", unfold)]
    return cases
