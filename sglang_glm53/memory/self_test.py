"""Before a server with a hierarchical cache takes a request: pages to the host and back.

Random bytes in some pages of the target and of the draft are written to the host, the pages are
cleared, the bytes are loaded into other pages, and compared. What was not copied (an index key, the
draft's layer) or was copied to the wrong place is a difference, and the server does not start.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import torch

from sglang_glm53.errors import Glm53Error
from sglang_glm53.memory.hicache import draft_pools

logger = logging.getLogger(__name__)

VARIABLE = "GLM53_SELFTEST"
PAGES = 4


def wanted() -> bool:
    """Whether the test runs: always, but with GLM53_SELFTEST=0.

    Raises:
        Glm53Error: the variable has a value that means nothing.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise Glm53Error(f'{VARIABLE} is "{value}"; it can be 0 or 1')
    return value != "0"


def run(controller: Any, params: Any, pages: int = PAGES) -> None:
    """Write, evict, load back, compare.

    Args:
        controller: SGLang's HybridCacheController of the cache that was just built.
        params: its CacheInitParams; the device's pages are all free.

    Raises:
        Glm53Error: bytes differ, or there is no room for the test.
    """
    began = time.monotonic()
    allocator = params.token_to_kv_pool_allocator
    target = allocator.get_kvcache()
    pools = {"target": target}
    pools |= {f"draft {number}": pool for number, pool in enumerate(draft_pools(params))}
    tokens = pages * target.page_size
    here, there = allocator.alloc(tokens), allocator.alloc(tokens)
    host = controller.mem_pool_host.alloc(tokens)
    if here is None or there is None or host is None:
        raise Glm53Error(
            f"the self-test of the hierarchical cache needs {2 * pages} free pages on the device "
            f"and {pages} on the host; give the cache more room, or set {VARIABLE}=0"
        )
    # Pages that are no neighbours, in another order than on the host.
    numbers = [slots[:: target.page_size] // target.page_size for slots in (here, there.flip(0))]
    there = (numbers[1].unsqueeze(1) * target.page_size + _within(target, there)).flatten()
    try:
        content = {name: _random(pool, pages) for name, pool in pools.items()}
        for name, pool in pools.items():
            pool.write_pages(numbers[0], content[name])
        _submit(controller, host, here, to_host=True)
        for pool in pools.values():
            pool.write_pages(numbers[0], torch.zeros_like(pool.read_pages(numbers[0])))
        _submit(controller, host, there, to_host=False)
        for name, pool in pools.items():
            _compare(name, pool.read_pages(numbers[1]), content[name])
    finally:
        for pool in pools.values():
            for where in numbers:
                pool.write_pages(where, torch.zeros_like(pool.read_pages(where)))
        allocator.free(here)
        allocator.free(there)
        controller.mem_pool_host.free(host)
    logger.info(
        "sglang-glm53: %d pages to the host and back are the same bytes (%s; %.2f s)",
        pages,
        ", ".join(pools),
        time.monotonic() - began,
    )


def _within(pool: Any, slots: torch.Tensor) -> torch.Tensor:
    return torch.arange(pool.page_size, dtype=slots.dtype, device=slots.device)


def _random(pool: Any, pages: int) -> torch.Tensor:
    where = torch.zeros(pages, dtype=torch.int64, device=pool.device)
    like = pool.read_pages(where)
    generator = torch.Generator().manual_seed(53)
    content = torch.randint(1, 256, like.shape, dtype=torch.uint8, generator=generator)
    return content.to(like.device)


def _submit(controller: Any, host: torch.Tensor, device: torch.Tensor, *, to_host: bool) -> None:
    """One transfer of all host pools, as SGLang's controller submits it, and wait for it."""
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    host, device = controller.move_indices(host, device)
    group = controller.mem_pool_host
    beside = [
        PoolTransfer(name=entry.name, host_indices=host, device_indices=device)
        for entry in group.entries
        if entry is not group.anchor_entry
    ]
    engine = controller.l2_transfer_engine
    if to_host:
        done = engine.submit_device_to_host(controller._l2_transfers(host, device, beside))
    else:
        done = engine.submit_host_to_device(
            controller._l2_load_transfers(host, device, beside),
            transfer_layer_id_max=controller.transfer_layer_id_max,
        )
    done.finish_event.synchronize()


def _compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    different = found != expected
    if not bool(different.any()):
        return
    page, byte = (int(place) for place in different.nonzero()[0])
    raise Glm53Error(
        f"the hierarchical cache loses data: of the {name}'s pages {int(different.sum())} of "
        f"{different.numel()} bytes differ after they were written to the host and loaded back "
        f"(first: byte {byte} of page {page}); start without --enable-hierarchical-cache"
    )
