"""Block-scaled FP8: a weight in blocks of 128 x 128, each with one FP32 scale."""

from __future__ import annotations

import torch

from sglang_glm53.checkpoint import FP8_BLOCK


def dequantize_blocks(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[rows, cols] FP8 times its [ceil(rows/128), ceil(cols/128)] FP32 scales, as ``dtype``."""
    rows, cols = weight.shape
    per_value = scale.float().repeat_interleave(FP8_BLOCK, 0)[:rows]
    per_value = per_value.repeat_interleave(FP8_BLOCK, 1)[:, :cols]
    return (weight.float() * per_value).to(dtype)
