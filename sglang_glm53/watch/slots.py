"""Debug mode: the cache slots of each pass, before and after it.

Before: every slot that the pass writes or reads lies in the pool, no two tokens write the same one,
and none lies in a page that the allocator holds as free. After: every latent and index key that the
pass had to write has been written. For that the entries are filled with ones before the pass: NaN
in every format of the cache, and nobody reads a slot before the pass has written it. A kernel that
skips entries leaves what another request had there, which answers wrongly without a sign.

Each check waits for the device: for finding a fault, not for production.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sglang_glm53.watch.alarms import BAD_SLOT, NOT_WRITTEN
from sglang_glm53.watch.request import Alarm

ONES = 0xFF


def slots_problem(
    written: torch.Tensor,
    read: torch.Tensor,
    free_pages: torch.Tensor | None,
    *,
    slots: int,
    page_size: int,
) -> str | None:
    """What is wrong with a pass's slots, or None.

    Args:
        written: slots that the pass writes, [tokens]; those of page 0 are padding.
        read: slots of the tokens before, [tokens].
        free_pages: pages that the allocator would give away, [pages].
        slots: of the pool, page 0 included.
    """
    for name, part in (("written", written), ("read", read)):
        outside = part[(part < 0) | (part >= slots)]
        if outside.numel():
            return f"slot {int(outside[0])} is to be {name}; the cache has 0 to {slots - 1}"
    real = written[written >= page_size]
    values, counts = real.unique(return_counts=True)
    if (counts > 1).any():
        return f"two tokens are to be written to slot {int(values[counts > 1][0])}"
    if free_pages is not None and free_pages.numel():
        for name, part in (("written", real), ("read", read[read >= page_size])):
            pages = part // page_size
            taken = pages[torch.isin(pages, free_pages.to(pages))]
            if taken.numel():
                return f"page {int(taken[0])} is to be {name}, and free for others"
    return None


def check_before(runner: Any, batch: Any) -> Alarm | None:
    """Check the slots of a pass of `runner` (SGLang's ModelRunner) over `batch` (ForwardBatch)."""
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    written = batch.out_cache_loc
    if written is None or not written.numel():
        return None
    table = runner.req_to_token_pool.req_to_token
    count = min(len(batch.rids or ()), batch.seq_lens.shape[0])
    rows, lengths = batch.req_pool_indices[:count].tolist(), batch.seq_lens[:count].tolist()
    parts = [table[row, :length].long() for row, length in zip(rows, lengths, strict=True)]
    problem = slots_problem(
        written.long(),
        torch.cat(parts) if parts else written[:0].long(),
        allocator.get_all_free_pages(),
        slots=pool.size + pool.page_size,
        page_size=pool.page_size,
    )
    return Alarm(BAD_SLOT, problem) if problem else None


def mark(pool: Any, slots: torch.Tensor, *, index_keys: bool = True) -> torch.Tensor | None:
    """Fill the entries of `slots` with ones in every layer of a pool of ours.

    Args:
        index_keys: whether the pass writes index keys too.

    Returns:
        The slots that were marked, [tokens]; None where the pool is another one.
    """
    if not hasattr(pool, "index_key_cache") or not hasattr(pool, "latent_pages"):
        return None
    slots = slots[(slots >= pool.page_size) & (slots < pool.size + pool.page_size)].long()
    if not slots.numel():
        return None
    page, offset = slots // pool.page_size, slots % pool.page_size
    for _, rows in _entries(pool, index_keys):
        rows[page, offset] = ONES
    return slots


def check_after(pool: Any, slots: torch.Tensor, *, index_keys: bool = True) -> Alarm | None:
    """An alarm if an entry of `slots` is still as `mark` left it."""
    page, offset = slots // pool.page_size, slots % pool.page_size
    for name, rows in _entries(pool, index_keys):
        left = (rows[page, offset] == ONES).all(-1)
        if left.any():
            slot = int(slots[left.nonzero()[0, 0]])
            return Alarm(
                NOT_WRITTEN,
                f"{name}: {int(left.sum())} of {slots.numel()} tokens were not written, "
                f"the first in slot {slot}",
            )
    return None


def _entries(pool: Any, index_keys: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Every layer's latents and index keys, as bytes [pages, page size, bytes]; views."""
    for local in range(pool.layer_num):
        layer = pool.start_layer + local
        yield f"latents of layer {layer}", pool.latent_pages(layer)
        cache = pool.index_key_cache
        if index_keys and cache.buffer[local].shape[0]:
            yield f"index keys of layer {layer}", cache.keys(local).view(torch.uint8)
