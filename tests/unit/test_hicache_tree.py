"""The hierarchical cache end to end without a model: SGLang's radix tree, its allocator and its
controller over a page-major pool with the draft inside, as a server attaches them."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dsa_fakes import PAGE, make_pool, single_rank  # noqa: F401
from test_page_pool import EAGLE, SKIP, page_major, served_with  # noqa: F401

from sglang_glm53.compat import sglang_version
from sglang_glm53.memory import hicache, self_test

pytestmark = pytest.mark.skipif(
    sglang_version() != "0.5.23", reason="attaches the tree with 0.5.23's own names"
)
PAGES = 20
MEMORY = SimpleNamespace(
    hicache_ratio=4.0,
    hicache_size=0,
    hicache_mem_layout="layer_first",
    hicache_storage_backend=None,
    hicache_storage_prefetch_policy="best_effort",
    hicache_write_policy="write_through",
    hicache_io_backend="direct",
    hicache_host_memory_mode="cache",
)


class Tree:
    """A tree over one arena; contents are random bytes, known by their tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler as assembler
        import sglang.srt.mem_cache.unified_radix_cache as tree
        import sglang.srt.runtime_context as context
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        told = SimpleNamespace(extra_metric_labels=None, served_model_name="m")
        for module in (context, tree, assembler):
            for name, value in (
                ("get_memory", MEMORY),
                ("get_observability", told),
                ("get_serving", told),
            ):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, lambda value=value: value)
        monkeypatch.setattr(assembler, "_STRATEGIES", list(assembler._STRATEGIES))
        hicache._register(assembler.register_stack_strategy)
        attach = assembler.attach_hybrid_pool_to_unified_cache
        attach = getattr(attach, "__wrapped__", attach)
        monkeypatch.setattr(
            assembler, "attach_hybrid_pool_to_unified_cache", hicache._then_try_it(attach)
        )
        self.target = make_pool(PAGES, torch.float32, layers=3, skip=SKIP)
        self.draft = make_pool(PAGES, torch.float32, layers=1)
        self.arena = self.target.share.arena
        self.allocator = PagedTokenToKVPoolAllocator(
            (PAGES - 1) * PAGE, PAGE, torch.float32, "cpu", self.target, False
        )
        requests = SimpleNamespace(
            req_to_token=torch.zeros(4, PAGES * PAGE, dtype=torch.int32), device="cpu", size=3
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            mtp_draft_device_pools=(self.draft,),
        )
        self.cache = tree.UnifiedRadixCache(params)
        self.cache.init_hicache(None, params)
        self.random = torch.Generator().manual_seed(1)
        self.content: dict[int, torch.Tensor] = {}  # first token of a page -> its bytes

    def key(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens), None)

    def match(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))

    def finish(self, tokens: list[int]) -> None:
        """A request of these tokens ends: its pages are written and go into the tree."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        found = self.match(tokens)
        prefix = self.cache.path_device_indices(found.last_device_node)
        missing = len(tokens) - prefix.numel()
        if missing > self.allocator.available_size():
            # As a running request's, the prefix stays where it is.
            lock = self.cache.inc_lock_ref(found.last_device_node)
            self.evict(missing)
            self.cache.dec_lock_ref(found.last_device_node, lock.to_dec_params())
        slots = self.allocator.alloc(missing)
        assert slots is not None
        for first, page in zip(tokens[prefix.numel() :: PAGE], slots[::PAGE] // PAGE, strict=True):
            content = torch.randint(
                0, 256, (self.arena.layout.page_bytes,), dtype=torch.uint8, generator=self.random
            )
            # The same tokens have the same content, whoever writes it.
            self.arena.pages[page] = self.content.setdefault(first, content)
        value = torch.cat([prefix, slots])
        self.cache.insert(
            InsertParams(key=self.key(tokens), value=value, prev_prefix_len=prefix.numel())
        )
        self.cache.check_hicache_events()

    def evict(self, count: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=count))

    def load(self, tokens: list[int]) -> int:
        """What a request with these tokens does before its prefill; tokens from the host."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        found = self.match(tokens)
        request = SimpleNamespace(
            rid="r",
            kv=SimpleNamespace(mamba_pool_idx=None),
            last_node=found.last_device_node,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
        )
        loaded, _ = self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=found.best_match_node,
                host_hit_length=found.host_hit_length,
                req=request,
            )
        )
        self.cache.ready_to_load_host_cache()
        self.cache.check_hicache_events()
        return loaded

    def check(self, tokens: list[int]) -> None:
        """The device holds each page of these tokens as it was written."""
        found = self.match(tokens)
        assert found.device_prefix_len == len(tokens)
        slots = self.cache.path_device_indices(found.last_device_node)
        assert slots.numel() == len(tokens)
        for first, slot in zip(tokens[::PAGE], slots[::PAGE].tolist(), strict=True):
            assert torch.equal(self.arena.pages[slot // PAGE], self.content[first])


@pytest.fixture
def tree(served_with, monkeypatch: pytest.MonkeyPatch) -> Tree:  # noqa: F811
    served_with(**EAGLE)
    return Tree(monkeypatch)


def tokens_of(request: int, pages: int) -> list[int]:
    return list(range(10_000 * request, 10_000 * request + pages * PAGE))


def test_it_is_tried_before_it_serves(tree: Tree) -> None:
    assert self_test.wanted()
    group = tree.cache.host_pool_group
    assert len(group.entries) == 1 and group.available_size() == group.size
    assert tree.allocator.available_size() == (PAGES - 1) * PAGE


def test_what_was_evicted_comes_back(tree: Tree) -> None:
    tokens = tokens_of(1, 5)
    tree.finish(tokens)
    tree.check(tokens)
    tree.evict(len(tokens))
    assert tree.match(tokens).device_prefix_len == 0
    tree.arena.memory.zero_()
    assert tree.load(tokens) == len(tokens)
    tree.check(tokens)


def test_many_requests_through_a_small_device(tree: Tree) -> None:
    """Shared prefixes, more than the device holds, in a random order; then all pages are free."""
    pick = torch.Generator().manual_seed(2)
    stem = tokens_of(0, 3)
    known = [stem + tokens_of(number, 4) for number in range(1, 7)] + [tokens_of(9, 6)]
    for tokens in known:
        tree.load(tokens)
        tree.finish(tokens)
    from_host = 0
    for _ in range(25):
        tokens = known[int(torch.randint(len(known), (1,), generator=pick))]
        short = len(tokens) - tree.match(tokens).device_prefix_len
        if tree.allocator.available_size() < short:
            tree.evict(short)
        from_host += tree.load(tokens)
        tree.check(tokens)
    assert from_host > 10 * PAGE
    tree.evict(PAGES * PAGE)
    assert tree.allocator.available_size() == (PAGES - 1) * PAGE
