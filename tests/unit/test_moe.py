"""Which rank adds the shared expert, and what scales the routed ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sglang_glm53.layers import moe as layer
from sglang_glm53.layers.moe import GlmMoE


class Returns(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.full_like(x, self.value)

    def empty_topk_output(self, device: torch.device) -> None:
        return None


def make(*, replicated: bool, scale: float = 1.0, shared: bool = True) -> GlmMoE:
    block = GlmMoE.__new__(GlmMoE)
    nn.Module.__init__(block)
    block.gate, block.topk, block.experts = Returns(0.0), Returns(0.0), Returns(1.0)
    block.shared_experts = Returns(10.0) if shared else None
    block.shared_is_replicated, block.output_scale, block.side_stream = replicated, scale, None
    return block


@pytest.mark.parametrize(
    ("replicated", "deepep", "adds_to_partial", "expected"),
    [
        (False, False, False, 11.0),  # a partial sum of the shared expert, on every rank
        (True, False, True, 11.0),  # the first rank of a sum that is owed
        (True, False, False, 1.0),  # the other ranks: the sum would count it again
        (True, True, False, 11.0),  # DeepEP: each rank has its own tokens, whole
    ],
)
def test_the_shared_expert_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
    replicated: bool,
    deepep: bool,
    adds_to_partial: bool,
    expected: float,
) -> None:
    monkeypatch.setattr(layer, "is_deepep_class_backend", lambda: deepep)
    monkeypatch.setattr(layer, "adds_replicated_output_to_partial", lambda: adds_to_partial)
    out = make(replicated=replicated)(torch.zeros(3, 4))
    assert out.eq(expected).all()


def test_the_scale_is_of_the_routed_experts_alone() -> None:
    assert make(replicated=False, scale=2.5)(torch.zeros(2, 4)).eq(12.5).all()
    assert make(replicated=False, scale=2.5, shared=False)(torch.zeros(2, 4)).eq(2.5).all()


def test_a_rank_without_rows_takes_part() -> None:
    assert make(replicated=True)(torch.zeros(0, 4)).shape == (0, 4)
