"""The narrow projections of attention, by the GEMM that suits a handful of rows."""

from __future__ import annotations

import torch
from torch import nn

# [out, in] of q_b_proj at TP 8 and TP 4, at which SGLang found its kernel to be the faster one.
FEW_ROW_QUERY_SHAPES = ((2048, 2048), (4096, 2048))


def project(
    layer: nn.Module, x: torch.Tensor, shapes: tuple[tuple[int, ...], ...] = ()
) -> torch.Tensor:
    """``layer(x)`` [T, out]; bf16 weights on a GPU by SGLang's kernel for 1 to 16 rows.

    Args:
        layer: a linear layer of SGLang's.
        x: [T, in].
        shapes: the weights that it is meant for; empty: any.
    """
    weight = getattr(layer, "weight", None)
    if (
        weight is None
        or not x.is_cuda
        or weight.dtype != torch.bfloat16
        or (shapes and tuple(weight.shape) not in shapes)
    ):
        return layer(x)[0]
    from sglang.kernels.ops.gemm.fused_a_gemm import (
        fused_a_gemm_weight_eligible,
        linear_with_fused_a_gemm,
    )

    if fused_a_gemm_weight_eligible(layer):
        return linear_with_fused_a_gemm(layer, x)
    return layer(x)[0]
