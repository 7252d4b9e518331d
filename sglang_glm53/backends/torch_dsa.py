"""DeepSeek sparse attention (DSA) in plain torch: the reference backend, for any device.

Two operations a layer, both over SGLang's paged cache:

* `select_topk` (full indexer layers): for each row the `index_topk` cached tokens with the largest
  index score, exact, ties to the smaller position.
* `forward_extend` / `forward_decode`: attention over the selected latents in absorbed form, or,
  while every request is at most `index_topk` tokens long, dense causal attention in expanded form.

A row is one query token of the forward pass. Positions are logical, that is, counted inside the
request; a slot is a token's place in the cache, `req_to_token[request, position]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_glm53.errors import Glm53Error

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_glm53.memory.pool import GlmTokenToKVPool

# fp32 values that the largest temporary of one chunk holds, where one row does not need more:
# products of queries and index keys (16 MiB), and gathered latents (4 MiB, which stay in the cache
# of a CPU core while they are read three times).
SCORE_VALUES = 4 << 20
LATENT_VALUES = 1 << 20


@dataclass
class Segment:
    """The rows of one request, and the part of its cache that the last of them sees."""

    request: int
    start: int
    end: int
    kv_len: int
    pages: torch.Tensor | slice | None = None


@dataclass
class Rows:
    """What each row of one forward pass reads. Rows from `count` on are padding.

    `request` ([count], int64) is the row's line in req_to_token, `kv_len` ([count], int64) how
    many tokens of the request it sees, itself included. Within a segment kv_len ascends by one.
    """

    batch: ForwardBatch
    mode: Any
    count: int
    request: torch.Tensor
    kv_len: torch.Tensor
    segments: list[Segment]
    slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = field(default=None)


class TorchDsaBackend(AttentionBackend):
    """Attention backend for GlmMoeDsa models over a `GlmTokenToKVPool`.

    Attributes:
        use_mha: this forward pass is a plain extend, and no request is longer than `index_topk`,
            so that attention is dense and the model may use the expanded form.
        index_topk: how many tokens a row attends to.
    """

    def __init__(self, model_runner: ModelRunner, **_: Any) -> None:
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool: GlmTokenToKVPool = model_runner.token_to_kv_pool
        self.index_topk: int = model_runner.model_config.hf_config.index_topk
        self.use_mha = False
        self.forward_metadata: Rows | None = None

    # What SGLang asks of a backend

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Work out what each row of the coming forward pass sees."""
        rows = self.forward_metadata = self._plan(forward_batch)
        mode = forward_batch.forward_mode
        plain = mode.is_extend_or_draft_extend_or_mixed() and forward_batch.spec_info is None
        self.use_mha = (
            plain
            and 0 < rows.count == forward_batch.positions.shape[0]
            and max(segment.kv_len for segment in rows.segments) <= self.index_topk
        )

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Sequence length of a padded request."""
        return 1

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Sequence length of a padded request."""
        return 1

    def support_triton(self) -> bool:
        """Whether SGLang may prepare batches for this backend with Triton kernels."""
        return False

    # The indexer

    def store_index_k(self, layer_id: int, key: torch.Tensor, forward_batch: ForwardBatch) -> None:
        """Write the rows' index keys ([T, 128], RoPE applied) to their slots."""
        loc = forward_batch.out_cache_loc[: key.shape[0]]
        self.token_to_kv_pool.set_index_k(layer_id, loc, key[: loc.shape[0]])

    def select_topk(
        self,
        layer_id: int,
        q: torch.Tensor,
        gates: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """The `index_topk` best cached tokens of each row.

        score(row, s) = sum over heads h of gates[h] * relu(q_h . k_s), in fp32, for every position
        s that the row sees.

        Args:
            layer_id: a full indexer layer, whose keys of this pass are stored already.
            q: [T, heads, 128], RoPE applied.
            gates: [T, heads] fp32, all scales folded in.

        Returns:
            int32 [T, index_topk]: positions, ascending, then -1. Padded rows are all -1.
        """
        rows, k = self._rows(forward_batch), self.index_topk
        chosen = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
        count = min(rows.count, q.shape[0])
        if count == 0:
            return chosen
        # Rows that see at most k tokens take them all.
        every = torch.arange(k, dtype=torch.int32, device=q.device)
        chosen[:count] = every.where(every < rows.kv_len[:count].unsqueeze(1), chosen[:count])
        for segment in rows.segments:
            if segment.kv_len <= k or segment.start >= count:
                continue
            end = min(segment.end, count)
            # kv_len ascends by one inside the segment and ends at segment.kv_len.
            start = max(segment.start, segment.end - (segment.kv_len - k))
            keys, scales = self.token_to_kv_pool.get_index_pages(layer_id, self._pages(segment))
            step = max(1, SCORE_VALUES // (gates.shape[1] * segment.kv_len))
            for first in range(start, end, step):
                last = min(first + step, end)
                seen = segment.kv_len - (segment.end - last)
                score = index_scores(q[first:last], gates[first:last], keys[:seen])
                if scales is not None:
                    score *= scales[:seen]
                if last - first > 1:
                    hidden = torch.arange(seen, device=q.device) >= rows.kv_len[
                        first:last
                    ].unsqueeze(1)
                    score.masked_fill_(hidden, float("-inf"))
                chosen[first:last] = top_positions(score, k)
        return chosen

    # Attention

    def mha_kv_slots(self, forward_batch: ForwardBatch) -> torch.Tensor:
        """Slots of all tokens of all requests (prefix, then new), int64 [sum of kv lengths]."""
        rows = self._rows(forward_batch)
        table = self.req_to_token_pool.req_to_token
        parts = [table[segment.request, : segment.kv_len] for segment in rows.segments]
        if not parts:
            return torch.empty(0, dtype=torch.int64, device=table.device)
        return torch.cat(parts).long()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer; see `forward_extend`. An idle batch gives zeros."""
        if forward_batch.forward_mode.is_idle():
            return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer, in the form that the arguments have.

        Absorbed (`topk_indices` given): q [T, H, kv_lora_rank] and q_rope [T, H, rope] against
        the selected latents. k [T, 1, kv_lora_rank] (the normed latent) and k_rope [T, 1, rope]
        are written to the cache first if `save_kv_cache`. Returns [T, H * kv_lora_rank]:
        softmax(scaling * (q . c + q_rope . k_rope)) c.

        Expanded (no `topk_indices`): q [T, H, d], k [sum of kv lengths, H, d] and
        v [sum of kv lengths, H, dv], keys and values in the order of `mha_kv_slots`; causal inside
        each request. Nothing is written: the model has written the latents that k and v come from.
        Returns [T, H * dv].

        Softmax is in fp32; padded rows give zeros.
        """
        if topk_indices is None:
            return self._expanded(q, k, v, layer, forward_batch)
        if save_kv_cache and k is not None:
            loc = forward_batch.out_cache_loc[: k.shape[0]]
            self.token_to_kv_pool.set_mla_kv_buffer(layer, loc, k, k_rope)
        return self._absorbed(q, q_rope, topk_indices, layer, forward_batch)

    forward_decode = forward_extend

    def _absorbed(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        topk_indices: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        rows = self._rows(forward_batch)
        heads, rank = layer.tp_q_head_num, layer.v_head_dim
        q = q.reshape(-1, heads, rank)
        q_rope = q_rope.reshape(q.shape[0], heads, -1)
        out = q.new_zeros(q.shape[0], heads, rank)
        count = min(rows.count, q.shape[0])
        if count == 0:
            return out.flatten(1)
        slots, missing = self._slots(topk_indices, rows, count)
        pool, width = self.token_to_kv_pool, rank + q_rope.shape[2]
        step = max(1, LATENT_VALUES // (slots.shape[1] * width))
        for first in range(0, count, step):
            chunk = slice(first, min(first + step, count))
            latent = pool.latent_rows(layer.layer_id, slots[chunk].reshape(-1))
            latent = latent.view(-1, slots.shape[1], width)
            query = torch.cat([q[chunk], q_rope[chunk]], dim=-1).float()
            logits = torch.bmm(query, latent.transpose(1, 2)).mul_(layer.scaling)
            if missing is not None:
                logits.masked_fill_(missing[chunk].unsqueeze(1), float("-inf"))
            weights = logits.softmax(dim=-1)
            if missing is not None:
                # A row that selects nothing attends to nothing; a NaN of another origin stays one.
                nothing = missing[chunk].all(dim=1)
                weights.masked_fill_(nothing.view(-1, 1, 1), 0.0)
            out[chunk] = torch.bmm(weights, latent[:, :, :rank]).to(out.dtype)
        return out.flatten(1)

    def _expanded(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        rows = self._rows(forward_batch)
        heads = layer.tp_q_head_num
        q = q.reshape(-1, heads, layer.qk_head_dim)
        k = k.reshape(-1, heads, layer.qk_head_dim)
        v = v.reshape(-1, heads, layer.v_head_dim)
        out = q.new_zeros(q.shape[0], heads, layer.v_head_dim)
        first_kv = 0
        for segment in rows.segments:
            kv = slice(first_kv, first_kv + segment.kv_len)
            first_kv = kv.stop
            keys = k[kv].permute(1, 2, 0).float()
            values = v[kv].transpose(0, 1).float()
            end = min(segment.end, q.shape[0])
            step = max(1, SCORE_VALUES // (heads * segment.kv_len))
            for first in range(segment.start, end, step):
                chunk = slice(first, min(first + step, end))
                logits = torch.bmm(q[chunk].transpose(0, 1).float(), keys).mul_(layer.scaling)
                position = torch.arange(segment.kv_len, device=q.device)
                hidden = position >= rows.kv_len[chunk].unsqueeze(1)
                weights = logits.masked_fill_(hidden, float("-inf")).softmax(dim=-1)
                out[chunk] = torch.bmm(weights, values).transpose(0, 1).to(out.dtype)
        return out.flatten(1)

    # Rows, pages and slots

    def _rows(self, forward_batch: ForwardBatch) -> Rows:
        # SGLang may hand the layers another batch object than the one it planned with (padded for
        # data-parallel attention, or moved on by one draft step): the batch at hand decides.
        rows = self.forward_metadata
        if (
            rows is None
            or rows.batch is not forward_batch
            or (rows.mode is not forward_batch.forward_mode)
        ):
            rows = self.forward_metadata = self._plan(forward_batch)
        return rows

    def _plan(self, forward_batch: ForwardBatch) -> Rows:
        mode, positions = forward_batch.forward_mode, forward_batch.positions
        if mode.is_idle() or positions is None:
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            return Rows(forward_batch, mode, 0, nothing, nothing, [])
        count = positions.shape[0]
        # Set where rows were padded, for a parallel group's collectives.
        if forward_batch._original_num_tokens is not None:
            count = min(count, forward_batch._original_num_tokens)
        requests = forward_batch.req_pool_indices.tolist()
        if mode.is_decode():
            lengths = [1] * len(requests)
        elif mode.is_target_verify():
            lengths = [forward_batch.spec_info.draft_token_num] * len(requests)
        else:
            lengths = forward_batch.extend_seq_lens_cpu
            if lengths is None:
                lengths = forward_batch.extend_seq_lens.tolist()
        # In every mode a row sees its own position and all before it; sequence lengths count the
        # new tokens in some modes (extend, draft extend) and not in others (verify, draft decode).
        kv_len = positions[:count].long() + 1
        segments: list[Segment] = []
        start = 0
        for request, length in zip(requests, lengths, strict=False):
            end = min(start + length, count)
            if end > start:
                segments.append(Segment(request, start, end, 0))
            start = end
        last = kv_len[[segment.end - 1 for segment in segments]].tolist() if segments else []
        for segment, seen in zip(segments, last, strict=True):
            segment.kv_len = seen
        request_of_row = torch.repeat_interleave(
            torch.tensor([s.request for s in segments], dtype=torch.int64),
            torch.tensor([s.end - s.start for s in segments], dtype=torch.int64),
        ).to(kv_len.device)
        return Rows(forward_batch, mode, start, request_of_row, kv_len[:start], segments)

    def _pages(self, segment: Segment) -> torch.Tensor | slice:
        """The request's cache pages, in order; a slice where they lie next to each other."""
        if segment.pages is None:
            size = self.token_to_kv_pool.page_size
            table = self.req_to_token_pool.req_to_token
            pages = table[segment.request, : segment.kv_len : size].long() // size
            first, last = int(pages[0]), int(pages[-1])
            adjacent = last - first + 1 == pages.numel() and bool((pages.diff() == 1).all())
            segment.pages = slice(first, last + 1) if adjacent else pages
        return segment.pages

    def _slots(
        self, topk_indices: torch.Tensor, rows: Rows, count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots of the selected positions [count, width], and where there is none (or None).

        Layers that share a selection hand over the same tensor: the last result is kept.
        """
        if rows.slots is not None and rows.slots[0] is topk_indices:
            return rows.slots[1], rows.slots[2]
        if topk_indices.shape[0] < count:
            raise Glm53Error(
                f"attention has {count} rows but a selection of {topk_indices.shape[0]}: the model "
                "passed another batch's selection"
            )
        # No row selects more tokens than it sees, and -1 stands at the end.
        width = min(topk_indices.shape[1], int(rows.kv_len[:count].max()))
        positions = topk_indices[:count, :width]
        missing = positions < 0
        table = self.req_to_token_pool.req_to_token
        slots = table[rows.request[:count].unsqueeze(1), positions.clamp_min(0).long()]
        rows.slots = (topk_indices, slots, missing if bool(missing.any()) else None)
        return rows.slots[1], rows.slots[2]


class TorchDsaMultiStepBackend:
    """Backends for the draft model's decode steps of EAGLE: one a step, chain drafts only.

    SGLang moves the batch's positions on between the steps, so each step's backend plans when its
    layer runs, from the positions of that moment.
    """

    needs_cpu_seq_lens = True

    def __init__(
        self, model_runner: ModelRunner, topk: int, speculative_num_steps: int, **_: Any
    ) -> None:
        if topk != 1:
            raise Glm53Error(
                f"--speculative-eagle-topk {topk}: the torch attention backend runs chain drafts "
                "only; use 1"
            )
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.attn_backends = [
            TorchDsaBackend(model_runner) for _ in range(speculative_num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Forget the last iteration's rows."""
        for backend in self.attn_backends:
            backend.forward_metadata = None
            backend.use_mha = False


def index_scores(q: torch.Tensor, gates: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Index scores: sum over heads h of gates[h] * relu(q_h . k_s).

    Args:
        q: [rows, heads, 128].
        gates: [rows, heads].
        keys: fp32 [tokens, 128].

    Returns:
        fp32 [rows, tokens].
    """
    rows, heads, dim = q.shape
    products = torch.mm(q.reshape(-1, dim).float(), keys.t()).view(rows, heads, -1).relu_()
    return torch.bmm(gates.float().unsqueeze(1), products).squeeze(1)


def top_positions(score: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k largest scores of each row, ascending; equal scores: smaller position.

    Args:
        score: fp32 [rows, tokens], at least k of them above -inf in each row.

    Returns:
        int64 [rows, k].
    """
    width = min(k + 1, score.shape[1])
    value, position = score.topk(width, dim=-1)
    chosen = position[:, :k]
    if width > k:
        # topk breaks ties as it likes; that matters only between the k-th and the next value.
        tied = (value[:, k - 1] == value[:, k]).nonzero().squeeze(1)
        if tied.numel():
            score, bound = score[tied], value[tied, k - 1].unsqueeze(1)
            above, equal = score > bound, score == bound
            room = k - above.sum(dim=1, keepdim=True)
            take = above | (equal & (equal.cumsum(dim=1) <= room))
            chosen[tied] = take.nonzero()[:, 1].view(-1, k)
    return chosen.sort(dim=-1).values
