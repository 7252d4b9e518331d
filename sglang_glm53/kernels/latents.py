"""From the first projection of attention to the query latent in FP8 and the cache row, in one
launch (Triton; twin in torch).

The projection gives, for each token, [query latent, KV latent, k_rope]. The query latent is normed
and quantised for the two projections that read it (queries, index queries); the KV latent is normed
and, with the rotated k_rope, written to the token's slot of an FP8 cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sglang_glm53.kernels.fp8 import GROUP, SMALLEST, group_scales, quantise_groups
from sglang_glm53.kernels.quantise import to_fp8
from sglang_glm53.memory.quantise import FP8_MAX, quantise_latents

PAGE = 64
SCALE_BYTES = 4


@triton.jit
def _latents(
    joined,
    q_weight,
    kv_weight,
    rope_table,
    positions,
    slots,
    q_fp8,
    q_scales,
    cache,
    cache_scales,
    cache_rope,
    joined_stride,
    scale_stride,
    page_bytes,
    row_bytes,
    eps,
    Q: tl.constexpr,
    KV: tl.constexpr,
    ROPE: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    KV_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = joined + row * joined_stride
    # Names of the two branches differ: Triton would merge equal ones, of other shapes.
    if tl.program_id(1) == 0:
        group = tl.arange(0, Q_GROUPS)
        at = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        inside = at < Q
        value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(tl.sum(value * value, axis=1), axis=0) / Q
        gain = tl.load(q_weight + at, mask=inside, other=0.0).to(tl.float32)
        value = (value * tl.rsqrt(mean + eps) * gain).to(joined.dtype.element_ty).to(tl.float32)
        value, scale = to_fp8(value, 1, SMALLEST_AMAX, LARGEST)
        tl.store(q_fp8 + row * Q + at, value.to(q_fp8.dtype.element_ty), mask=inside)
        tl.store(q_scales + group * scale_stride + row, scale, mask=group * GROUP_SIZE < Q)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        place = slot // PAGE_TOKENS * page_bytes + slot % PAGE_TOKENS * row_bytes
        kv_group = tl.arange(0, KV_GROUPS)
        kv_at = kv_group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        latent = tl.load(source + Q + kv_at).to(tl.float32)
        kv_mean = tl.sum(tl.sum(latent * latent, axis=1), axis=0) / KV
        kv_gain = tl.load(kv_weight + kv_at).to(tl.float32)
        latent = (
            (latent * tl.rsqrt(kv_mean + eps) * kv_gain).to(joined.dtype.element_ty).to(tl.float32)
        )
        kv_amax = tl.max(tl.abs(latent), axis=1)
        kv_scale = tl.where(kv_amax > 0, kv_amax / LARGEST, 1.0)
        latent = tl.minimum(tl.maximum(latent * (1.0 / kv_scale)[:, None], -LARGEST), LARGEST)
        tl.store(cache + place + kv_at, latent.to(cache.dtype.element_ty))
        tl.store(cache_scales + (place + KV) // 4 + kv_group, kv_scale)
        half = tl.arange(0, ROPE // 2)
        position = tl.load(positions + row).to(tl.int64)
        cos = tl.load(rope_table + position * ROPE + half).to(tl.float32)
        sin = tl.load(rope_table + position * ROPE + ROPE // 2 + half).to(tl.float32)
        even = tl.load(source + Q + KV + 2 * half).to(tl.float32)
        odd = tl.load(source + Q + KV + 2 * half + 1).to(tl.float32)
        there = cache_rope + (place + KV + KV_GROUPS * 4) // 2
        kind = cache_rope.dtype.element_ty
        tl.store(there + 2 * half, (even * cos - odd * sin).to(kind))
        tl.store(there + 2 * half + 1, (odd * cos + even * sin).to(kind))


def latents(
    joined: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and quantise the query latent, and write the cache rows.

    Args:
        joined: [T, q_lora + kv_lora + rope] bf16, rows contiguous.
        q_weight, kv_weight: of the two norms; eps: of both.
        rope_table: [positions, rope] fp32: cosines, then sines.
        positions: [T] int64.
        cache: uint8 [pages, 64, row bytes], each page's rows contiguous: one layer of an FP8 cache.
        slots: [T] int64 or int32; a token with a negative slot is not allowed.

    Returns:
        float8_e4m3fn [T, q_lora] and fp32 scales [T, q_lora / 128], column-major.
    """
    rows, q, kv = joined.shape[0], q_weight.shape[0], kv_weight.shape[0]
    rope = rope_table.shape[1]
    fp8 = torch.empty(rows, q, dtype=torch.float8_e4m3fn, device=joined.device)
    scales = group_scales(rows, q, joined.device)
    if rows:
        row_bytes = cache.shape[2]
        flat = cache.as_strided(((cache.shape[0] - 1) * cache.stride(0) + PAGE * row_bytes,), (1,))
        _latents[(rows, 2)](
            joined,
            q_weight,
            kv_weight,
            rope_table,
            positions,
            slots,
            fp8,
            scales,
            flat.view(torch.float8_e4m3fn),
            flat.view(torch.float32),
            flat.view(torch.bfloat16),
            joined.stride(0),
            scales.stride(1),
            cache.stride(0),
            row_bytes,
            eps,
            Q=q,
            KV=kv,
            ROPE=rope,
            Q_GROUPS=triton.next_power_of_2(q // GROUP),
            KV_GROUPS=kv // GROUP,
            GROUP_SIZE=GROUP,
            PAGE_TOKENS=PAGE,
            SMALLEST_AMAX=SMALLEST,
            LARGEST=FP8_MAX,
            num_warps=4,
        )
    return fp8, scales


def latents_torch(
    joined: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`latents` in plain torch."""
    q, kv = q_weight.shape[0], kv_weight.shape[0]
    q_latent, kv_latent, k_rope = joined.split([q, kv, joined.shape[1] - q - kv], dim=1)
    kv_latent = _rms_norm(kv_latent, kv_weight, eps)
    cos, sin = rope_table[positions].chunk(2, dim=1)
    even, odd = k_rope[:, 0::2].float(), k_rope[:, 1::2].float()
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(1)
    parts = quantise_latents(kv_latent.unsqueeze(1), rotated.unsqueeze(1))
    slots = slots.long()
    cache[slots // PAGE, slots % PAGE] = torch.cat(parts, dim=1)
    return quantise_groups(_rms_norm(q_latent, q_weight, eps))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()
    return value.to(x.dtype)


def sanitizer_cases() -> list[tuple[str, Callable[[], object]]]:
    """Launches for compute-sanitizer: layer-major rows, and pages with more in them."""
    cases: list[tuple[str, Callable[[], object]]] = []
    for rows, page in ((1, PAGE * 656), (3, PAGE * 656 + 1024)):
        memory = torch.zeros(2 * page, dtype=torch.uint8, device="cuda")
        cache = memory.as_strided((2, PAGE, 656), (page, 656, 1))
        run = functools.partial(
            latents,
            torch.randn(rows, 2048 + 576, device="cuda").bfloat16(),
            torch.ones(2048, device="cuda").bfloat16(),
            torch.ones(512, device="cuda").bfloat16(),
            1e-5,
            torch.rand(128, 64, device="cuda"),
            torch.arange(rows, device="cuda"),
            cache,
            torch.arange(2 * PAGE - rows, 2 * PAGE, device="cuda"),
        )
        cases.append((f"{rows} rows, pages of {page} B", run))
    return cases
