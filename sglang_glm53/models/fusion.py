"""Whether the shared expert can run as one more expert of the routed experts' grouped GEMM."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.moe.utils import is_deepep_class_backend, is_sbo_enabled, is_tbo_enabled
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.utils import is_cuda


def shared_expert_fusion_obstacle(
    hf_config: Any, quant_config: Any, architecture: str
) -> str | None:
    """Why fusion is off for this checkpoint and configuration, or None if it is on.

    SGLang asks before any layer is built, so the answer depends on configurations alone.
    """
    can_fuse = getattr(quant_config, "can_fuse_shared_expert", None)
    if can_fuse is not None and not can_fuse():
        return "The checkpoint keeps shared experts at another precision than routed experts."
    if not is_cuda():
        return "The shared expert is fused into the routed experts on CUDA only."
    if get_exec().moe.enforce_shared_experts_fusion:
        return None
    if is_sbo_enabled() or is_tbo_enabled():
        return "Batch overlap schedules the shared expert by itself."
    if is_deepep_class_backend() or get_parallel().moe_ep_size > 1:
        return "Expert parallelism replicates the shared expert."
    if hf_config.architectures[0] != architecture:
        return f"The checkpoint is not a {architecture}."
    if hf_config.n_routed_experts != 256 or hf_config.n_shared_experts != 1:
        return "Fusion is validated for 256 routed experts and one shared expert."
    return None
