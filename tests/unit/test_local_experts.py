"""Expert parallelism in SGLang's torch expert loop: the ranks' sums are what one rank computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

EXPERTS, CHOICES, HIDDEN, INNER = 8, 3, 16, 12


@pytest.fixture(scope="module")
def native() -> Any:
    """SGLang's loop; its activation needs the stand-in for the kernel package."""
    from sglang_glm53.compat import cpu

    cpu.prepare()
    from sglang.srt.layers.moe import fused_moe_native

    return getattr(fused_moe_native.moe_forward_native, "__wrapped__", None) or (
        fused_moe_native.moe_forward_native
    )


def layer(first: int, count: int) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)
    return SimpleNamespace(
        num_experts=EXPERTS,
        num_local_experts=count,
        w13_weight=w13[first : first + count],
        w2_weight=w2[first : first + count],
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_sum_over_ranks(ranks: int, native: Any) -> None:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from sglang_glm53.compat.local_experts import skip_other_ranks

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, HIDDEN, generator=generator)
    ids = torch.rand(20, EXPERTS, generator=generator).topk(CHOICES).indices.int()
    weights = torch.rand(20, CHOICES, generator=generator)
    config = SimpleNamespace(
        activation="silu",
        gemm1_alpha=None,
        gemm1_clamp_limit=None,
        apply_router_weight_on_input=False,
    )
    whole = native(layer(0, EXPERTS), x, StandardTopKOutput(weights, ids, None), config)
    share = EXPERTS // ranks
    wrapped, total = skip_other_ranks(native), torch.zeros_like(x)
    for rank in range(ranks):
        own = ids - rank * share
        own = torch.where((own >= 0) & (own < share), own, -1)
        given = StandardTopKOutput(weights, own, None)
        total += wrapped(layer(rank * share, share), x, given, config)
        assert (own < 0).any() == (ranks > 1)
    torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-4)


def test_a_rank_that_no_token_chose(native: Any) -> None:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from sglang_glm53.compat.local_experts import skip_other_ranks

    x = torch.ones(4, HIDDEN)
    nothing = StandardTopKOutput(torch.ones(4, 2), torch.full((4, 2), -1, dtype=torch.int32), None)
    assert not skip_other_ranks(native)(layer(0, 4), x, nothing, SimpleNamespace()).any()
