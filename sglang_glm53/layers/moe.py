"""The FFN of a layer: a dense SwiGLU MLP, or routed experts with one shared expert.

Routing: sigmoid scores; a correction bias decides which experts win but not how much they weigh;
the winners' scores are normalised to sum 1 and multiplied by ``routed_scaling_factor``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.moe import get_moe_a2a_backend
from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
from sglang.srt.layers.moe.utils import (
    RoutingMethodType,
    adds_replicated_output_to_partial,
    filter_moe_weight_param_global_expert,
    is_deepep_class_backend,
)
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_glm53.compat.layers import make_topk, num_fused_shared_experts
from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error
from sglang_glm53.kernels.fp8 import GROUP
from sglang_glm53.layers.decode_chain import Rows, attached, is_block_fp8, product
from sglang_glm53.layers.streams import forked, join, overlaps

# Rows up to which SGLang's GEMM for a handful of rows serves the router; also its compiled limit.
FEW_ROWS = 16


class GlmMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [T, hidden] -> [T, hidden], a partial sum over the TP ranks."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        parallel_group: str = "tp",
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("gate_up_proj", prefix),
            parallel_group=parallel_group,
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=False,
            quant_config=quant_config,
            reduce_results=False,
            prefix=add_prefix("down_proj", prefix),
            parallel_group=parallel_group,
        )
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            return x
        rows = attached(x)
        if rows is not None and is_block_fp8(self.gate_up_proj) and is_block_fp8(self.down_proj):
            from sglang_glm53.kernels.act_quant import silu_mul_quant

            return product(self.down_proj, silu_mul_quant(product(self.gate_up_proj, rows)))
        gate_up, _ = self.gate_up_proj(x)
        return self.down_proj(self.act_fn(gate_up))[0]


class GlmRouter(nn.Module):
    """Router logits in FP32: the correction bias separates experts by less than bf16 resolves.

    On a GPU bf16 rows meet bf16 weights and the products are summed and kept in FP32.
    """

    def __init__(self, config: Glm53Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(config.n_routed_experts, dtype=torch.float32), requires_grad=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, n_routed_experts], float32."""
        if not x.is_cuda or x.dtype != torch.bfloat16:
            return F.linear(x.float(), self.weight.float())
        from sglang.kernels.ops.gemm.bf16_fp32 import linear_bf16_fp32
        from sglang.kernels.ops.gemm.tiny_gemm import can_use_tiny_gemm, tiny_gemm_bf16

        if x.shape[0] <= FEW_ROWS and can_use_tiny_gemm(*self.weight.shape, max_m=FEW_ROWS):
            return tiny_gemm_bf16(x, self.weight, out_dtype=torch.float32, max_m=FEW_ROWS)
        return linear_bf16_fp32(x, self.weight)


class GlmMoE(nn.Module):
    """Routed experts and the shared expert: [T, hidden] -> [T, hidden], a partial sum.

    ``T`` are the tokens of this FFN stage: under attention DP the boundary has gathered every
    rank's. With expert parallelism through an all-to-all, the dispatcher inside ``experts`` moves
    tokens and the shared expert is replicated.
    """

    def __init__(
        self,
        config: Glm53Config,
        layer_id: int,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        side_stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__()
        if get_parallel().tp_size > config.n_routed_experts:
            raise Glm53Error(
                f"--tp-size {get_parallel().tp_size} exceeds the model's {config.n_routed_experts} "
                "experts; use at most as many ranks as experts"
            )
        # SGLang asks every sum's owner; here the stage boundary completes it.
        self.reduce_results = False
        self.layer_id = layer_id
        self.side_stream = side_stream
        self.num_fused_shared_experts = num_fused_shared_experts(config.n_shared_experts)
        fused = self.num_fused_shared_experts

        self.gate = GlmRouter(config)
        self.experts = get_moe_impl_class(quant_config)(
            num_experts=config.n_routed_experts + fused + get_exec().moe.ep_num_redundant_experts,
            num_fused_shared_experts=fused,
            top_k=config.num_experts_per_tok + fused,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            layer_id=layer_id,
            quant_config=quant_config,
            routed_scaling_factor=config.routed_scaling_factor,
            routing_method_type=RoutingMethodType.DeepSeekV3,
            # The shared expert reads the same rows, on a second stream perhaps.
            inplace=fused > 0 or not config.n_shared_experts,
            prefix=add_prefix("experts", prefix),
        )
        # Torch's expert loop does not know the scaling factor, the GPU runners do: where they
        # leave it to the router, or there is no runner, the top-k weights carry it.
        scaled_by_router = (
            self.experts.should_fuse_routed_scaling_factor_in_topk
            or self.gate.weight.device.type == "cpu"
        )
        self.routed_factor = 1.0 if scaled_by_router else config.routed_scaling_factor
        self.hidden_size = config.hidden_size
        # The all-to-all dispatcher's runners leave the scaling to the model.
        self.output_scale = (
            config.routed_scaling_factor
            if get_moe_a2a_backend().is_deepep() and not scaled_by_router
            else 1.0
        )
        self.topk = make_topk(
            config,
            layer_id=layer_id,
            fused_shared_experts=fused,
            correction_bias=self.gate.e_score_correction_bias,
            quant_config=quant_config,
            experts=self.experts,
            scaled_by_router=scaled_by_router,
        )
        self.shared_experts: GlmMLP | None = None
        self.shared_is_replicated = not get_moe_a2a_backend().is_none()
        if config.n_shared_experts and not fused:
            self.shared_experts = GlmMLP(
                config.hidden_size,
                config.moe_intermediate_size * config.n_shared_experts,
                quant_config,
                add_prefix("shared_experts", prefix),
                parallel_group="replicated" if self.shared_is_replicated else "tp",
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Every rank runs the experts, tokens or not: an all-to-all waits for all of them.
        if x.shape[0] == 0:
            return self.experts(x, self.topk.empty_topk_output(x.device))
        if self.shared_experts is None:
            return self._routed(x)
        rows = attached(x)
        if rows is not None and self._fuses():
            return self._forward_fused(x, rows)
        if overlaps(self.side_stream, x.shape[0]):
            self.side_stream.wait_stream(torch.cuda.current_stream())
            routed = self._routed(x)
            # Issued last, so that the longer chain stays on the step's own stream.
            with torch.cuda.stream(self.side_stream):
                shared = self.shared_experts(x)
            join(self.side_stream)
        else:
            shared = self.shared_experts(x)
            routed = self._routed(x)
        if self.shared_is_replicated and not self._adds_replicated():
            return routed
        return routed.add_(shared)

    def _fuses(self) -> bool:
        """Whether the experts' weights are what the kernels for few rows read."""
        weight = self.experts.w13_weight
        scale = getattr(self.experts, "w13_weight_scale_inv", None)
        return (
            scale is not None
            and scale.dtype == torch.float32
            and weight.dtype == torch.float8_e4m3fn
            and weight.shape[2] == self.hidden_size
            and weight.shape[1] % (2 * GROUP) == 0
            and scale.shape[1:] == (weight.shape[1] // GROUP, self.hidden_size // GROUP)
            and get_moe_a2a_backend().is_none()
            and self.num_fused_shared_experts == 0
        )

    def _forward_fused(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """`forward` for few rows in FP8, with the shared expert beside the routed ones."""
        from sglang_glm53.kernels.experts import expert_parts, sum_parts

        experts, side = self.experts, self.side_stream
        on_two_streams = overlaps(side, x.shape[0])
        if on_two_streams:
            with forked(side):
                shared = self.shared_experts(x)
        else:
            shared = self.shared_experts(x)
        choice = self.topk(x, self.gate(x))
        chosen = choice.topk_ids.to(torch.int32)
        if experts.moe_ep_size > 1:  # this rank's experts are 0 .. n - 1
            chosen = chosen - experts.moe_ep_rank * experts.num_local_experts
        parts = expert_parts(
            rows,
            (experts.w13_weight, experts.w13_weight_scale_inv),
            (experts.w2_weight, experts.w2_weight_scale_inv),
            chosen,
            choice.topk_weights,
        )
        if on_two_streams:
            join(side)
        return sum_parts(
            parts, chosen, experts.num_local_experts, shared, factor=self.routed_factor
        )

    @staticmethod
    def _adds_replicated() -> bool:
        """Whether this rank adds what every rank has whole. A sum over ranks that is still owed
        counts it once; a DeepEP-like dispatcher gives each rank its own tokens, and owes none."""
        return is_deepep_class_backend() or adds_replicated_output_to_partial()

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> the weighted sum of each row's experts, a partial sum; a new tensor
        where a shared expert is added to it."""
        routed = self.experts(x, self.topk(x, self.gate(x)))
        return routed if self.output_scale == 1.0 else routed.mul_(self.output_scale)

    def get_moe_weights(self) -> list[torch.Tensor]:
        """This rank's routed-expert tensors, [local experts, ...] each, for the expert balancer."""
        local = self.experts.num_local_experts
        return [
            tensor.data[: local - self.num_fused_shared_experts]
            for name, tensor in self.experts.named_parameters()
            if name != "correction_bias"
            and filter_moe_weight_param_global_expert(name, tensor, local)
        ]
