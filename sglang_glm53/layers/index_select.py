"""Scores and selection of the indexer on SGLang's kernels, for the rows that a batch really has.

What a row sees, its page table and the address form of the result (cache slots, or offsets into
the batch's concatenated keys) come from the attention backend's indexer metadata, whose
``topk_transform`` also selects. Here the scores are made:

* `paged`: decode, verify and draft rows read the keys from the cache, page by page;
* `ragged`: prefill gathers each request's keys once, and scores in as many blocks of rows as the
  memory budget asks for: [rows, keys] fp32 of a 1M-token prompt would be 34 GB for one chunk.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.environ import envs
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.attention.dsa.utils import (
    resolve_fp8_mqa_logits_fn,
    resolve_fp8_paged_mqa_logits_fn,
    resolve_num_sms,
    resolve_paged_mqa_logits_metadata_fn,
)
from sglang.srt.layers.attention.mqa_logits_utils import (
    mqa_logits_budget_bytes,
    mqa_logits_row_bytes,
    mqa_logits_rows_per_chunk,
    mqa_logits_static_budget_bytes,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
from sglang.srt.model_executor.runner import get_is_capture_mode
from sglang.srt.runtime_context import get_parallel

KEY_BYTES = 132  # 128 FP8 values and one fp32 scale
PAGE = 64  # what DeepGEMM's paged kernel reads
SMALL = 8_000_000  # scores below this many (32 MB) need no look at the free memory


def has_requests(forward_batch: ForwardBatch) -> bool:
    """Whether any row belongs to a request. A rank without work still holds padded rows under
    attention data parallelism; it has no page table to read."""
    idle = forward_batch.forward_mode.is_idle() and not get_is_capture_mode()
    return not idle and forward_batch.seq_lens.numel() > 0


def sees_no_more_than(index_topk: int, forward_batch: ForwardBatch) -> bool:
    """Whether every row of a prefill selects all that it sees, so that no score is needed.

    Only a prefill knows its lengths on the host; a captured decode step must serve any length.
    """
    if not forward_batch.forward_mode.is_extend_without_speculative():
        return False
    lengths = forward_batch.seq_lens_cpu
    return lengths is not None and lengths.numel() > 0 and int(lengths.max()) <= index_topk


def nothing(rows: int, index_topk: int, device: torch.device) -> torch.Tensor:
    """[rows, index_topk] int32 of -1: the selection of rows that belong to no request."""
    return torch.full((rows, index_topk), -1, dtype=torch.int32, device=device)


def pad_rows(selection: torch.Tensor, rows: int) -> torch.Tensor:
    """``selection`` with rows of -1 appended up to ``rows``."""
    missing = rows - selection.shape[0]
    if missing <= 0:
        return selection
    padding = nothing(missing, selection.shape[1], selection.device)
    return torch.cat([selection, padding.to(selection.dtype)])


def broadcast_from_first_rank(selection: torch.Tensor) -> None:
    """With SGLANG_DSA_TOPK_BROADCAST: every attention-TP rank takes the first one's selection."""
    if not envs.SGLANG_DSA_TOPK_BROADCAST.get():
        return
    group = get_parallel().attn_tp_group
    if group.world_size == 1:
        return
    if torch.cuda.is_current_stream_capturing() and group.pynccl_comm is not None:
        with group.pynccl_comm.change_state(enable=True):
            group.pynccl_comm.broadcast(selection, src=0)
    else:
        group.broadcast(selection, src=0)


def everything(metadata: Any, index_topk: int) -> torch.Tensor:
    """The selection of rows that see at most ``index_topk`` tokens: all of them."""
    lengths = metadata.get_seqlens_expanded()
    # Rows this short are selected whole, whatever their scores: the width is all that is read.
    scores = torch.zeros((lengths.shape[0], index_topk), dtype=torch.float32, device=lengths.device)
    return metadata.topk_transform(scores, index_topk)


def paged(
    layer_id: int, queries: torch.Tensor, gates: torch.Tensor, metadata: Any, index_topk: int
) -> torch.Tensor:
    """Select for decode, verify and draft rows.

    Args:
        queries: [T, heads, 128] float8_e4m3fn; rows past the batch's own are padding.
        gates: [T, heads] fp32, with the queries' scales.
        metadata: the backend's indexer metadata of this pass.

    Returns:
        [rows of the batch, index_topk] int32 cache slots, -1 padded.
    """
    rows = sum(metadata.get_dsa_extend_len_cpu())
    table = metadata.get_page_table_64()
    width = table.shape[1] * PAGE
    # One length a row: SM90's kernel takes a request's rows one by one.
    lengths = metadata.paged_mqa_ctx_lens_2d
    if lengths is None:
        lengths = metadata.get_seqlens_expanded()
    lengths = lengths.reshape(-1, 1)
    keys = _paged_keys(layer_id)
    queries, gates = queries[:rows].unsqueeze(1), gates[:rows]

    at_once = resolve_num_sms()
    if rows <= at_once:
        schedule = metadata.paged_mqa_schedule_metadata
        scores = _paged_scores(queries, keys, gates, lengths, table, schedule, width)
    else:
        scores = torch.cat(
            [
                _paged_scores(
                    queries[part], keys, gates[part], lengths[part], table[part], None, width
                )
                for part in _parts(rows, at_once)
            ]
        )
    return metadata.topk_transform(scores, index_topk)


def ragged(
    layer_id: int, queries: torch.Tensor, gates: torch.Tensor, metadata: Any, index_topk: int
) -> torch.Tensor:
    """Select for a prefill; arguments and result as in `paged`.

    Where the backend asks for it, the result is not slots but offsets into the keys of the batch's
    requests, one after the other.
    """
    first, end = metadata.get_indexer_kvcache_range()  # of each row, in the gathered keys
    rows = first.shape[0]
    lengths_cpu = metadata.get_indexer_seq_len_cpu()
    total = int(lengths_cpu.sum())
    keys, scales = get_token_to_kv_pool().get_index_k_scale_buffer(
        layer_id,
        metadata.get_indexer_seq_len(),
        metadata.get_logical_page_table(),
        total,
        int(lengths_cpu.max()),
    )
    keys = (keys.view(torch.float8_e4m3fn), scales.view(torch.float32).squeeze(-1))
    at_once = _rows_within_budget(rows, total, queries.device)
    if at_once >= rows:
        scores = _ragged_scores(queries[:rows], keys, gates[:rows], first, end)
        return metadata.topk_transform(scores, index_topk, ks=first)

    offsets = metadata.attn_metadata.topk_indices_offset
    lengths = metadata.get_seqlens_expanded()
    requests = metadata.get_token_to_batch_idx()
    selection = nothing(rows, index_topk, queries.device)
    for part in _parts(rows, at_once):
        scores = _ragged_scores(queries[part], keys, gates[part], first[part], end[part])
        # A block of rows is told to the selection as so many requests of one row.
        address: dict[str, Any] = (
            {"topk_indices_offset_override": offsets[part]}
            if offsets is not None
            else {
                "cu_seqlens_q": torch.ones_like(first[part]),
                "batch_idx_list": requests[part],
            }
        )
        selection[part] = metadata.topk_transform(
            scores, index_topk, ks=first[part], ke_offset=lengths[part], **address
        )
        del scores  # before the next block's are made
    return selection


def _parts(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _paged_keys(layer_id: int) -> torch.Tensor:
    """[pages, 64, 1, 132] uint8: the form DeepGEMM takes a page of 64 keys and 64 scales in."""
    buffer = get_token_to_kv_pool().get_index_k_with_scale_buffer(layer_id=layer_id)
    return buffer.view(buffer.shape[0], PAGE, 1, KEY_BYTES)


def _paged_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    gates: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    schedule: torch.Tensor | None,
    width: int,
) -> torch.Tensor:
    """[rows, width] fp32; past a row's length it holds anything (the selection does not look)."""
    if schedule is None:
        schedule = resolve_paged_mqa_logits_metadata_fn()(lengths, PAGE, resolve_num_sms())
    scores = resolve_fp8_paged_mqa_logits_fn()(
        queries, keys, gates, lengths, table, schedule, width, clean_logits=False
    )
    if scores.shape[0] == 1 and scores.stride(0) % 4:
        # DLPack rewrites the stride of a single row to 1, and the top-k kernel wants rows at
        # multiples of 16 bytes. One row has no next: any stride names the same memory.
        scores = scores.as_strided(scores.shape, (-(-width // 4) * 4, 1))
    return scores


def _ragged_scores(
    queries: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    gates: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
) -> torch.Tensor:
    """[rows, keys] fp32; outside [first, end) of its row it holds anything."""
    with _sms_left_by_pipeline():
        scores = resolve_fp8_mqa_logits_fn()(queries, keys, gates, first, end, clean_logits=False)
    if scores.shape[0] == 1 and scores.stride(0) % 4:  # as in _paged_scores
        scores = F.pad(scores, (0, -scores.shape[1] % 4))
    return scores


@contextlib.contextmanager
def _sms_left_by_pipeline() -> Iterator[None]:
    """A pipeline stage's pending receive occupies one multiprocessor, and the kernel waits for all
    that it was given."""
    pipeline = get_parallel().pp_group
    if pipeline.world_size == 1 or pipeline.is_last_rank:
        yield
        return
    with deep_gemm_wrapper.configure_deep_gemm_num_sms(resolve_num_sms() - 1):
        yield


@functools.lru_cache(maxsize=8)
def _measured_budget(device_index: int) -> int:
    """Bytes of scores that a prefill may hold, measured at the first long one."""
    return mqa_logits_budget_bytes(device_index=device_index, allow_sync=True)


def _rows_within_budget(rows: int, keys: int, device: torch.device) -> int:
    """Rows of [rows, keys] fp32 scores to hold at once."""
    if rows * keys < SMALL:
        return rows
    index = device.index or 0
    # While graphs are captured the free memory is not yet what it will be, and is not asked for.
    if get_is_capture_mode():
        budget = mqa_logits_static_budget_bytes(device_index=index)
    else:
        budget = _measured_budget(index)
    within = mqa_logits_rows_per_chunk(
        num_rows=rows, row_bytes=mqa_logits_row_bytes(keys), budget_bytes=budget
    )
    return rows if within is None else within
