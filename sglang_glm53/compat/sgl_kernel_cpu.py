"""Torch versions of the ops that SGLang imports from a CPU build of `sgl_kernel`.

A machine without a GPU usually has the CUDA wheel of the kernel package (it needs libcuda) or
none at all, and SGLang's CPU code path imports these names while its own modules load. Without a
GPU this module stands in `sys.modules["sgl_kernel"]`; any other `from sgl_kernel import …` still
fails with an ImportError, as without the package. SGLang calls the ops by these names; it uses
`torch.ops.sgl_kernel.*` on a CPU only where it has found AMX, which needs the real package.

The ops write their results into the tensors that are handed in (marked "out") and return None.
Draft trees are chains here (`topk` 1), the only form that the torch attention backend runs.
"""

from __future__ import annotations

import ctypes

import torch

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated slots into the requests' rows.

    Row `req_pool_indices[i]` of `req_to_token` ([requests, pool_len], int32, out) gets the next
    `end_offset[i] - start_offset[i]` entries of `out_cache_loc` at `start_offset[i]`.
    """
    rows, columns = _ranges(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read the requests' slots of positions [start, end) into `out_cache_loc` (out), packed."""
    rows, columns = _ranges(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Read `topk * speculative_num_steps` slots after each request's last token.

    `out_cache_loc` ([requests * topk * steps], out).
    """
    columns = torch.arange(topk * speculative_num_steps, device=seq_lens.device)
    columns = seq_lens.long().unsqueeze(1) + columns
    slots = req_to_token[req_pool_indices.long().unsqueeze(1), columns]
    out_cache_loc[: slots.numel()] = slots.reshape(-1).to(out_cache_loc.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """`bonus_tokens[i]` (out) = the last of the `accept_lens[i]` accepted tokens of request i.

    `accept_tokens` holds `accept_stride` tokens a request.
    """
    last = torch.arange(accept_lens.numel(), device=accept_lens.device) * accept_stride
    last = last + accept_lens.reshape(-1).long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last].view_as(bonus_tokens))


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
) -> None:
    """Pack the slots of the accepted tokens (`accept_index` > -1) to the front of the output."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Describe the draft chain of each request: node i follows node i - 1.

    `positions` ([requests * n], out): `verified_seq_len + i`. `retrieve_*` ([requests, n], out):
    the node's row in the batch, its child or -1, its sibling (-1: a chain has none). `tree_mask`
    (bool, flat, out): mode 0 holds [n, seq_len + n] a request, mode 1 [n, n]; node i sees the
    prefix (True on entry) and nodes 0..i.

    Raises:
        NotImplementedError: `topk` above 1, or the bit-packed mask (mode 2).
    """
    if topk != 1:
        raise NotImplementedError(
            f"draft trees with --speculative-eagle-topk {topk} do not run on a CPU; use 1"
        )
    if int(tree_mask_mode) not in (0, 1):
        raise NotImplementedError(f"tree mask mode {int(tree_mask_mode)} does not run on a CPU")
    requests, n = verified_seq_len.numel(), draft_token_num
    device = verified_seq_len.device
    steps = torch.arange(n, device=device)
    positions.view(requests, n).copy_(verified_seq_len.long().unsqueeze(1) + steps)
    retrieve_index.view(requests, n).copy_(
        torch.arange(requests * n, device=device).view(requests, n)
    )
    following = steps + 1
    following[-1] = -1
    retrieve_next_token.view(requests, n).copy_(following.expand(requests, n))
    retrieve_next_sibling.view(requests, n).fill_(-1)

    chain = torch.ones(n, n, dtype=torch.bool, device=device).tril().to(tree_mask.dtype)
    if int(tree_mask_mode) == 1:
        tree_mask.view(-1)[: requests * n * n].view(requests, n, n).copy_(chain)
        return
    start = 0
    for length in verified_seq_len.tolist():
        block = tree_mask.view(-1)[start : start + n * (length + n)].view(n, length + n)
        block[:, length:] = chain
        start += block.numel()


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept the drafted tokens that equal the target's greedy choice, up to the first miss.

    Node 0 is the last committed token; node j + 1 is accepted while `candidates[:, j + 1]` equals
    `target_predict[:, j]` (both [requests, n]). Out: `accept_index` ([requests, width], int32) the
    rows of node 0 and of the accepted nodes (the rest keeps its -1), `accept_token_num`
    ([requests]) the number accepted after node 0, `predicts` (flat, by row) the target's token at
    each of those rows, the last of which is the bonus token.
    """
    requests, n = candidates.shape
    width = min(accept_index.shape[1], n)
    rows = retrive_index.view(requests, n).long()
    targets = target_predict.reshape(requests, n)
    hits = candidates[:, 1:width] == targets[:, : width - 1]
    # A chain may be shorter than the tensor: a node without a child ends it.
    hits &= retrive_next_token.view(requests, n)[:, : width - 1] != -1
    hits = hits.long().cumprod(dim=1)
    accepted = hits.sum(dim=1)
    visited = torch.ones(requests, width, dtype=torch.bool, device=candidates.device)
    visited[:, 1:] = hits.bool()
    accept_index[:, :width] = torch.where(
        visited, rows[:, :width].to(accept_index.dtype), accept_index[:, :width]
    )
    accept_token_num.copy_(accepted.view_as(accept_token_num))
    flat_rows = rows[:, :width][visited]
    predicts.view(-1)[flat_rows] = targets[:, :width][visited].to(predicts.dtype)


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one and put `topk_index[i]` at its end.

    `input_ids` ([tokens], out). With `select_index` the new token goes to that row instead.
    """
    starts, lengths = extend_start_loc.tolist(), extend_seq_lens.tolist()
    tokens = topk_index.reshape(-1)
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length <= 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = start + length - 1 if select_index is None else int(select_index[i])
        input_ids[last] = tokens[i]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor,
    strides: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
) -> None:
    """Copy cache rows `src_loc` to `tgt_loc` in every buffer.

    `data_ptrs` (uint64) are the buffers' addresses, `strides` the bytes of a row. All rows are
    read before one is written, so the two sets may overlap.
    """
    source, target = src_loc.reshape(-1).tolist(), tgt_loc.reshape(-1).tolist()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * stride, stride) for row in source]
        for row, data in zip(target, rows, strict=True):
            ctypes.memmove(address + row * stride, data, stride)


def _ranges(
    request: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column (int64, flat) of every position in [start[i], end[i]) of every request."""
    start, lengths = start.reshape(-1).long(), (end - start).reshape(-1).long()
    rows = torch.repeat_interleave(request.reshape(-1).long(), lengths)
    first = torch.repeat_interleave(start - (lengths.cumsum(0) - lengths), lengths)
    return rows, first + torch.arange(rows.numel(), device=rows.device)
