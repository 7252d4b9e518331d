"""Expert parallelism on a CPU: SGLang's torch expert loop, which knows the local experts alone.

The dispatcher marks a choice that another rank computes with -1. SGLang's GPU kernels skip it; its
torch loop counts choices by expert and fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_glm53 import catalog


def install() -> None:
    """Let the loop see the choices of this rank alone (a row of the catalog)."""
    catalog.wrap("sglang.srt.layers.moe.fused_moe_native:moe_forward_native", skip_other_ranks)


def skip_other_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hand the loop each local choice as a row of its own, and add the rows up by token."""

    def moe_forward_native(layer: Any, x: Any, topk_output: Any, moe_runner_config: Any) -> Any:
        local = topk_output.topk_ids >= 0
        if layer.num_experts == layer.num_local_experts or bool(local.all()):
            return original(layer, x, topk_output, moe_runner_config)
        total = x.new_zeros(x.shape)
        tokens, _ = local.nonzero(as_tuple=True)
        if tokens.numel() == 0:
            return total
        choices = topk_output._replace(
            topk_ids=topk_output.topk_ids[local].unsqueeze(1),
            topk_weights=topk_output.topk_weights[local].unsqueeze(1),
        )
        return total.index_add_(0, tokens, original(layer, x[tokens], choices, moe_runner_config))

    return moe_forward_native
