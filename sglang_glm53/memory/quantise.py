"""FP8 forms of what the cache holds, in plain torch: index keys, and latents of an FP8 cache."""

from __future__ import annotations

import torch

from sglang_glm53.memory.page import FP8_BLOCK, SCALE_BYTES

FP8_MAX = 448.0
# Below this the largest value of a key counts as this much, as in SGLang's own writer.
SMALLEST_AMAX = 1e-4


def quantise_index_key(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 form of index keys: key = fp8 * scale, scale = max(largest |value|, 1e-4) / 448.

    Args:
        key: [tokens, 128], any float dtype.

    Returns:
        fp8 (float8_e4m3fn, [tokens, 128]) and scale (fp32, [tokens]).
    """
    key = key.float()
    scale = key.abs().amax(dim=-1).clamp_min(SMALLEST_AMAX) / FP8_MAX
    scaled = key * (1.0 / scale).unsqueeze(-1)
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def fp8_values(stored: torch.Tensor) -> torch.Tensor:
    """The values of FP8 (e4m3) bytes, fp32 of the same shape; exact.

    torch converts FP8 one value at a time on a CPU; this is about ten times faster. A byte's
    exponent and mantissa are put where fp32 has its own, which gives the value times 2 ** -120 (the
    difference of the exponents' offsets), subnormals included. NaN (0x7f), which nothing here
    stores, would read as 480.

    Args:
        stored: uint8, any shape.
    """
    bits = stored.view(torch.int8).to(torch.int32)
    # The sign was extended to the left by the line above: keep it, and the seven bits below 27.
    bits = bits.bitwise_left_shift_(20).bitwise_and_(0x87F00000 - (1 << 32))
    return bits.view(torch.float32).mul_(2.0**120)


def quantise_latents(latents: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The bytes of FP8 cache rows: what FlashMLA reads.

    Each 128 latents are e4m3 values with one fp32 scale, largest |value| / 448; zeros have scale 1.

    Args:
        latents: [tokens, 1, kv_lora_rank], a multiple of 128, any float dtype.
        rope: [tokens, 1, qk_rope_head_dim], stored in bfloat16.

    Returns:
        uint8 [tokens, kv_lora_rank + scales] and uint8 [tokens, 2 * qk_rope_head_dim].
    """
    blocks = latents.flatten(1).float().unflatten(1, (-1, FP8_BLOCK))
    scale = blocks.abs().amax(dim=-1) / FP8_MAX
    scale = scale.where(scale > 0, 1.0)
    scaled = blocks * (1.0 / scale).unsqueeze(-1)
    fp8 = scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).flatten(1)
    stored = torch.cat([fp8.view(torch.uint8), scale.view(torch.uint8)], dim=-1)
    return stored, rope.flatten(1).to(torch.bfloat16).view(torch.uint8)


def dequantise_latents(rows: torch.Tensor, kv_lora_rank: int) -> torch.Tensor:
    """fp32 values [tokens, kv_lora_rank + qk_rope_head_dim] of FP8 cache rows.

    Args:
        rows: uint8 [tokens, row bytes], as `quantise_latents` gives them, one part after the other.
    """
    scales = kv_lora_rank // FP8_BLOCK * SCALE_BYTES
    parts = [kv_lora_rank, scales, rows.shape[1] - kv_lora_rank - scales]
    fp8, scale, rope = (part.contiguous() for part in rows.split(parts, dim=1))
    latents = fp8_values(fp8).unflatten(1, (-1, FP8_BLOCK))
    latents = latents * scale.view(torch.float32).unsqueeze(-1)
    return torch.cat([latents.flatten(1), rope.view(torch.bfloat16).float()], dim=-1)
