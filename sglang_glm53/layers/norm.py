"""RMSNorm of the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm

from sglang_glm53.layers.decode_chain import attach, fuses


class GlmRMSNorm(RMSNorm):
    """SGLang's RMSNorm; a handful of rows leave it quantised too (see decode_chain.py)."""

    def forward_cuda(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[T, D] -> its norm; with a residual the norm of the sum, and the sum (in place)."""
        if post_residual_addition is not None or options or not fuses(x):
            return super().forward_cuda(x, residual, post_residual_addition, **options)
        from sglang_glm53.kernels.norm_quant import add_norm_quant

        normed = add_norm_quant(x, residual, self.weight, self.variance_epsilon, bf16=True)
        output = attach(normed.bf16, (normed.fp8, normed.scales))
        return output if residual is None else (output, residual)
