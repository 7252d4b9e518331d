"""GLM-5.3 for SGLang: embedding, 78 decoder layers, final norm, lm_head.

One layer is ``x += attention(norm(x)); x += ffn(norm(x))``. The adds, the norms and the sums over
ranks live in the stage boundaries (layers/boundary.py); what is left here is the order of things.
Every full-indexer layer selects positions; the shared layers below it attend to the same ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation
from sglang.srt.layers.attention.index_topk_share import IndexTopKShareState
from sglang.srt.layers.aux_hidden_states import AuxHiddenStatePacker
from sglang.srt.layers.layer_boundary import get_attn_tp_context, is_dense_ffn_fully_dp
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.utils import PPMissingLayer
from sglang.srt.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
    get_embedding_tp_kwargs,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.utils import LazyValue, add_prefix, make_pp_layers
from torch import nn

from sglang_glm53.config import Glm53Config, fill_model_definition
from sglang_glm53.layers.attention import GlmAttention, uses_expanded_form
from sglang_glm53.layers.boundary import append_layer, declare_layer
from sglang_glm53.layers.moe import GlmMLP, GlmMoE
from sglang_glm53.layers.norm import GlmRMSNorm
from sglang_glm53.layers.streams import make_side_stream
from sglang_glm53.models.fusion import shared_expert_fusion_obstacle
from sglang_glm53.models.weights import CheckpointLoader, layer_quant_config

logger = logging.getLogger(__name__)

PACKED_MODULES = {"fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"]}


def read_config(hf_config: Any) -> Glm53Config:
    """Check the Hugging Face configuration, say what it lacked, and complete it for SGLang."""
    config = Glm53Config.from_hf(hf_config)
    if config.filled:
        logger.warning(
            "sglang-glm53: config.json lacks %s; the model's definition fills them in",
            ", ".join(config.filled),
        )
        fill_model_definition(hf_config)
    return config


class GlmDecoderLayer(nn.Module):
    """Attention, then a dense MLP or a MoE, each on the normed residual stream."""

    def __init__(
        self,
        config: Glm53Config,
        layer_id: int,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        is_nextn: bool = False,
        side_stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.self_attn = GlmAttention(
            config,
            layer_id,
            quant_config,
            add_prefix("self_attn", prefix),
            is_nextn=is_nextn,
            side_stream=side_stream,
        )
        if is_nextn or config.is_sparse(layer_id):
            self.mlp: GlmMLP | GlmMoE = GlmMoE(
                config, layer_id, quant_config, add_prefix("mlp", prefix), side_stream=side_stream
            )
        else:
            self.mlp = GlmMLP(
                config.hidden_size,
                config.intermediate_size,
                quant_config,
                add_prefix("mlp", prefix),
                parallel_group="replicated" if is_dense_ffn_fully_dp() else "tp",
            )
        self.input_layernorm = GlmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = GlmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn_boundary, self.ffn_boundary = append_layer(
            config,
            layer_id,
            input_layernorm=self.input_layernorm,
            post_attention_layernorm=self.post_attention_layernorm,
            qkv_latent_func=self.self_attn.project_latents,
            is_nextn=is_nextn,
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: ForwardBatch,
        prev_topk_indices: torch.Tensor | None = None,
        aux_capture: AuxHiddenStatePacker | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, hidden] stream (or a sum still owed) -> the same, and a selection to hand down."""
        x = self.attn_boundary.prepare(hidden_states, forward_batch, capture_gathered=aux_capture)
        x, topk_indices = self.self_attn(positions, x, forward_batch, prev_topk_indices)
        get_attn_tp_context().clear_attn_inputs()
        x = self.attn_boundary.finish(x, forward_batch)

        x = self.ffn_boundary.prepare(x, forward_batch)
        with self.ffn_boundary.exit(forward_batch) as ffn_exit:
            x = self.mlp(x)
        return ffn_exit.finish(x), topk_indices


class GlmModel(nn.Module):
    """The decoder stack of this pipeline rank."""

    fall_back_to_pt_during_load = False

    def __init__(
        self,
        config: Glm53Config,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.config = config
        self.pp_group = get_parallel().pp_group
        # The last rank's draft model embeds tokens too.
        drafts = get_spec().speculative_algorithm is not None
        if self.pp_group.is_first_rank or (self.pp_group.is_last_rank and drafts):
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, **get_embedding_tp_kwargs()
            )
        else:
            self.embed_tokens = PPMissingLayer()
        side_stream = make_side_stream()
        self.layers, self.start_layer, self.end_layer = make_pp_layers(
            config.num_hidden_layers,
            lambda idx, prefix: GlmDecoderLayer(
                config, idx, quant_config, prefix, side_stream=side_stream
            ),
            prefix=add_prefix("layers", prefix),
            offloader_kwargs={
                "submodule_accessor": lambda layer: getattr(layer.mlp, "experts", layer.mlp),
                "whitelist_param_names_creator": lambda module: (
                    ["w13_weight", "w2_weight"] if hasattr(module, "w13_weight") else []
                ),
            },
            stage_facts=lambda idx: declare_layer(config, idx),
        )
        if self.pp_group.is_last_rank:
            self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        else:
            self.norm = PPMissingLayer(return_tuple=True)
        # Layers whose input an EAGLE3 or DFLASH draft reads; set by the runner.
        self.layers_to_capture: list[int] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> Any:
        if self.pp_group.is_first_rank:
            hidden_states = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
            residual_batch.start(forward_batch)
            handed_down = None
        else:
            hidden_states = self.layers[self.start_layer].attn_boundary.from_pp(
                pp_proxy_tensors, forward_batch
            )
            handed_down = pp_proxy_tensors.tensors.get("topk_indices")
        selection = IndexTopKShareState(forward_batch, handed_down)
        aux = AuxHiddenStatePacker(len(self.layers_to_capture))

        for layer_id in range(self.start_layer, self.end_layer):
            with get_global_expert_distribution_recorder().with_current_layer(layer_id):
                hidden_states, topk_indices = self.layers[layer_id](
                    positions,
                    hidden_states,
                    forward_batch,
                    selection.topk_indices,
                    aux if layer_id in self.layers_to_capture else None,
                )
                selection.update(topk_indices)

        if not self.pp_group.is_last_rank:
            return self._to_next_stage(hidden_states, forward_batch, selection)
        hidden_states = residual_batch.complete_output(hidden_states, forward_batch)
        if not forward_batch.forward_mode.is_idle():
            hidden_states = residual_batch.final_norm(hidden_states, forward_batch, self.norm)
        return (hidden_states, aux.finalize()) if len(aux) else hidden_states

    def _to_next_stage(
        self, hidden_states: Any, forward_batch: ForwardBatch, selection: IndexTopKShareState
    ) -> PPProxyTensors:
        """Send the stream, and the selection if the next stage starts on a shared layer."""
        proxy = residual_batch.to_pp(hidden_states, forward_batch)
        if not uses_expanded_form() and not self.config.runs_indexer(self.end_layer):
            topk_indices = selection.topk_indices
            if topk_indices is None:  # an idle rank has no rows
                topk_indices = proxy["hidden_states"].new_empty(
                    (0, self.config.index_topk), dtype=torch.int32
                )
            proxy.tensors["topk_indices"] = topk_indices
        return proxy


class GlmMoeDsaForCausalLM(nn.Module):
    """GLM-5.3. SGLang keys its decisions for this model on the class name."""

    packed_modules_mapping = PACKED_MODULES
    fused_shared_experts_architecture = "GlmMoeDsaForCausalLM"

    def __init__(
        self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = ""
    ) -> None:
        super().__init__()
        self.config = config
        self.glm_config = read_config(config)
        self.quant_config = quant_config
        if quant_config is not None:
            quant_config.update_packed_modules_mapping(self.packed_modules_mapping)
        layers_quant = layer_quant_config(quant_config)
        self.pp_group = get_parallel().pp_group
        self.model = GlmModel(self.glm_config, layers_quant, add_prefix("model", prefix))
        if not self.pp_group.is_last_rank:
            self.lm_head = PPMissingLayer()
        elif config.tie_word_embeddings and self.pp_group.world_size == 1:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=layers_quant,
                prefix=add_prefix("lm_head", prefix),
                use_attn_tp_group=get_parallel().enable_dp_lm_head,
            )
        self.logits_processor = LogitsProcessor(config)
        self.capture_aux_hidden_states = False
        self._routed_experts = LazyValue(
            lambda: {
                layer_id: self.model.layers[layer_id].mlp.get_moe_weights()
                for layer_id in range(self.start_layer, self.end_layer)
                if isinstance(self.model.layers[layer_id].mlp, GlmMoE)
            }
        )
        self._loader = CheckpointLoader(self, self.glm_config)
        get_attn_tp_context().init_context(self.glm_config.q_lora_rank, True)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> Any:
        """[T] token ids and positions -> logits of the batch, or tensors for the next stage."""
        with get_attn_tp_context().maybe_input_scattered(forward_batch):
            hidden_states = self.model(
                input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
            )
        if not self.pp_group.is_last_rank:
            return hidden_states
        aux_hidden_states = None
        if self.capture_aux_hidden_states:
            hidden_states, aux_hidden_states = hidden_states
        return self.logits_processor(
            input_ids, hidden_states, self.lm_head, forward_batch, aux_hidden_states
        )

    # --- weights ---

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load checkpoint tensors; the first call must bring all of them (see weights.py)."""
        self._loader.load(weights)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        """Derive W_UK and W_UV; loaders that skip ``load_weights`` call this alone."""
        self._loader.loaded_once = True
        for layer_id in range(self.start_layer, self.end_layer):
            self.model.layers[layer_id].self_attn.split_kv_b()

    # --- what SGLang reads of a model ---

    @property
    def start_layer(self) -> int:
        return self.model.start_layer

    @property
    def end_layer(self) -> int:
        return self.model.end_layer

    @property
    def routed_experts_weights_of_layer(self) -> dict[int, list[torch.Tensor]]:
        return self._routed_experts.value

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedding and head that the MTP draft shares."""
        return self.model.embed_tokens.weight, self.lm_head.weight

    @classmethod
    def shared_experts_fusion_disable_reason(cls, hf_config: Any, quant_config: Any) -> str | None:
        return shared_expert_fusion_obstacle(
            hf_config, quant_config, cls.fused_shared_experts_architecture
        )

    @classmethod
    def num_fusable_shared_experts(cls, hf_config: Any) -> int:
        return hf_config.n_shared_experts or 0

    @classmethod
    def get_model_config_for_expert_location(cls, config: Any) -> ModelConfigForExpertLocation:
        return ModelConfigForExpertLocation(
            num_layers=config.num_hidden_layers,
            num_logical_experts=config.n_routed_experts,
            num_groups=config.n_group,
        )

    def set_eagle3_layers_to_capture(self, layer_ids: list[int] | None = None) -> None:
        """Hand an EAGLE3 draft the outputs of ``layer_ids`` (default: low, middle, high)."""
        layers = self.glm_config.num_hidden_layers
        self._capture([1, layers // 2 - 1, layers - 4] if layer_ids is None else layer_ids)

    def set_dflash_layers_to_capture(self, layer_ids: list[int]) -> None:
        self._capture(layer_ids)

    def _capture(self, layer_ids: list[int]) -> None:
        if self.pp_group.is_last_rank:
            self.capture_aux_hidden_states = True
            # A layer's output is captured where the next layer reads it.
            self.model.layers_to_capture = [layer_id + 1 for layer_id in layer_ids]


EntryClass = GlmMoeDsaForCausalLM
