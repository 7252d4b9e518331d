"""Without bf16 weights on a GPU a projection is the layer itself."""

from __future__ import annotations

import torch
from torch import nn

from sglang_glm53.layers.gemm import FEW_ROW_QUERY_SHAPES, project


class Linear(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).to(dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None


def test_on_a_cpu_it_is_the_layer() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer, x = Linear(dtype), torch.randn(3, 4).to(dtype)
        assert torch.equal(project(layer, x), x @ layer.weight.T)
        assert torch.equal(project(layer, x, FEW_ROW_QUERY_SHAPES), x @ layer.weight.T)


def test_a_layer_without_a_plain_weight_is_called() -> None:
    layer = Linear(torch.float32)
    weight = layer.weight.detach()
    del layer.weight
    layer.forward = lambda x: (x @ weight.T, None)  # type: ignore[method-assign]
    x = torch.randn(2, 4)
    assert torch.equal(project(layer, x), x @ weight.T)
