"""Multi-head latent attention (MLA) over the positions that the indexer selected.

One token leaves one latent in the cache: ``c`` (kv_lora_rank values, normed) and ``k_rope`` (the
RoPE part that all heads share). With W_UK and W_UV, the halves of kv_b_proj, head h has
``k_h = [W_UK_h c, k_rope]`` and ``v_h = W_UV_h c``, so attention has two equal forms:

* absorbed: fold W_UK into the query (``q_h W_UK_h``), attend over latents as if there were a
  single KV head, unfold with W_UV. It reads one latent a selected position: decode, verify and
  any prefill that selects.
* expanded: make every head's keys and values once and run dense attention. Cheaper while no
  sequence is longer than index_topk, where every position is selected anyway: short prefill.

The backend that SGLang selected (its DSA backend on a GPU, backends/torch_dsa.py without one)
decides between the forms, and runs whatever kernel `--dsa-prefill-backend` and
`--dsa-decode-backend` ask for.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.layer_boundary import get_attn_tp_context
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    eager_on_graph,
    is_in_breakable_cuda_graph,
)
from sglang.srt.model_executor.runner_utils.forward_batch import get_forward_batch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_glm53.compat.torch_attention import serves_plain_torch
from sglang_glm53.config import Glm53Config
from sglang_glm53.kernels.fp8 import dequantise_blocks
from sglang_glm53.layers.decode_chain import Rows, attached, is_block_fp8, product
from sglang_glm53.layers.gemm import FEW_ROW_QUERY_SHAPES, project
from sglang_glm53.layers.indexer import GlmIndexer, GlmTorchIndexer
from sglang_glm53.layers.streams import forked, join, overlaps
from sglang_glm53.memory.pool import GlmTokenToKVPool


def make_rope(config: Glm53Config) -> nn.Module:
    """Plain interleaved RoPE over ``qk_rope_head_dim`` values, shared by MLA and the indexer."""
    return get_rope(
        config.qk_rope_head_dim,
        rotary_dim=config.qk_rope_head_dim,
        max_position=config.max_position_embeddings,
        base=config.rope_theta,
        is_neox_style=False,
        rope_scaling=None,
    )


def uses_expanded_form() -> bool:
    """Whether this forward runs dense attention over expanded keys (the backend decides)."""
    backend = get_attn_backend()
    return bool(getattr(getattr(backend, "primary", backend), "use_mha", False))


def runs_between_graph_segments(forward_batch: ForwardBatch) -> bool:
    """Whether this is a prefill that SGLang captures, or replays, as graph segments with breaks."""
    return is_in_breakable_cuda_graph() and (
        forward_batch.forward_mode.is_extend_without_speculative()
    )


class GlmAttention(nn.Module):
    """MLA of one layer: [T, hidden] -> [T, hidden], a partial sum over the attention-TP ranks.

    Heads are split over the attention-TP ranks; the latents and the indexer are replicated.
    """

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
        self.is_nextn = is_nextn
        self.side_stream = side_stream
        self.num_heads = config.num_attention_heads
        self.num_local_heads = self.num_heads // get_parallel().attn_tp_size
        self.q_lora_rank, self.kv_lora_rank = config.q_lora_rank, config.kv_lora_rank
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.qk_head_dim = config.qk_head_dim
        self.v_head_dim = config.v_head_dim
        self.quant_config = quant_config

        self.fused_qkv_a_proj_with_mqa = ReplicatedLinear(
            config.hidden_size,
            config.q_lora_rank + config.latent_dim,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("fused_qkv_a_proj_with_mqa", prefix),
        )
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps=config.rms_norm_eps)
        self.q_b_proj = ColumnParallelLinear(
            config.q_lora_rank,
            self.num_heads * self.qk_head_dim,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("q_b_proj", prefix),
            parallel_group="attn_tp",
        )
        self.kv_b_proj = ColumnParallelLinear(
            config.kv_lora_rank,
            self.num_heads * (self.qk_nope_head_dim + self.v_head_dim),
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("kv_b_proj", prefix),
            parallel_group="attn_tp",
        )
        self.o_proj = RowParallelLinear(
            self.num_heads * self.v_head_dim,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            reduce_results=False,
            prefix=add_prefix("o_proj", prefix),
            parallel_group="attn_tp",
        )
        self.rotary_emb = make_rope(config)

        # A full layer selects; a shared layer has no indexer. The MTP layer has one, and reuses a
        # selection only where the draft iteration hands it one.
        self.skip_topk = not is_nextn and not config.runs_indexer(layer_id)
        following = layer_id + 1
        self.next_skip_topk = is_nextn or (
            following < config.num_hidden_layers and not config.runs_indexer(following)
        )
        self.indexer: GlmIndexer | GlmTorchIndexer | None = None
        if not self.skip_topk:
            self.indexer = _make_indexer(
                config,
                layer_id,
                self.rotary_emb,
                quant_config,
                add_prefix("indexer", prefix),
                side_stream,
            )

        scaling = self.qk_head_dim**-0.5
        self.attn_mqa = RadixAttention(
            self.num_local_heads,
            config.latent_dim,
            scaling,
            num_kv_heads=1,
            layer_id=layer_id,
            v_head_dim=self.kv_lora_rank,
            quant_config=quant_config,
            prefix=add_prefix("attn_mqa", prefix),
        )
        self.attn_mha = RadixAttention(
            self.num_local_heads,
            self.qk_head_dim,
            scaling,
            num_kv_heads=self.num_local_heads,
            layer_id=layer_id,
            v_head_dim=self.v_head_dim,
            quant_config=quant_config,
            prefix=add_prefix("attn_mha", prefix),
        )
        # Read by SGLang's own chunked-prefix code through the attention layer.
        self.attn_mha.kv_b_proj = None

        # W_UK [heads, qk_nope, kv_lora] and W_UV [heads, kv_lora, v_head], split from kv_b_proj
        # after loading. Reloads write into the same storage: CUDA graphs hold its address.
        self.w_kc: torch.Tensor | None = None
        self.w_vc: torch.Tensor | None = None

    def project_latents(
        self, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """[T, hidden] -> [T, q_lora + kv_lora + rope]; called by the stage boundary."""
        rows = attached(hidden_states)
        if rows is not None and is_block_fp8(self.fused_qkv_a_proj_with_mqa):
            return product(self.fused_qkv_a_proj_with_mqa, rows)
        return project(self.fused_qkv_a_proj_with_mqa, hidden_states)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: ForwardBatch,
        prev_topk_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend, and hand the selection down to a shared layer.

        Args:
            positions: [T] int64, position of each token in its request.
            hidden_states: [T, hidden], normed.
            forward_batch: the batch; its backend and pool hold the cache.
            prev_topk_indices: [T, index_topk] int32, the selection of the full layer above.

        Returns:
            [T, hidden] partial sum, and the selection if the next layer reuses it.
        """
        rows = hidden_states.shape[0]
        if rows == 0 and not get_attn_tp_context().input_scattered:
            return hidden_states, None

        joined = get_attn_tp_context().fetch_qkv_latent()
        if self._fuses(hidden_states, joined, forward_batch):
            return self._forward_fused(
                positions, hidden_states, joined, forward_batch, prev_topk_indices
            )
        q_latent, kv_latent, k_rope = joined.split(
            [self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        k_rope = k_rope.unsqueeze(1)
        side = self.side_stream if overlaps(self.side_stream, rows) else None
        if side is None:
            kv_latent = self.kv_a_layernorm(kv_latent)
        else:
            with forked(side):
                kv_latent = self.kv_a_layernorm(kv_latent)
        q_latent = self.q_a_layernorm(q_latent)

        if uses_expanded_form():
            topk_indices = self._index_for_dense(hidden_states, q_latent, positions, forward_batch)
            attended = self._attend_expanded(q_latent, kv_latent, k_rope, positions, forward_batch)
        else:
            index = self._reused(prev_topk_indices)
            attend = (
                self._attend_in_prefill_graph
                if runs_between_graph_segments(forward_batch)
                else self._attend_absorbed
            )
            attended, topk_indices = attend(
                hidden_states, q_latent, kv_latent, k_rope, positions, forward_batch, index, side
            )
        output, _ = self.o_proj(attended)
        return output, topk_indices if self.next_skip_topk else None

    def _fuses(
        self, hidden_states: torch.Tensor, joined: torch.Tensor, forward_batch: ForwardBatch
    ) -> bool:
        """Whether this is a step of few rows whose weights and cache are FP8 (decode_chain.py)."""
        if attached(hidden_states) is None:
            return False
        pool = get_token_to_kv_pool()
        return (
            isinstance(pool, GlmTokenToKVPool)
            and joined.shape[0] == hidden_states.shape[0]
            and not uses_expanded_form()
            and not runs_between_graph_segments(forward_batch)
            and forward_batch.out_cache_loc.shape[0] == joined.shape[0]
            and getattr(get_attn_backend(), "dsa_decode_impl", None) == "flashmla_kv"
            and not forward_batch.forward_mode.is_extend_without_speculative()
            and pool.dsa_kv_cache_store_fp8
            and all(map(is_block_fp8, (self.q_b_proj, self.kv_b_proj, self.o_proj)))
        )

    def _forward_fused(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        joined: torch.Tensor,
        forward_batch: ForwardBatch,
        prev_topk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`forward` for few rows, absorbed, in FP8: six launches around the attention kernel.

        joined: [T, q_lora + kv_lora + rope] bf16, before the norms.
        """
        from sglang_glm53.kernels.absorb import unfold_values
        from sglang_glm53.kernels.latents import latents

        q_latent = latents(
            joined,
            self.q_a_layernorm.weight,
            self.kv_a_layernorm.weight,
            self.q_a_layernorm.variance_epsilon,
            self.rotary_emb.cos_sin_cache,
            positions,
            get_token_to_kv_pool().latent_pages(self.layer_id),
            forward_batch.out_cache_loc,
        )
        topk_indices = self._reused(prev_topk_indices)
        side = self.side_stream if overlaps(self.side_stream, joined.shape[0]) else None
        if topk_indices is None and side is not None:
            with forked(side):
                folded = self._fold_fused(q_latent, positions)
            topk_indices = self.indexer(hidden_states, q_latent, positions, forward_batch)
            join(side)
        else:
            if topk_indices is None:
                topk_indices = self.indexer(hidden_states, q_latent, positions, forward_batch)
            folded = self._fold_fused(q_latent, positions)
        attended = self.attn_mqa(
            folded, None, None, forward_batch, save_kv_cache=False, topk_indices=topk_indices
        )
        values = unfold_values(
            attended.view(-1, self.num_local_heads, self.kv_lora_rank),
            self.kv_b_proj.weight,
            self.kv_b_proj.weight_scale_inv,
            v_head_dim=self.v_head_dim,
        )
        output = product(self.o_proj, values)
        return output, topk_indices if self.next_skip_topk else None

    def _fold_fused(self, q_latent: Rows, positions: torch.Tensor) -> torch.Tensor:
        """[T, q_lora] in FP8 -> [T, heads, kv_lora + rope], as the attention kernel reads it."""
        from sglang_glm53.kernels.absorb import fold_queries

        return fold_queries(
            product(self.q_b_proj, q_latent),
            self.kv_b_proj.weight,
            self.kv_b_proj.weight_scale_inv,
            self.rotary_emb.cos_sin_cache,
            positions,
            heads=self.num_local_heads,
            v_head_dim=self.v_head_dim,
        )

    def _reused(self, prev_topk_indices: torch.Tensor | None) -> torch.Tensor | None:
        """The selection handed down, where this layer takes it; None where it selects itself."""
        if prev_topk_indices is not None and (self.skip_topk or self.is_nextn):
            return maybe_capture_indexer_topk(self.layer_id, prev_topk_indices)
        if self.indexer is None:
            raise RuntimeError(
                f"layer {self.layer_id} shares its indexer but got no selection from above"
            )
        return None

    def _queries(
        self, q_latent: torch.Tensor, k_rope: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, heads, qk_head_dim] queries, their two parts, and k_rope [T, 1, rope]; RoPE applied
        to the parts (and to the whole only where the kernel works in place)."""
        q = project(self.q_b_proj, q_latent, FEW_ROW_QUERY_SHAPES)
        q = q.view(-1, self.num_local_heads, self.qk_head_dim)
        q_nope, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_rope, k_rope = self.rotary_emb(positions, q_rope, k_rope)
        return q, q_nope, q_rope, k_rope

    def _index_for_dense(
        self,
        hidden_states: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor | None:
        """Cache this chunk's index keys for later queries; dense attention selects nothing itself.

        The MTP layer is the exception: its last row's selection seeds the draft steps.
        """
        if self.indexer is None:
            return None
        spec_info = forward_batch.spec_info
        seeds_draft = getattr(spec_info, "dsa_seed_topk_capture", None) is not None
        return self.indexer(
            hidden_states, q_latent, positions, forward_batch, select=self.is_nextn and seeds_draft
        )

    def _attend_absorbed(
        self,
        hidden_states: torch.Tensor,
        q_latent: torch.Tensor,
        kv_latent: torch.Tensor,
        k_rope: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        topk_indices: torch.Tensor | None,
        side: torch.cuda.Stream | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Select unless given, attend; [T, heads * v_head_dim] and the selection; writes the cache.

        While a decode or verify step is captured, the query path runs beside the indexer's scores
        and selection on `side`, and the norm of the KV latent beside the query path.
        """
        if topk_indices is None and side is not None:
            side.wait_stream(torch.cuda.current_stream())  # the query latent
            topk_indices = self.indexer(hidden_states, q_latent, positions, forward_batch)
            with torch.cuda.stream(side):
                _, q_nope, q_rope, k_rope = self._queries(q_latent, k_rope, positions)
                q_latents = self._fold_queries(q_nope)
        else:
            _, q_nope, q_rope, k_rope = self._queries(q_latent, k_rope, positions)
            if topk_indices is None:
                topk_indices = self.indexer(hidden_states, q_latent, positions, forward_batch)
            q_latents = self._fold_queries(q_nope)
        if side is not None:
            join(side)
        latent = kv_latent.unsqueeze(1)
        attended = self.attn_mqa(
            q_latents,
            latent,
            latent,
            forward_batch,
            q_rope=q_rope,
            k_rope=k_rope,
            topk_indices=topk_indices,
        )
        return self._unfold_values(attended), topk_indices

    def _attend_in_prefill_graph(
        self,
        hidden_states: torch.Tensor,
        q_latent: torch.Tensor,
        kv_latent: torch.Tensor,
        k_rope: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        topk_indices: torch.Tensor | None,
        side: None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_attend_absorbed` for a prefill graph: one break a layer, for all that depends on the
        requests' lengths. What it writes lies at the addresses that the next segment reads. There
        is no `side`: a segment must not end with a stream that has not joined."""
        _, q_nope, q_rope, k_rope = self._queries(q_latent, k_rope, positions)
        rows = q_nope.shape[0]
        selects = topk_indices is None
        if selects:
            topk_indices = torch.empty(
                (rows, self.indexer.index_topk), dtype=torch.int32, device=q_nope.device
            )
        attended = q_nope.new_empty((rows, self.num_local_heads * self.kv_lora_rank))
        self._select_and_attend(
            selects,
            hidden_states,
            q_latent,
            positions,
            q_nope,
            q_rope,
            kv_latent.unsqueeze(1),
            k_rope,
            q_nope.new_empty((self.num_local_heads, rows, self.kv_lora_rank)),
            topk_indices,
            attended,
        )
        return self._unfold_values(attended), topk_indices

    @eager_on_graph
    def _select_and_attend(
        self,
        selects: bool,
        hidden_states: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        q_latents: torch.Tensor,
        topk_indices: torch.Tensor,
        attended: torch.Tensor,
    ) -> None:
        """Runs between two segments, at capture and at every replay, on the batch of the moment."""
        if selects:
            self.indexer.select_into(
                topk_indices, hidden_states, q_latent, positions, get_forward_batch()
            )
        # The product is small; in a segment of its own it would cost a graph launch.
        torch.bmm(q_nope.transpose(0, 1), self.w_kc, out=q_latents)
        self.attn_mqa._eager_attention.run_eager(
            q_latents.transpose(0, 1),
            latent,
            latent,
            attended,
            q_rope=q_rope,
            k_rope=k_rope,
            topk_indices=topk_indices,
        )

    def _attend_expanded(
        self,
        q_latent: torch.Tensor,
        kv_latent: torch.Tensor,
        k_rope: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Dense attention over the whole of each request, prefix included; writes the cache."""
        q, _, q_rope, k_rope = self._queries(q_latent, k_rope, positions)
        q[..., self.qk_nope_head_dim :] = q_rope
        pool = get_token_to_kv_pool()
        pool.set_mla_kv_buffer(
            self.attn_mha, write_location(forward_batch), kv_latent.unsqueeze(1), k_rope
        )
        if any(forward_batch.extend_prefix_lens_cpu):
            kv_latent, k_rope = pool.read_latents(
                self.attn_mha, dense_kv_slots(forward_batch), q.dtype
            )
            kv_latent = kv_latent.squeeze(1)
        kv = self.kv_b_proj(kv_latent)[0].view(
            -1, self.num_local_heads, self.qk_nope_head_dim + self.v_head_dim
        )
        k_nope, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(-1, self.num_local_heads, -1)], dim=-1)
        forward_batch.mha_return_lse = False
        attended = self.attn_mha(
            q, k, v, forward_batch, save_kv_cache=False, key_value_num_tokens=k.shape[0]
        )
        return attended.reshape(-1, self.num_local_heads * self.v_head_dim)

    def _fold_queries(self, q_nope: torch.Tensor) -> torch.Tensor:
        """[T, heads, nope] -> q W_UK, [T, heads, kv_lora] (a view of [heads, T, kv_lora])."""
        return torch.bmm(q_nope.transpose(0, 1), self.w_kc).transpose(0, 1)

    def _unfold_values(self, attended: torch.Tensor) -> torch.Tensor:
        """[T, heads * kv_lora] -> [T, heads * v_head_dim], written in the layout o_proj reads."""
        attended = attended.view(-1, self.num_local_heads, self.kv_lora_rank)
        values = attended.new_empty((attended.shape[0], self.num_local_heads, self.v_head_dim))
        torch.bmm(attended.transpose(0, 1), self.w_vc, out=values.transpose(0, 1))
        return values.flatten(1)

    def split_kv_b(self) -> None:
        """Derive W_UK and W_UV from kv_b_proj's weight: [heads * (nope + v), kv_lora].

        Runs before the quantisation method may rearrange a loaded weight. FP8 blocks become bf16,
        and both matrices keep kv_lora innermost in memory, as the weight has it.
        """
        weight = self.kv_b_proj.weight.data
        if weight.dtype == torch.float8_e4m3fn:
            scale = self.kv_b_proj.weight_scale_inv.data
            weight = dequantise_blocks(weight, scale, self.kv_a_layernorm.weight.dtype)
        per_head = weight.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        w_kc, w_vc = per_head.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        self.w_kc = _store(self.w_kc, w_kc.transpose(1, 2).contiguous().transpose(1, 2))
        self.w_vc = _store(self.w_vc, w_vc.contiguous().transpose(1, 2))


def _make_indexer(
    config: Glm53Config,
    layer_id: int,
    rotary_emb: nn.Module,
    quant_config: QuantizationConfig | None,
    prefix: str,
    side_stream: torch.cuda.Stream | None,
) -> GlmIndexer | GlmTorchIndexer:
    if serves_plain_torch():
        return GlmTorchIndexer(config, layer_id, rotary_emb, quant_config, prefix)
    return GlmIndexer(config, layer_id, rotary_emb, quant_config, prefix, side_stream)


def write_location(forward_batch: ForwardBatch) -> Any:
    """Where this forward's tokens go in the cache, as the pool's writers take it."""
    return KVWriteLoc.for_batch(forward_batch)


def dense_kv_slots(forward_batch: ForwardBatch) -> torch.Tensor:
    """[sum of kv lengths] int64 cache slots of every token of every request, in order."""
    backend = get_attn_backend()
    if hasattr(backend, "mha_kv_slots"):
        return backend.mha_kv_slots(forward_batch)
    return forward_batch.fetch_mha_one_shot_kv_indices()


def _store(target: torch.Tensor | None, source: torch.Tensor) -> torch.Tensor:
    """First load: take ``source``; a reload writes where CUDA graphs read."""
    if target is None:
        return source
    target.copy_(source)
    return target
