"""Block-scaled FP8 as GLM-5.3's FP8 checkpoints store it: e4m3, one fp32 scale a 128x128 block."""

from __future__ import annotations

from typing import Any

from sglang_glm53.tiny.options import FP8_BLOCK

E4M3_MAX = 448.0


def quantise(weight: Any, block: int = FP8_BLOCK) -> tuple[Any, Any]:
    """Quantise a matrix block by block; blocks at the edges may be smaller.

    Args:
        weight: float32 [rows, columns].

    Returns:
        e4m3 [rows, columns] and float32 scales [ceil(rows / block), ceil(columns / block)];
        the weight is the first times the scale of its block ("weight_scale_inv" in the files).
    """
    import torch
    import torch.nn.functional as F

    rows, columns = weight.shape
    tall, wide = -(-rows // block), -(-columns // block)
    padded = F.pad(weight, (0, wide * block - columns, 0, tall * block - rows))
    blocks = padded.view(tall, block, wide, block)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / E4M3_MAX
    quantised = (blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    quantised = quantised.reshape(tall * block, wide * block)[:rows, :columns]
    return quantised.to(torch.float8_e4m3fn).contiguous(), scale
