"""Building blocks whose constructors differ between SGLang releases."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.topk import TopK, TopKOutputFormat
from sglang.srt.layers.moe.utils import get_moe_runner_backend

from sglang_glm53.config import Glm53Config

try:  # 0.5.23: the loader decides once, the layers read the count
    from sglang.srt.layers.moe.utils import get_num_fused_shared_experts
except ImportError:  # 0.5.22: the loader decides whether, the model knows how many
    get_num_fused_shared_experts = None
    from sglang.srt.layers.moe.utils import is_shared_experts_fusion_disabled

_TOPK_COUNTS_FUSED = get_num_fused_shared_experts is None


def num_fused_shared_experts(n_shared_experts: int) -> int:
    """Shared experts that run as rows of the routed experts' GEMM in the model being built."""
    if get_num_fused_shared_experts is not None:
        return get_num_fused_shared_experts()
    return 0 if is_shared_experts_fusion_disabled() else n_shared_experts


def make_topk(
    config: Glm53Config,
    *,
    layer_id: int,
    fused_shared_experts: int,
    correction_bias: torch.Tensor,
    quant_config: Any,
    experts: Any,
    scaled_by_router: bool,
) -> TopK:
    """SGLang's router selection for GLM-5.3, bound to the runner of ``experts`` where it can be."""
    kwargs: dict[str, Any] = {"top_k": config.num_experts_per_tok}
    if _TOPK_COUNTS_FUSED:
        kwargs["top_k"] += fused_shared_experts
        kwargs["num_fused_shared_experts"] = fused_shared_experts
    unquantized = quant_config is None and not get_moe_runner_backend().is_flashinfer_trtllm()
    topk = TopK(
        **kwargs,
        layer_id=layer_id,
        renormalize=config.norm_topk_prob,
        use_grouped_topk=True,
        num_expert_group=config.n_group,
        topk_group=config.topk_group,
        scoring_func="sigmoid",
        correction_bias=correction_bias,
        quant_config=quant_config,
        routed_scaling_factor=config.routed_scaling_factor,
        apply_routed_scaling_factor_on_output=scaled_by_router,
        output_format=TopKOutputFormat.STANDARD if unquantized else None,
    )
    if hasattr(topk, "bind_runner_backend"):
        topk.bind_runner_backend(
            experts.runner_backend, routing_method_type=experts.routing_method_type
        )
    return topk
