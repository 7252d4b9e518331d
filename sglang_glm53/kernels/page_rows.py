"""Writes of single tokens into page-major pages, byte for byte (Triton; twins in plain torch).

SGLang's writers step from token to token by one stride, which a page-major pool does not have. The
values come from SGLang's own kernels (quantised latents; index keys with norm, RoPE and scale);
what is written here is where they go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

PAGE = 64
WORD = 4  # bytes that one element of the kernels has


@triton.jit
def _scatter_rows(
    target,
    first,
    second,
    slots,
    page_words,
    start,
    row_words,
    first_stride,
    second_stride,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    place = slot // PAGE_TOKENS * page_words + start + slot % PAGE_TOKENS * row_words
    word = tl.arange(0, BLOCK)
    head = tl.load(first + row * first_stride + word, mask=word < FIRST)
    tl.store(target + place + word, head, mask=word < FIRST)
    behind = word - FIRST
    inside = (behind >= 0) & (behind < SECOND)
    tail = tl.load(second + row * second_stride + behind, mask=inside)
    tl.store(target + place + word, tail, mask=inside)


@triton.jit
def _scatter_index(
    target,
    staged,
    slots,
    page_words,
    start,
    KEY: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    scales: tl.constexpr = PAGE_TOKENS * KEY  # where a page's scales begin
    source = row // PAGE_TOKENS * (scales + PAGE_TOKENS)
    place = slot // PAGE_TOKENS * page_words + start
    word = tl.arange(0, KEY)
    key = tl.load(staged + source + row % PAGE_TOKENS * KEY + word)
    tl.store(target + place + slot % PAGE_TOKENS * KEY + word, key)
    scale = tl.load(staged + source + scales + row % PAGE_TOKENS)
    tl.store(target + place + scales + slot % PAGE_TOKENS, scale)


def scatter_rows(
    memory: torch.Tensor,
    page_bytes: int,
    start: int,
    slots: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write one row a token: the bytes of `parts[0]` and then those of `parts[1]`.

    Args:
        memory: uint8, the arena, [pages * page_bytes].
        start: where the layer's rows begin in a page, in bytes.
        slots: [tokens], int64 or int32.
        parts: two tensors of [tokens, bytes] uint8 whose rows are contiguous; multiples of 4 bytes.
    """
    tokens = slots.shape[0]
    if tokens == 0:
        return
    first, second = (part.view(torch.int32) for part in parts)
    _scatter_rows[(tokens,)](
        memory.view(torch.int32),
        first,
        second,
        slots,
        page_bytes // WORD,
        start // WORD,
        first.shape[1] + second.shape[1],
        first.stride(0),
        second.stride(0),
        FIRST=first.shape[1],
        SECOND=second.shape[1],
        PAGE_TOKENS=PAGE,
        BLOCK=triton.next_power_of_2(first.shape[1] + second.shape[1]),
    )


def scatter_rows_torch(
    memory: torch.Tensor,
    page_bytes: int,
    start: int,
    slots: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """`scatter_rows` in plain torch."""
    row = torch.cat(parts, dim=1)
    pages = memory.view(-1, page_bytes)[:, start : start + PAGE * row.shape[1]]
    slots = slots.long()
    pages.unflatten(1, (PAGE, -1))[slots // PAGE, slots % PAGE] = row


def scatter_index(
    memory: torch.Tensor, page_bytes: int, start: int, slots: torch.Tensor, staged: torch.Tensor
) -> None:
    """Write index keys and scales that lie in pages of their own to the slots they belong to.

    Args:
        memory, page_bytes: as in `scatter_rows`; start: where the layer's index keys begin.
        slots: [tokens], int64 or int32.
        staged: uint8 [pages, 8448]; token t's key and scale are those of slot t.
    """
    tokens = slots.shape[0]
    if tokens == 0:
        return
    _scatter_index[(tokens,)](
        memory.view(torch.int32),
        staged.view(torch.int32),
        slots,
        page_bytes // WORD,
        start // WORD,
        KEY=(staged.shape[1] // PAGE - WORD) // WORD,
        PAGE_TOKENS=PAGE,
        num_warps=1,
    )


def scatter_index_torch(
    memory: torch.Tensor, page_bytes: int, start: int, slots: torch.Tensor, staged: torch.Tensor
) -> None:
    """`scatter_index` in plain torch."""
    tokens, width = slots.shape[0], staged.shape[1]
    slots = slots.long()
    pages = memory.view(-1, page_bytes)[:, start : start + width]
    keys = width - PAGE * WORD
    for part in (slice(0, keys), slice(keys, width)):
        source = staged[:, part].unflatten(1, (PAGE, -1)).flatten(0, 1)[:tokens]
        pages[:, part].unflatten(1, (PAGE, -1))[slots // PAGE, slots % PAGE] = source


def sanitizer_cases() -> list[tuple[str, Callable[[], object]]]:
    """Launches for compute-sanitizer: one token, several, the last page."""
    cases: list[tuple[str, Callable[[], object]]] = []
    page_bytes = PAGE * 656 + PAGE * 132
    for tokens in (1, 65):
        memory = torch.zeros(3 * page_bytes, dtype=torch.uint8, device="cuda")
        slots = torch.arange(3 * PAGE - tokens, 3 * PAGE, device="cuda")
        parts = tuple(
            torch.ones(tokens, width, dtype=torch.uint8, device="cuda") for width in (528, 128)
        )
        staged = torch.ones(-(-tokens // PAGE), PAGE * 132, dtype=torch.uint8, device="cuda")
        rows = functools.partial(scatter_rows, memory, page_bytes, 0, slots, parts)
        index = functools.partial(scatter_index, memory, page_bytes, PAGE * 656, slots, staged)
        cases += [(f"rows, {tokens} tokens", rows), (f"index keys, {tokens} tokens", index)]
    return cases
