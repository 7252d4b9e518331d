"""The DSA indexer of a full layer: which ``index_topk`` positions attention reads for a query.

``score(t, s) = sum_h gate_h(t) * relu(q_h(t) . k(s))`` over the cached keys s <= t, with one key
head, gates from the hidden state scaled by ``index_n_heads^-0.5 * index_head_dim^-0.5``, and
interleaved RoPE on the first ``qk_rope_head_dim`` values of queries and keys (the model's
definition; DeepSeek-V3.2 rotates halves instead).

Two implementations of the same function:

* `GlmTorchIndexer`, plain torch, for the torch attention backend on any device;
* `GlmIndexer`, on SGLang's kernels: keys are quantised to FP8 with one scale a token and written
  to the paged cache in the launch that normalises and rotates them, queries likewise, and
  index_select.py scores and selects.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.layernorm import LayerNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_glm53.config import Glm53Config
from sglang_glm53.layers import index_select
from sglang_glm53.layers.decode_chain import Rows, product
from sglang_glm53.layers.streams import forked, join, overlaps


class _Indexer(nn.Module):
    """What both have: the query projection, the norm of the keys, RoPE, and the gates' scale.

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
        self.k_norm = LayerNorm(self.head_dim, eps=1e-6)
        self.rotary_emb = rotary_emb

    def queries(self, q_latent: torch.Tensor | Rows) -> torch.Tensor:
        """[T, q_lora_rank], in FP8 perhaps -> [T, heads, head_dim], without RoPE."""
        if isinstance(q_latent, tuple):
            projected = product(self.wq_b, q_latent)
        else:
            projected = self.wq_b(q_latent)[0]
        return projected.view(-1, self.n_heads, self.head_dim)


class GlmTorchIndexer(_Indexer):
    """Projects in the served dtype; the torch attention backend caches, scores and selects."""

    def __init__(
        self,
        config: Glm53Config,
        layer_id: int,
        rotary_emb: nn.Module,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(config, layer_id, rotary_emb, quant_config, prefix)
        self.wk = ReplicatedLinear(
            config.hidden_size,
            self.head_dim,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("wk", prefix),
        )
        # FP32, as transformers keeps it: the gates weigh whole heads against each other.
        self.weights_proj = ReplicatedLinear(
            config.hidden_size,
            self.n_heads,
            bias=False,
            params_dtype=torch.float32,
            prefix=add_prefix("weights_proj", prefix),
        )

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
        queries = self.queries(q_latent) if select else None
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


class GlmIndexer(_Indexer):
    """On Hopper: FP8 queries and keys, DeepGEMM's scores, SGLang's top-k to cache slots.

    ``wk`` and ``weights_proj`` read the same rows and are narrow: they are one bf16 matrix here,
    [head_dim + heads, hidden] (an FP8 ``wk`` is dequantised while it is loaded).
    """

    def __init__(
        self,
        config: Glm53Config,
        layer_id: int,
        rotary_emb: nn.Module,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        side_stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__(config, layer_id, rotary_emb, quant_config, prefix)
        self.side_stream = side_stream
        self.wk_weights_proj = ReplicatedLinear(
            config.hidden_size,
            self.head_dim + self.n_heads,
            bias=False,
            params_dtype=torch.bfloat16,
            prefix=add_prefix("wk_weights_proj", prefix),
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        *,
        select: bool = True,
    ) -> torch.Tensor | None:
        """As `GlmTorchIndexer.forward`; rows of padding (a graph's, an idle rank's) select -1."""
        rows = hidden_states.shape[0]
        if not index_select.has_requests(forward_batch):
            selected = index_select.nothing(rows, self.index_topk, hidden_states.device)
        else:
            selected = self.run(
                hidden_states,
                q_latent,
                positions,
                forward_batch,
                forward_batch.out_cache_loc,
                select=select,
                overlap=overlaps(self.side_stream, rows),
            )
        if not select or selected is None:
            return None
        return self.publish(index_select.pad_rows(selected, rows))

    def select_into(
        self,
        selection: torch.Tensor | None,
        hidden_states: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> None:
        """The prefill graph's form: ``selection`` [rows of the graph, index_topk] int32 is at the
        address that later segments read; rows past the batch's own tokens become -1."""
        tokens = forward_batch.extend_num_tokens
        selected = self.run(
            hidden_states[:tokens],
            q_latent[:tokens],
            positions[:tokens],
            forward_batch,
            forward_batch.out_cache_loc[:tokens],
            select=selection is not None,
            overlap=False,
        )
        if selection is not None and selected is not None:
            selection[: selected.shape[0]] = selected
            selection[selected.shape[0] :] = -1
            self.publish(selection)

    def publish(self, selection: torch.Tensor) -> torch.Tensor:
        """Make the ranks agree where that is asked for, and record where that is."""
        index_select.broadcast_from_first_rank(selection)
        return maybe_capture_indexer_topk(self.layer_id, selection)

    def run(
        self,
        hidden_states: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        slots: torch.Tensor,
        *,
        select: bool,
        overlap: bool,
    ) -> torch.Tensor | None:
        """Store the keys at ``slots`` and select; [rows of requests, index_topk] int32 or None."""
        metadata = get_attn_backend().get_indexer_metadata(self.layer_id, forward_batch)
        if metadata is None:
            return None
        if not select or index_select.sees_no_more_than(self.index_topk, forward_batch):
            keys, _ = self._keys_and_gates(hidden_states)
            self._store(keys, positions, slots)
            return index_select.everything(metadata, self.index_topk) if select else None
        if overlap:
            queries, gates = self._prepare_on_two_streams(hidden_states, q_latent, positions, slots)
        else:
            keys, gates = self._keys_and_gates(hidden_states)
            self._store(keys, positions, slots)
            queries, gates = self._quantise(self.queries(q_latent), gates, positions)
        choose = (
            index_select.ragged
            if forward_batch.forward_mode.is_extend_without_speculative()
            else index_select.paged
        )
        return choose(self.layer_id, queries, gates, metadata, self.index_topk)

    def _prepare_on_two_streams(
        self,
        hidden_states: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two projections side by side, then query and key side by side."""
        side = self.side_stream
        with forked(side):
            queries = self.queries(q_latent)
        keys, gates = self._keys_and_gates(hidden_states)
        join(side)
        with forked(side):
            self._store(keys, positions, slots)
        queries, gates = self._quantise(queries, gates, positions)
        # What the side stream does next may take the memory that the queries leave.
        side.wait_stream(torch.cuda.current_stream())
        join(side)  # the scores read the keys
        return queries, gates

    def _keys_and_gates(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, head_dim] keys without norm and RoPE, and [T, heads] gates without scale: views."""
        joined = self.wk_weights_proj(hidden_states)[0]
        return joined.split([self.head_dim, self.n_heads], dim=-1)

    def _quantise(
        self, queries: torch.Tensor, gates: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE and FP8: [T, heads, head_dim] float8_e4m3fn, and gates [T, heads] fp32 that carry
        the queries' scales (the score is linear in them where it is not zero)."""
        from sglang.kernels.ops.attention.dsa.indexer_q import fused_q_indexer_rope_first_quant

        quantised, scaled = fused_q_indexer_rope_first_quant(
            queries, gates, self.gate_scale, self.rotary_emb.cos_sin_cache, positions
        )
        return quantised, scaled.squeeze(-1)

    def _store(self, keys: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """LayerNorm, RoPE, FP8 with one scale a token, and the write to the paged cache."""
        from sglang.kernels.ops.attention.dsa.indexer_k import fused_k_indexer_norm_rope_store

        pool = get_token_to_kv_pool()

        def store(buffer: torch.Tensor, slots: torch.Tensor) -> None:
            fused_k_indexer_norm_rope_store(
                keys,
                buffer,
                slots,
                self.k_norm.weight,
                self.k_norm.bias,
                self.k_norm.variance_epsilon,
                self.rotary_emb.cos_sin_cache,
                positions,
                pool.index_page_size,
            )

        pool.store_with(store, self.layer_id, slots)
