"""The MTP draft: one decoder layer that guesses the token after the next one.

For a position whose next token is known, it joins the embedding of that token with the target's
last hidden state, runs the checkpoint's MTP layer (index ``num_hidden_layers``), and shares the
target's embedding and head. Repeated on its own output it drafts several tokens; with
``index_share_for_mtp_iteration`` the steps reuse the selection made for the last accepted token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.layers.attention.index_topk_share import IndexTopKShareState
from sglang.srt.layers.layer_boundary import get_attn_tp_context, layer_stack
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
    get_embedding_tp_kwargs,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
from sglang.srt.models.utils import WeightsMapper
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_glm53.config import Glm53Config
from sglang_glm53.layers.streams import make_side_stream
from sglang_glm53.models.fusion import shared_expert_fusion_obstacle
from sglang_glm53.models.glm_moe_dsa import PACKED_MODULES, GlmDecoderLayer, read_config
from sglang_glm53.models.weights import CheckpointLoader, layer_quant_config


class GlmNextNModel(nn.Module):
    """eh_proj([enorm(embedding), hnorm(hidden)]) -> decoder layer -> norm."""

    def __init__(
        self,
        config: Glm53Config,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            prefix=add_prefix("embed_tokens", prefix),
            **get_embedding_tp_kwargs(),
        )
        self.enorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        # Not `layers`: SGLang would capture prefill graphs of a draft that has them.
        with layer_stack():
            self.decoder = GlmDecoderLayer(
                config,
                0,
                quant_config,
                add_prefix("decoder", prefix),
                is_nextn=True,
                side_stream=make_side_stream(),
            )
        self.shared_head = nn.Module()
        self.shared_head.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """[T] next tokens and positions -> [T, hidden], normed; also the next step's input."""
        hidden_states = self.embed_tokens(input_ids)
        if hidden_states.shape[0] > 0:
            previous = forward_batch.spec_info.hidden_states
            hidden_states = self.eh_proj(self._join(hidden_states, previous))

        residual_batch.start(forward_batch)
        selection = IndexTopKShareState.from_mtp_carry(forward_batch)
        with get_global_expert_distribution_recorder().disable_this_region():
            hidden_states, topk_indices = self.decoder(
                positions, hidden_states, forward_batch, selection.topk_indices
            )
        hidden_states = residual_batch.complete_output(hidden_states, forward_batch)
        if not forward_batch.forward_mode.is_idle():
            hidden_states = residual_batch.final_norm(
                hidden_states, forward_batch, self.shared_head.norm
            )
        selection.update(topk_indices)
        selection.publish()
        return hidden_states

    def _join(self, embeddings: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """[enorm(embedding), hnorm(hidden)]: [T, 2 * hidden]; on a GPU in one launch."""
        if not embeddings.is_cuda or embeddings.dtype != torch.bfloat16:
            return torch.cat([self.enorm(embeddings), self.hnorm(previous)], dim=-1)
        from sglang.kernels.ops.layernorm.fused_eh_norm import fused_eh_norm

        return fused_eh_norm(
            embeddings,
            previous,
            self.enorm.weight,
            self.hnorm.weight,
            self.enorm.variance_epsilon,
        )


class GlmMoeDsaForCausalLMNextN(nn.Module):
    """SGLang's name for the draft architecture of ``GlmMoeDsaForCausalLM``."""

    packed_modules_mapping = PACKED_MODULES
    fused_shared_experts_architecture = "GlmMoeDsaForCausalLMNextN"
    hf_to_sglang_mapper = WeightsMapper()

    def __init__(
        self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = ""
    ) -> None:
        super().__init__()
        self.config = config
        self.glm_config = read_config(config)
        self.quant_config = quant_config
        self.pp_group = get_parallel().pp_group
        layers_quant = layer_quant_config(quant_config)
        self.model = GlmNextNModel(self.glm_config, layers_quant, add_prefix("model", prefix))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=layers_quant,
            prefix=add_prefix("model.shared_head.head", prefix),
            use_attn_tp_group=get_parallel().enable_dp_lm_head,
        )
        self.logits_processor = LogitsProcessor(config)
        self._loader = CheckpointLoader(self, self.glm_config, is_nextn=True)
        get_attn_tp_context().init_context(self.glm_config.q_lora_rank, True)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> Any:
        hidden_states = self.model(input_ids, positions, forward_batch)
        return self.logits_processor(input_ids, hidden_states, self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the MTP layer out of the whole checkpoint's tensors."""
        self._loader.load(weights)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        """Derive W_UK and W_UV; loaders that skip ``load_weights`` call this alone."""
        self._loader.loaded_once = True
        self.model.decoder.self_attn.split_kv_b()

    def set_embed_and_head(self, embed: nn.Parameter, head: nn.Parameter) -> None:
        """Share the target's embedding and head; the draft's own were never loaded."""
        del self.model.embed_tokens.weight
        del self.lm_head.weight
        self.model.embed_tokens.weight = embed
        self.lm_head.weight = head
        if embed.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.embed_tokens.weight, self.lm_head.weight

    @classmethod
    def get_hf_to_sglang_mapper(cls, config: Any) -> WeightsMapper:
        return cls.hf_to_sglang_mapper

    @classmethod
    def shared_experts_fusion_disable_reason(cls, hf_config: Any, quant_config: Any) -> str | None:
        return shared_expert_fusion_obstacle(
            hf_config, quant_config, cls.fused_shared_experts_architecture
        )

    @classmethod
    def num_fusable_shared_experts(cls, hf_config: Any) -> int:
        return hf_config.n_shared_experts or 0


EntryClass = GlmMoeDsaForCausalLMNextN
