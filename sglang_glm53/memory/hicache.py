"""How SGLang's hierarchical cache is built over our pool, and tried before it serves.

A page-major pool has a stack of its own (`register_stack_strategy`): one host pool whose entries
are whole pages. A layer-major pool has SGLang's own stack. With either, pages are written to the
host, evicted, loaded back elsewhere and compared before the first request (GLM53_SELFTEST=0 leaves
that out).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_glm53 import catalog
from sglang_glm53.errors import Glm53Error

_STACKS = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler:register_stack_strategy"
_ATTACH = (
    "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler:attach_hybrid_pool_to_unified_cache"
)


def install() -> None:
    """Register the stack, and the test after it was built (rows of the catalog)."""
    catalog.on_load(_STACKS, _register)
    catalog.wrap(_ATTACH, _then_try_it)


def _register(register: Callable[[Any], None]) -> None:
    register(strategy())


def _then_try_it(original: Callable[..., None]) -> Callable[..., None]:
    def attach_hybrid_pool_to_unified_cache(
        cache: Any, params: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(cache, params, *args, **kwargs)
        from sglang_glm53.memory import self_test
        from sglang_glm53.memory.pool import GlmTokenToKVPool

        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        if isinstance(kvcache, GlmTokenToKVPool) and self_test.wanted():
            self_test.run(cache.cache_controller, params)

    return attach_hybrid_pool_to_unified_cache


def draft_pools(params: Any) -> tuple[Any, ...]:
    """The draft's pools that the host must keep. 0.5.22 knows packed ones alone."""
    return (*params.mtp_draft_device_pools, *getattr(params, "sidecar_draft_device_pools", ()))


def check_drafts(pool: Any, params: Any) -> None:
    """Refuse a draft whose cache is not in the target's pages: the host would not keep it.

    Raises:
        Glm53Error: there is one.
    """
    for draft in draft_pools(params):
        share = getattr(draft, "share", None)
        if share is None or share.arena is not pool.share.arena:
            raise Glm53Error(
                "--enable-hierarchical-cache with GLM53_POOL=page: the draft keeps a cache of its "
                "own, which the host's pages do not hold; draft with the checkpoint's MTP layer "
                "and the target's cache dtype, or unset GLM53_POOL"
            )


def build_stack(kvcache: Any, params: Any, memory: Any, **controller: Any) -> tuple[Any, Any]:
    """The host pool of a page-major pool, and the controller that moves its pages.

    Args:
        params: SGLang's CacheInitParams.
        memory: the server's memory arguments (`hicache_*`).
        controller: further arguments of HybridCacheController.

    Returns:
        (HostPoolGroup with one entry, HybridCacheController).

    Raises:
        Glm53Error: a draft with a cache of its own.
        ValueError: not enough host memory.
    """
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
    from sglang.srt.mem_cache.pool_host.common import get_allocator_type

    from sglang_glm53.memory.host_pool import PageHostPool

    check_drafts(kvcache, params)
    host_pool = PageHostPool(
        kvcache,
        host_to_device_ratio=memory.hicache_ratio,
        host_size=memory.hicache_size,
        layout=memory.hicache_mem_layout,
        allocator_type=get_allocator_type() if memory.hicache_storage_backend else "default",
    )
    layers = kvcache.layer_num
    entry = PoolEntry(
        name=PoolName.KV,
        host_pool=host_pool,
        device_pool=kvcache,
        layer_mapper=lambda layer: layer if 0 <= layer < layers else None,
        is_primary_index_anchor=True,
    )
    group = HostPoolGroup([entry])
    return group, HybridCacheController(
        params.token_to_kv_pool_allocator,
        group,
        params.page_size,
        params.tp_cache_group,
        attn_cp_group=params.attn_cp_cache_group,
        attn_tp_group=params.attn_tp_cache_group,
        pp_group=params.pp_cache_group,
        write_policy=memory.hicache_write_policy,
        io_backend=memory.hicache_io_backend,
        transfer_layer_id_max=layers,
        host_memory_mode=memory.hicache_host_memory_mode,
        **controller,
    )


def strategy() -> Any:
    """SGLang's handle on all that: an object of a subclass of its `StackStrategy`."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
        StackBuildResult,
        StackStrategy,
    )
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.runtime_context import get_memory

    class PageMajorStrategy(StackStrategy):
        """Page-major pools: one host pool, an entry a page."""

        def matches(self, kvcache: Any, components: set[Any]) -> bool:
            """Whether `kvcache` is ours with page-major pages."""
            ours = getattr(kvcache, "share", None) is not None
            return ours and components == {ComponentType.FULL}

        def build(
            self,
            *,
            cache: Any,
            kvcache: Any,
            params: Any,
            server_args: Any,
            **controller: Any,
        ) -> Any:
            """Host pool, group and controller; `controller` is what SGLang hands on to it."""
            group, built = build_stack(kvcache, params, get_memory(), **controller)
            return StackBuildResult(
                host_pool_group=group,
                cache_controller=built,
                component_host_pools={ComponentType.FULL: group.anchor_entry.host_pool},
                pools_desc="pages (KV, index keys and the draft in one piece)",
                pool_declarations=kvcache.host_pool_decls(),
            )

    return PageMajorStrategy()
