"""Block-scaled FP8 (e4m3) in plain torch: weights in blocks of 128 x 128, rows in groups of 128,
each with one fp32 scale."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_glm53.checkpoint import FP8_BLOCK
from sglang_glm53.memory.quantise import FP8_MAX

GROUP = FP8_BLOCK
SMALLEST = 1e-10  # a group's largest |value| counts as at least this much, as in SGLang's writer
MOST_ROWS = 32  # a decode or verify step has; the kernels of the decode chain take no more
ALIGNMENT = 4  # rows of the scales: a column begins at a multiple of 16 bytes, as TMA wants


def group_scales(rows: int, width: int, device: torch.device | str) -> torch.Tensor:
    """Uninitialised scales: fp32 [rows, width / 128], column-major, columns aligned."""
    padded = -(-rows // ALIGNMENT) * ALIGNMENT
    return torch.empty(width // GROUP, padded, dtype=torch.float32, device=device).T[:rows]


def quantise_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, D] -> float8_e4m3fn [T, D] and fp32 scales [T, D / 128]: largest |value| / 448."""
    rows, width = x.shape
    groups = x.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1).clamp_min(SMALLEST) / FP8_MAX
    values = (groups * (1.0 / scale)[..., None]).clamp_(-FP8_MAX, FP8_MAX)
    scales = group_scales(rows, width, x.device).copy_(scale)
    return values.flatten(1).to(torch.float8_e4m3fn), scales


def dequantise_groups(fp8: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 values of `quantise_groups`' result."""
    return (fp8.float().unflatten(1, (-1, GROUP)) * scales[..., None]).flatten(1)


def dequantise_blocks(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[rows, cols] FP8 times its [ceil(rows/128), ceil(cols/128)] FP32 scales, as ``dtype``."""
    rows, cols = weight.shape
    per_value = scale.float().repeat_interleave(GROUP, 0)[:rows]
    per_value = per_value.repeat_interleave(GROUP, 1)[:, :cols]
    return (weight.float() * per_value).to(dtype)


def sanitizer_cases() -> list[tuple[str, Callable[[], object]]]:
    """No kernel here."""
    return []
