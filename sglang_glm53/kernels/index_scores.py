"""Index scores of a request's rows over its paged keys, read once (Triton; twin in torch).

``score(row, s) = key_scale(s) * sum_h gate_h(row) * relu(q_h(row) . k(s))``

A verification has up to eight rows a request. All of them stand on the wide side of one matrix
product with a page's 64 keys, so a page leaves memory once, whatever the number of rows. Rows are
taken in groups of a power of two (six are four and two), since products are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

PAGE, HEAD_DIM = 64, 128
MOST_ROWS = 8
PAGES_AT_LEAST = 4  # of a program, so that its queries are read for something


@triton.jit
def _group(
    keys,
    key_scale,
    q,
    gates,
    scores,
    column,
    visible,
    row_stride,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Scores of one page for ROWS rows: q [128, ROWS * HEADS], gates [ROWS * HEADS]."""
    products = tl.dot(keys, q)  # [TOKENS, ROWS * HEADS]
    weighted = tl.maximum(products, 0.0) * gates[None, :]
    total = tl.sum(weighted.reshape(TOKENS, ROWS, HEADS), axis=2) * key_scale[:, None]
    row = tl.arange(0, ROWS)
    place = scores + row.to(tl.int64)[None, :] * row_stride + column[:, None]
    tl.store(place, total, mask=column[:, None] < visible[None, :])


@triton.jit
def _paged_scores(
    q,
    gates,
    cache,
    cache_scales,
    table,
    lengths,
    scores,
    table_stride,
    page_bytes,
    row_stride,
    pages_each,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * pages_each
    last = tl.load(lengths + request * ROWS + ROWS - 1)  # the row that sees most
    end = tl.minimum(start + pages_each, tl.cdiv(last, TOKENS))
    if start < end:
        inner = tl.arange(0, WIDTH)
        token = tl.arange(0, TOKENS)
        own = q + request * ROWS * HEADS * WIDTH
        own_gates = gates + request * ROWS * HEADS
        own_scores = scores + request * ROWS * row_stride
        first = tl.arange(0, FIRST * HEADS)
        q1 = tl.load(own + first[None, :] * WIDTH + inner[:, None])
        g1 = tl.load(own_gates + first)
        v1 = tl.load(lengths + request * ROWS + tl.arange(0, FIRST))
        if SECOND:
            second = FIRST * HEADS + tl.arange(0, SECOND * HEADS)
            q2 = tl.load(own + second[None, :] * WIDTH + inner[:, None])
            g2 = tl.load(own_gates + second)
            v2 = tl.load(lengths + request * ROWS + FIRST + tl.arange(0, SECOND))
        if THIRD:
            third = (FIRST + SECOND) * HEADS + tl.arange(0, THIRD * HEADS)
            q3 = tl.load(own + third[None, :] * WIDTH + inner[:, None])
            g3 = tl.load(own_gates + third)
            v3 = tl.load(lengths + request * ROWS + FIRST + SECOND + tl.arange(0, THIRD))
        for page in range(start, end):
            place = tl.load(table + request * table_stride + page).to(tl.int64) * page_bytes
            keys = tl.load(cache + place + token[:, None] * WIDTH + inner[None, :])
            key_scale = tl.load(cache_scales + (place + TOKENS * WIDTH) // 4 + token)
            column = page * TOKENS + token
            _group(
                keys, key_scale, q1, g1, own_scores, column, v1, row_stride, FIRST, HEADS, TOKENS
            )
            if SECOND:
                place2 = own_scores + FIRST * row_stride
                _group(
                    keys, key_scale, q2, g2, place2, column, v2, row_stride, SECOND, HEADS, TOKENS
                )
            if THIRD:
                place3 = own_scores + (FIRST + SECOND) * row_stride
                _group(
                    keys, key_scale, q3, g3, place3, column, v3, row_stride, THIRD, HEADS, TOKENS
                )


def paged_scores(
    q: torch.Tensor,
    gates: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scores: torch.Tensor,
    *,
    programs: int = 2 * 132,
    stages: int = 4,
    warps: int = 4,
) -> None:
    """Write the scores of every row over the keys that it sees.

    Args:
        q: e4m3 [requests, R, heads, 128], R from 1 to 8.
        gates: fp32 [requests, R, heads], the queries' scales in them.
        cache: uint8 [pages, bytes], a view of one layer's index pages, 64 keys of 128 e4m3 values
            and then their 64 fp32 scales; pages may lie apart.
        table: int32 [requests, most pages], the pages of each request in order.
        lengths: int32 [requests, R], positions that each row sees, not falling from row to row.
        scores: fp32 [requests * R, at least as many as the longest]; what a row does not see stays.
        programs: about as many run, so that a few long requests fill the GPU too.
    """
    requests, rows, heads, width = q.shape
    if not 1 <= rows <= MOST_ROWS or width != HEAD_DIM:
        raise ValueError(f"{rows} rows of {width} values; at most {MOST_ROWS} rows of {HEAD_DIM}")
    if requests == 0:
        return
    most = min(table.shape[1], triton.cdiv(scores.shape[1], PAGE))
    splits = max(1, min(triton.cdiv(programs, requests), triton.cdiv(most, PAGES_AT_LEAST)))
    first, second, third = _groups(rows)
    memory = cache.as_strided(((cache.shape[0] - 1) * cache.stride(0) + cache.shape[1],), (1,))
    _paged_scores[(requests, splits)](
        q,
        gates,
        memory.view(torch.float8_e4m3fn),
        memory.view(torch.float32),
        table,
        lengths,
        scores,
        table.stride(0),
        cache.stride(0),
        scores.stride(0),
        triton.cdiv(most, splits),
        ROWS=rows,
        FIRST=first,
        SECOND=second,
        THIRD=third,
        HEADS=heads,
        TOKENS=PAGE,
        WIDTH=HEAD_DIM,
        num_warps=warps,
        num_stages=stages,
    )


def _groups(rows: int) -> tuple[int, int, int]:
    """Powers of two that sum to `rows` (1 to 8), zeros behind them."""
    found = [4] * (rows // 4) + [2] * (rows % 4 // 2) + [1] * (rows % 2)
    return tuple((found + [0, 0])[:3])  # type: ignore[return-value]


def paged_scores_torch(
    q: torch.Tensor,
    gates: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scores: torch.Tensor,
) -> None:
    """`paged_scores` in plain torch, in fp64."""
    requests, rows, _, width = q.shape
    for request in range(requests):
        length = int(lengths[request, -1])
        pages = cache[table[request, : -(-length // PAGE)].long()]
        keys = pages[:, : PAGE * width].reshape(-1, width).view(torch.float8_e4m3fn).double()
        scale = pages[:, PAGE * width : PAGE * (width + 4)].contiguous().view(torch.float32)
        products = torch.einsum("rhd,sd->rhs", q[request].double(), keys[:length]).relu()
        total = torch.einsum("rhs,rh->rs", products, gates[request].double())
        total = (total * scale.flatten()[:length].double()).float()
        for row in range(rows):
            seen = int(lengths[request, row])
            scores[request * rows + row, :seen] = total[row, :seen]


def sanitizer_cases() -> list[tuple[str, Callable[[], object]]]:
    """Launches for compute-sanitizer: one row and six, a page that is not full."""
    cases: list[tuple[str, Callable[[], object]]] = []
    cache = torch.zeros(9, PAGE * (HEAD_DIM + 4), dtype=torch.uint8, device="cuda")
    table = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4) + 1
    for rows in (1, 6, 7):
        lengths = torch.tensor([[70], [200]], device="cuda") + torch.arange(rows, device="cuda")
        q = torch.zeros(2, rows, 32, HEAD_DIM, device="cuda").to(torch.float8_e4m3fn)
        gates = torch.ones(2, rows, 32, device="cuda")
        scores = torch.empty(2 * rows, 256, device="cuda")
        run = functools.partial(paged_scores, q, gates, cache, table, lengths.int(), scores)
        cases.append((f"{rows} rows", run))
    return cases
