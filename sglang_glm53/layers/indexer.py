"""The DSA indexer of a full layer: which ``index_topk`` positions attention reads for a query.

``score(t, s) = sum_h gate_h(t) * relu(q_h(t) . k(s))`` over the cached keys s <= t, with one key
head, gates from the hidden state scaled by ``index_n_heads^-0.5 * index_head_dim^-0.5``, and
interleaved RoPE on the first ``qk_rope_head_dim`` values of queries and keys (the model's
definition; DeepSeek-V3.2 rotates halves instead).
"""

from __future__ import annotations

import torch
from sglang.srt.layers.layernorm import LayerNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_glm53.config import Glm53Config


class GlmIndexer(nn.Module):
    """Projects index queries, keys and gates; the attention backend caches, scores and selects.

    All ranks hold the whole indexer: every rank needs the same selection.
    """

    def __init__(
        self,
        config: Glm53Config,
        layer_id: int,
        rotary_emb: nn.Module,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.n_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.rope_head_dim = config.qk_rope_head_dim
        self.index_topk = config.index_topk
        self.gate_scale = self.n_heads**-0.5 * self.head_dim**-0.5

        self.wq_b = ReplicatedLinear(
            config.q_lora_rank,
            self.n_heads * self.head_dim,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("wq_b", prefix),
        )
        self.wk = ReplicatedLinear(
            config.hidden_size,
            self.head_dim,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("wk", prefix),
        )
        self.k_norm = LayerNorm(self.head_dim, eps=1e-6)
        # FP32, as transformers keeps it: the gates weigh whole heads against each other.
        self.weights_proj = ReplicatedLinear(
            config.hidden_size,
            self.n_heads,
            bias=False,
            params_dtype=torch.float32,
            prefix=add_prefix("weights_proj", prefix),
        )
        self.rotary_emb = rotary_emb

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        *,
        select: bool = True,
    ) -> torch.Tensor | None:
        """Cache this batch's index keys, and select unless told otherwise.

        Args:
            hidden_states: [T, hidden], the layer's normed input.
            q_latent: [T, q_lora_rank], the normed query latent of MLA.
            positions: [T] int64.

        Returns:
            [T, index_topk] int32 in the backend's own addressing, -1 padded; None if not selected.
        """
        queries = self.wq_b(q_latent)[0].view(-1, self.n_heads, self.head_dim) if select else None
        keys = self.k_norm(self.wk(hidden_states)[0])
        queries, keys = self._rotate(queries, keys, positions)

        backend = get_attn_backend()
        backend.store_index_k(self.layer_id, keys, forward_batch)
        if not select:
            return None
        gates = self.weights_proj(hidden_states.float())[0] * self.gate_scale
        topk_indices = backend.select_topk(self.layer_id, queries, gates, forward_batch)
        return maybe_capture_indexer_topk(self.layer_id, topk_indices)

    def _rotate(
        self, queries: torch.Tensor | None, keys: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        rope = self.rope_head_dim
        k_rope = keys[:, None, :rope]
        # The embedding rotates a pair; without queries the keys stand in for them.
        q_rope = k_rope.clone() if queries is None else queries[..., :rope]
        q_rope, k_rope = self.rotary_emb(positions, q_rope, k_rope)
        keys = torch.cat([k_rope.squeeze(1), keys[:, rope:]], dim=-1)
        if queries is not None:
            queries = torch.cat([q_rope, queries[..., rope:]], dim=-1)
        return queries, keys
