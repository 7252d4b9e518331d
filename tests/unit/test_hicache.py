"""The hierarchical cache over page-major pools: SGLang's own controller, on plain memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dsa_fakes import PAGE, make_pool, single_rank  # noqa: F401
from test_page_pool import EAGLE, SKIP, fill, page_major, served_with  # noqa: F401

from sglang_glm53.errors import Glm53Error
from sglang_glm53.memory import hicache, host_pool, self_test
from sglang_glm53.memory.host_pool import PageHostPool, load_groups

PAGES = 20


class Stack:
    """Target and draft, SGLang's page allocator and its controller over one host pool."""

    def __init__(self, dtype: torch.dtype, io_backend: str = "direct") -> None:
        import threading

        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

        self.target = make_pool(PAGES, dtype, layers=3, skip=SKIP)
        self.draft = make_pool(PAGES, dtype, layers=1)
        size = (PAGES - 1) * PAGE
        self.allocator = PagedTokenToKVPoolAllocator(size, PAGE, dtype, "cpu", self.target, False)
        self.params = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tp_cache_group=None,
            attn_cp_cache_group=None,
            attn_tp_cache_group=None,
            pp_cache_group=None,
            mtp_draft_device_pools=(self.draft,),
            sidecar_draft_device_pools=(),
        )
        memory = SimpleNamespace(
            hicache_ratio=2.0,
            hicache_size=0,
            hicache_mem_layout="layer_first",
            hicache_storage_backend=None,
            hicache_write_policy="write_through",
            hicache_io_backend=io_backend,
            hicache_host_memory_mode="cache",
        )
        self.group, self.controller = hicache.build_stack(
            self.target, self.params, memory, load_cache_event=threading.Event()
        )
        self.host: PageHostPool = self.group.anchor_entry.host_pool


@pytest.fixture(
    params=[torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=["fp32", "bf16", "fp8"]
)
def stack(request: pytest.FixtureRequest, served_with) -> Stack:  # noqa: F811
    served_with(**EAGLE)
    return Stack(request.param)


def test_pages_are_written_evicted_and_loaded_back(stack: Stack) -> None:
    """Through SGLang's controller: every byte of target, index keys and draft comes back."""
    allocator, controller, arena = stack.allocator, stack.controller, stack.target.share.arena
    assert stack.draft.share.arena is arena
    free = allocator.available_size()
    slots = allocator.alloc(5 * PAGE)
    fill(stack.target, slots)
    fill(stack.draft, slots, seed=90)
    before = arena.pages[slots[::PAGE] // PAGE].clone()
    known = stack.draft.latent_rows(0, slots), stack.target.get_index_k(2, slots)
    kept = controller.write(slots)
    assert kept is not None and len(controller.ack_write_queue) == 1
    allocator.free(slots)
    arena.memory.zero_()
    taken = allocator.alloc(7 * PAGE)  # others need the pages
    back = controller.load(kept)
    controller.start_loading()
    assert torch.equal(arena.pages[back[::PAGE] // PAGE], before)
    assert torch.equal(stack.draft.latent_rows(0, back), known[0])
    assert torch.equal(stack.target.get_index_k(2, back), known[1])
    assert (arena.pages[taken[::PAGE] // PAGE] == 0).all()
    for part in (taken, back):
        allocator.free(part)
    assert allocator.available_size() == free
    controller.mem_pool_host.free(kept)
    assert stack.host.available_size() == stack.host.size


def test_a_page_is_one_entry_and_one_copy(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[int, ...]] = []
    copy = host_pool.page_copy.copy_pages_torch

    def counted(target, source, to, origin, start, end) -> None:
        copies.append((to.numel(), start, end))
        copy(target, source, to, origin, start, end)

    monkeypatch.setattr(host_pool.page_copy, "copy_pages_torch", counted)
    assert len(stack.group.entries) == 1
    page = stack.host.page
    assert stack.host.size_per_token * PAGE == page.page_bytes
    slots = stack.allocator.alloc(3 * PAGE)
    kept = stack.controller.write(slots)
    assert copies == [(3, 0, page.page_bytes)]
    copies.clear()
    stack.controller.load(kept)
    stack.controller.start_loading()
    assert copies == [(3, start, end) for _, start, end in page.ranges(8)]
    assert copies[-1][2] == page.used_bytes  # the draft's layer comes with the last


def test_a_layer_is_there_when_its_event_fires(served_with) -> None:  # noqa: F811
    """Loaded run by run: after layer n, everything that layers up to n read is on the device."""
    served_with(**EAGLE)
    pool = make_pool(6, torch.bfloat16, layers=7, skip=[False, True] * 3 + [True])
    draft = make_pool(6, torch.bfloat16, layers=1)
    host = PageHostPool(pool, host_to_device_ratio=2.0, host_size=0, layout="layer_first", groups=3)
    layout, arena = host.page, pool.share.arena
    slots = torch.arange(PAGE, 4 * PAGE)
    fill(pool, slots)
    fill(draft, slots, seed=9)
    content = arena.pages[1:4].clone()
    kept = host.alloc(3 * PAGE)
    host.backup_from_device_all_layer(pool, kept, slots, "direct")
    arena.memory.zero_()
    assert [first for first, _, _ in host.ranges] == [0, 2, 4]
    for layer in range(7):
        host.load_to_device_per_layer(pool, kept, slots, layer, "direct")
        for piece in layout.pieces:
            part = slice(piece.offset, piece.end)
            if piece.layer <= layer or (layer == 6 and piece.layer == 7):
                assert torch.equal(arena.pages[1:4, part], content[:, part])
    assert torch.equal(arena.pages[1:4], content)


def test_storage_sees_whole_pages(stack: Stack) -> None:
    host = stack.host
    kept = host.alloc(2 * PAGE)
    page = torch.randint(0, 256, (host.page.page_bytes,), dtype=torch.uint8)
    host.set_from_flat_data_page(int(kept[PAGE]), page)
    assert torch.equal(host.get_data_page(int(kept[PAGE])), page)
    assert host.get_data_page(int(kept[PAGE]), flat=False).shape == (1, page.numel())
    assert host.get_dummy_flat_data_page().shape == page.shape
    places, sizes = host.get_page_buffer_meta(kept)
    assert sizes == [page.numel()] * 2 and places[1] - places[0] == page.numel()
    assert host.get_page_buffer_element_size() == page.numel()
    assert host.storage_format_tag == host.page.tag and host.stores_page_envelope
    assert host.get_hybrid_pool_buffer()[0] is host.kv_buffer


def test_the_self_test_passes_and_leaves_nothing(stack: Stack) -> None:
    free = stack.allocator.available_size()
    self_test.run(stack.controller, stack.params)
    assert stack.allocator.available_size() == free
    assert stack.host.available_size() == stack.host.size
    assert (stack.target.share.arena.memory == 0).all()


def test_the_self_test_with_indices_for_a_kernel(served_with) -> None:  # noqa: F811
    served_with(**EAGLE)
    stack = Stack(torch.bfloat16, io_backend="kernel")
    self_test.run(stack.controller, stack.params)


FAULTS = {
    "the draft is left behind": lambda page, to, origin, start, end: (
        (to, origin, start, min(end, page.latent_offset(page.target_layers)))
    ),
    "an index key is left behind": lambda page, to, origin, start, end: (
        (to, origin, start, end if end < page.used_bytes else page.index_offset(2))
    ),
    "pages are confused": lambda page, to, origin, start, end: (to, origin.flip(0), start, end),
    "a byte is lost": lambda page, to, origin, start, end: (to, origin, start + 1, end),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("way", ["to the host", "to the device"])
def test_the_self_test_tells_what_is_lost(
    stack: Stack, fault: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = host_pool.page_copy.copy_pages_torch

    def faulty(target, source, to, origin, start, end) -> None:
        if (target is stack.host.kv_buffer) == (way == "to the host"):
            to, origin, start, end = fault(stack.host.page, to, origin, start, end)
        copy(target, source, to, origin, start, end)

    monkeypatch.setattr(host_pool.page_copy, "copy_pages_torch", faulty)
    stack.host.kv_buffer.zero_()
    free = stack.allocator.available_size()
    with pytest.raises(Glm53Error, match="loses data: of the .* bytes differ"):
        self_test.run(stack.controller, stack.params)
    assert stack.allocator.available_size() == free


def test_the_self_test_says_when_there_is_no_room(stack: Stack) -> None:
    stack.allocator.alloc((PAGES - 3) * PAGE)
    with pytest.raises(Glm53Error, match="8 free pages"):
        self_test.run(stack.controller, stack.params)


def test_a_draft_with_a_cache_of_its_own_is_refused(stack: Stack) -> None:
    other = make_pool(PAGES, torch.bfloat16, layers=1)
    stack.params.mtp_draft_device_pools = (other,)
    with pytest.raises(Glm53Error, match="keeps a cache of its own"):
        hicache.check_drafts(stack.target, stack.params)
    stack.params.mtp_draft_device_pools, stack.params.sidecar_draft_device_pools = (), (other,)
    with pytest.raises(Glm53Error, match="keeps a cache of its own"):
        hicache.check_drafts(stack.target, stack.params)


def test_sglang_picks_our_stack_for_page_major_pools_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    monkeypatch.setattr(assembler, "_STRATEGIES", list(assembler._STRATEGIES))
    hicache._register(assembler.register_stack_strategy)
    page = make_pool(3, torch.bfloat16)
    monkeypatch.setenv("GLM53_POOL", "layer")
    layer = make_pool(3, torch.bfloat16)
    full = {ComponentType.FULL}
    names = [type(assembler._select_strategy(pool, full)).__name__ for pool in (page, layer)]
    assert names == ["PageMajorStrategy", "_DsaStrategy"]


@pytest.mark.parametrize("asked", ["page", "layer"])
def test_the_test_runs_after_the_stack_was_built(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM53_POOL", asked)
    pool, ran = make_pool(3, torch.bfloat16), []
    monkeypatch.setattr(self_test, "run", lambda controller, params: ran.append(controller))
    cache = SimpleNamespace(cache_controller="controller")
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    params = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    attach = hicache._then_try_it(lambda cache, params, server_args, **_: ran.append("built"))
    attach(cache, params, None, load_cache_event=None)
    assert ran == ["built", "controller"]
    monkeypatch.setenv("GLM53_SELFTEST", "0")
    attach(cache, params, None, load_cache_event=None)
    assert ran == ["built", "controller", "built"]
    monkeypatch.setenv("GLM53_SELFTEST", "yes")
    with pytest.raises(Glm53Error, match="0 or 1"):
        attach(cache, params, None, load_cache_event=None)


def test_how_many_copies_a_page_is_loaded_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_groups() == host_pool.LOAD_GROUPS
    monkeypatch.setenv("GLM53_LOAD_GROUPS", "1")
    assert load_groups() == 1
    for value in ("0", "-1", "few"):
        monkeypatch.setenv("GLM53_LOAD_GROUPS", value)
        with pytest.raises(Glm53Error, match="1 or more"):
            load_groups()
