"""The KV cache of GLM-5.3: latents of every layer, index keys of the full indexer layers.

SGLang asks the platform for a pool class (`get_kv_pool_cls`) and builds it with the arguments of
its own `DSATokenToKVPool`. Ours stores the same bytes where the cache is bf16 or FP8 (see page.py),
and adds an exact layout for `--dtype float32`, which makes a server comparable with a reference
implementation to fp32 accuracy. All reads and writes that the torch attention backend needs are
plain torch here, on any device.

The pages lie layer-major, as SGLang's, or page-major (mode.py): then `share` is this pool's part of
an arena, and the buffers that SGLang's kernels are given are views of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from sglang_glm53.memory import arena, mode
from sglang_glm53.memory.arena import Arena, Share
from sglang_glm53.memory.index_keys import GlmIndexKeyCache
from sglang_glm53.memory.page import EXACT, REAL, IndexPage, PageLayout
from sglang_glm53.memory.quantise import dequantise_latents, fp8_values, quantise_latents

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

logger = logging.getLogger(__name__)


class GlmTokenToKVPool(DSATokenToKVPool):
    """SGLang's DSA pool with plain-torch reads and writes, an exact layout and page-major pages.

    The constructor is SGLang's. The cache dtype decides the layout: SGLang passes fp32 exactly
    when the server runs with `--dtype float32` and no other `--kv-cache-dtype`.

    Attributes:
        mode: how the pages lie, and why.
        share: this pool's layers of an arena; None where the pages lie layer-major.
        exact: whether everything is fp32.
    """

    def __init__(
        self,
        size: int,
        *args: Any,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: str,
        kv_cache_dim: int,
        skip_topk_layers: list[bool] | None = None,
        page_alignment: int = 1,
        **kwargs: Any,
    ) -> None:
        self.exact = dtype == torch.float32
        if self.exact:
            # The index cache takes its dtype from here while the base class builds it.
            self.index_k_with_scale_buffer_dtype = torch.float32
        read = mode.published()
        self.mode = mode.choose(read, torch.device(device).type)
        self.share: Share | None = None
        if self.mode.page_major:
            full = [not skips for skips in skip_topk_layers or [False] * layer_num]
            self._plan = PageLayout(
                row_bytes=kv_cache_dim * dtype.itemsize,
                index=IndexPage(exact=self.exact, page_size=page_size),
                full=tuple(full),
                alignment=page_alignment,
            )
            self._draft_layers = mode.draft_layers_in_page(read)
        super().__init__(
            size,
            *args,
            page_size=page_size,
            dtype=dtype,
            layer_num=layer_num,
            device=device,
            kv_cache_dim=kv_cache_dim,
            skip_topk_layers=skip_topk_layers,
            **kwargs,
        )
        logger.info("KV pool of %d layers: %s", layer_num, self.pages_in_words)

    @property
    def layout(self) -> str:
        """`exact-fp32` or `bf16+fp8-index`; another latent dtype is named in place of bf16."""
        if self.exact:
            return EXACT
        if self.dtype == torch.bfloat16:
            return REAL
        return f"{str(self.dtype).removeprefix('torch.')}+fp8-index"

    @property
    def pages_in_words(self) -> str:
        """How the pages lie, for people."""
        if self.share is None:
            return str(self.mode)
        page = self.share.arena.layout
        draft = ", the draft's layer inside" if page.draft_layers else ""
        return f"{self.mode}, {page.page_bytes:,} B a page in one piece{draft}"

    # Buffers. The base class calls these while it is constructed.

    def _create_buffers(self) -> None:
        if not self.mode.page_major:
            super()._create_buffers()
            return
        count = -(-(self.size + self.page_size) // self.page_size)
        self.share = arena.claim(self._plan, count, self.device)
        if self.share is None:
            own = PageLayout(
                self._plan.row_bytes,
                self._plan.index,
                self._plan.full,
                self._draft_layers,
                self._plan.alignment,
            )
            with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
                with (
                    torch.cuda.use_mem_pool(self.custom_mem_pool)
                    if self.custom_mem_pool
                    else contextlib.nullcontext()
                ):
                    memory = Arena.allocate(own, count, self.device)
            self.share = Share(memory, 0, self.layer_num)
            arena.offer(memory)
        self.kv_buffer = [
            self.share.arena.latents(self.share.first + layer, self.store_dtype)
            for layer in range(self.layer_num)
        ]

    def _create_index_key_cache(self) -> GlmIndexKeyCache:
        return GlmIndexKeyCache(self, self.index_buf_size)

    def _clear_buffers(self) -> None:
        super()._clear_buffers()
        self.share = None

    # Index keys

    def set_index_k(self, layer_id: int, loc: torch.Tensor, key: torch.Tensor) -> None:
        """Store index keys.

        Args:
            layer_id: a full indexer layer.
            loc: slots, [tokens].
            key: [tokens, 128], RoPE applied.
        """
        self.index_key_cache.store(layer_id - self.start_layer, loc, key)

    def get_index_k(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """Index keys of cache slots ([n]) as fp32 [n, 128], dequantised."""
        self._wait_for_layer(layer_id)
        cache, layer = self.index_key_cache, layer_id - self.start_layer
        slots = slots.long()
        page, offset = slots // cache.page.page_size, slots % cache.page.page_size
        keys, scales = cache.keys(layer), cache.scales(layer)
        if scales is None:
            return keys[page, offset]
        return fp8_values(keys[page, offset]).mul_(scales[page, offset].unsqueeze(-1))

    def get_index_pages(
        self, layer_id: int, pages: torch.Tensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Index keys of whole pages, in order, with the scales left apart.

        Args:
            layer_id: a full indexer layer.
            pages: page numbers ([n]), or a slice of pages that lie next to each other.

        Returns:
            keys fp32 [n * 64, 128] (in the exact layout it may be a view of the cache where `pages`
            is a slice: do not write to it), and scales fp32 [n * 64] to multiply the keys with, or
            None.
        """
        self._wait_for_layer(layer_id)
        cache, layer = self.index_key_cache, layer_id - self.start_layer
        keys, scales = cache.keys(layer), cache.scales(layer)
        keys = keys[pages] if isinstance(pages, slice) else keys.index_select(0, pages)
        if scales is None:
            return keys.reshape(-1, cache.page.head_dim), None
        scales = scales[pages] if isinstance(pages, slice) else scales.index_select(0, pages)
        return fp8_values(keys).view(-1, cache.page.head_dim), scales.reshape(-1)

    def store_with(
        self,
        store: Callable[[torch.Tensor, torch.Tensor], None],
        layer_id: int,
        slots: torch.Tensor,
    ) -> None:
        """Let one of SGLang's kernels write index keys, one a token, to cache slots.

        Args:
            store: called with a buffer ([pages, 8448] uint8, contiguous) and slots in it.
            slots: [tokens], int64.
        """
        if self.share is None:
            store(self.get_index_k_with_scale_buffer(layer_id=layer_id), slots)
            return
        from sglang_glm53.kernels.page_rows import scatter_index, scatter_index_torch

        # The kernel wants contiguous pages: it writes to some of its own, which are then spread.
        page, tokens = self.index_key_cache.page, slots.shape[0]
        staged = torch.empty(
            (-(-tokens // page.page_size), page.page_bytes), dtype=torch.uint8, device=slots.device
        )
        store(staged, torch.arange(tokens, device=slots.device))
        memory, layout = self.share.arena.memory, self.share.arena.layout
        start = layout.index_offset(self.share.first + layer_id - self.start_layer)
        spread = scatter_index if slots.is_cuda else scatter_index_torch
        spread(memory, layout.page_bytes, start, slots, staged)

    def _wait_for_layer(self, layer_id: int) -> None:
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)

    # Latents. `kv_buffer[layer]` is [tokens, 1, values], or [pages, 64, 1, values] page-major.

    def latent_rows(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """Latents and rope keys of slots ([n]): fp32 [n, kv_lora_rank + qk_rope_head_dim]."""
        self._wait_for_layer(layer_id)
        rows = self._rows(self.kv_buffer[layer_id - self.start_layer], slots)
        if self.dsa_kv_cache_store_fp8:
            return dequantise_latents(rows, self.kv_lora_rank)
        return rows.float()

    def _rows(self, buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Cache rows of slots ([n]) as stored: [n, values], FP8 rows as bytes."""
        if self.share is None:
            return buffer.flatten(1).index_select(0, slots)
        slots = slots.long()
        return buffer[slots // self.page_size, slots % self.page_size].flatten(1)

    def latent_pages(self, layer_id: int) -> torch.Tensor:
        """The bytes of a layer's latents: uint8 [pages, 64, row bytes], a view in either mode."""
        buffer = self.kv_buffer[layer_id - self.start_layer].view(torch.uint8)
        if self.share is not None:
            return buffer.squeeze(2)
        return buffer.view(-1, self.page_size, buffer.shape[-1])

    def set_kv_buffer(
        self,
        layer: RadixAttention,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        """Write latent and rope key in one row a token ([tokens, 1, values]); `cache_v` is part of
        them."""
        if self.share is None:
            super().set_kv_buffer(layer, loc_info, cache_k, cache_v, layer_id_override)
            return
        parts = cache_k.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        self.set_mla_kv_buffer(layer, loc_info, *parts, layer_id_override)

    def _write_mla_kv_buffer(
        self,
        dst_buffer: torch.Tensor,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
    ) -> None:
        if self.share is None and dst_buffer.is_cuda and not self.exact:
            super()._write_mla_kv_buffer(dst_buffer, loc, cache_k_nope, cache_k_rope)
            return
        if self.dsa_kv_cache_store_fp8 or (self.share is not None and dst_buffer.is_cuda):
            self._write_rows(dst_buffer, loc, self._stored(cache_k_nope, cache_k_rope))
            return
        row = torch.cat(
            [
                cache_k_nope.reshape(-1, 1, self.kv_lora_rank).to(self.dtype),
                cache_k_rope.reshape(-1, 1, self.qk_rope_head_dim).to(self.dtype),
            ],
            dim=-1,
        )
        loc = loc.long()
        if self.share is None:
            dst_buffer.index_copy_(0, loc, row)
        else:
            dst_buffer[loc // self.page_size, loc % self.page_size] = row

    def _stored(self, latents: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The bytes of cache rows, uint8 [tokens, …]: the latents', and the rope keys'."""
        latents = latents.reshape(-1, 1, self.kv_lora_rank)
        rope = rope.reshape(-1, 1, self.qk_rope_head_dim)
        if not self.dsa_kv_cache_store_fp8:
            parts = (part.to(self.dtype).contiguous() for part in (latents, rope))
            return tuple(part.flatten(1).view(torch.uint8) for part in parts)
        if not latents.is_cuda:
            return quantise_latents(latents, rope)
        from sglang.srt.mem_cache.memory_pool import quantize_k_cache_separate

        return tuple(part.flatten(1) for part in quantize_k_cache_separate(latents, rope))

    def _write_rows(
        self, buffer: torch.Tensor, loc: torch.Tensor, parts: tuple[torch.Tensor, ...]
    ) -> None:
        if self.share is None:
            row = torch.cat(parts, dim=1).unsqueeze(1).view(self.store_dtype)
            buffer.index_copy_(0, loc.long(), row)
            return
        from sglang_glm53.kernels.page_rows import scatter_rows, scatter_rows_torch

        memory = self.share.arena.memory
        start = buffer.storage_offset() * buffer.element_size()
        scatter = scatter_rows if buffer.is_cuda else scatter_rows_torch
        scatter(memory, self.share.arena.layout.page_bytes, start, loc, parts)

    def get_mla_kv_buffer(
        self,
        layer: RadixAttention,
        loc: torch.Tensor,
        dst_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [n, 1, kv_lora_rank] and rope keys [n, 1, qk_rope_head_dim] of slots `loc`."""
        buffer = self.get_key_buffer(layer.layer_id)
        if self.share is None and buffer.is_cuda and not self.exact:
            return super().get_mla_kv_buffer(layer, loc, dst_dtype)
        rows = self._rows(buffer, loc).to(dst_dtype or self.dtype).unsqueeze(1)
        return rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :]

    def read_latents(
        self, layer: RadixAttention, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `get_mla_kv_buffer` in ``dtype``; FP8 latents (four scales a token) dequantised."""
        if not self.dsa_kv_cache_store_fp8:
            return self.get_mla_kv_buffer(layer, slots, dtype)
        buffer = self.get_key_buffer(layer.layer_id)
        if buffer.is_cuda:
            from sglang.kernels.ops.attention.dsa.dequant_k_cache import (
                dequantize_k_cache_paged_dsa,
            )

            if self.share is not None:  # the kernel steps from token to token by one stride
                stored = self._rows(buffer.view(torch.uint8), slots)
                slots = torch.arange(stored.shape[0], dtype=torch.int32, device=stored.device)
                buffer = stored.unsqueeze(1).view(self.dtype)
            rows = dequantize_k_cache_paged_dsa(buffer, slots).to(dtype)
        else:
            rows = self.latent_rows(layer.layer_id, slots).to(dtype).unsqueeze(1)
        latents = rows[..., : self.kv_lora_rank].contiguous()
        return latents, rows[..., self.kv_lora_rank :]

    # What SGLang moves, copies and counts

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy tokens at `src_loc` to `tgt_loc` in every layer: latents and index keys."""
        if self.share is None:
            super().move_kv_cache(tgt_loc, src_loc)
            return
        if tgt_loc.numel() == 0:
            return
        target, source = tgt_loc.reshape(-1).long(), src_loc.reshape(-1).long()
        to = (target // self.page_size, target % self.page_size)
        origin = (source // self.page_size, source % self.page_size)
        for buffer in self.kv_buffer:
            buffer[to] = buffer[origin]
        self.index_key_cache.move(tgt_loc, src_loc)

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> dict[str, Any]:
        """Copies of a request's cache on the host; `indices` are its slots in order.

        Page-major: its whole pages, with what the draft keeps in them.
        """
        if self.share is not None:
            pages = self.share.arena.pages
            chunks = self.index_key_cache._pages_of(indices)
            return {"pages": [pages[chunk].cpu() for chunk in chunks]}
        # SGLang's version calls torch.cuda without asking.
        if torch.device(self.device).type == "cuda":
            return super().get_cpu_copy(indices, mamba_indices, req_pool_index)
        chunks = indices.long().split(self.cpu_offloading_chunk_size)
        return {
            "kv": [[buffer[chunk] for chunk in chunks] for buffer in self.kv_buffer],
            "index_k": self.index_key_cache.cpu_copy(indices),
        }

    def load_cpu_copy(
        self,
        kv_cache_cpu_dict: dict[str, Any],
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Write what `get_cpu_copy` returned to the slots `indices`."""
        if self.share is not None:
            pages = self.share.arena.pages
            chunks = self.index_key_cache._pages_of(indices)
            for chunk, saved in zip(chunks, kv_cache_cpu_dict["pages"], strict=True):
                pages[chunk] = saved.to(pages.device)
            return
        if torch.device(self.device).type == "cuda":
            super().load_cpu_copy(kv_cache_cpu_dict, indices, mamba_indices, req_pool_index)
            return
        chunks = indices.long().split(self.cpu_offloading_chunk_size)
        for buffer, saved in zip(self.kv_buffer, kv_cache_cpu_dict["kv"], strict=True):
            for chunk, rows in zip(chunks, saved, strict=True):
                buffer[chunk] = rows
        self.index_key_cache.load_cpu_copy(kv_cache_cpu_dict["index_k"], indices)

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """All bytes of this pool in some pages ([n]): uint8 [n, bytes], layer by layer."""
        return torch.cat([piece[pages] for piece in self._pieces()], dim=1)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        """Write what `read_pages` returns."""
        start = 0
        for piece in self._pieces():
            piece[pages] = content[:, start : start + piece.shape[1]]
            start += piece.shape[1]

    def _pieces(self) -> list[torch.Tensor]:
        """Every piece as [pages, bytes] uint8, views: latents, then index keys, a layer."""
        pieces = []
        for buffer, keys in zip(self.kv_buffer, self.index_key_cache.buffer, strict=True):
            pages = buffer.shape[0] if self.share else buffer.shape[0] // self.page_size
            rows = buffer.reshape(pages, -1) if self.share is None else buffer.flatten(1)
            pieces.append(rows.view(torch.uint8))
            if keys.shape[0]:
                pieces.append(keys.view(torch.uint8))
        return pieces

    def get_kv_size_bytes(self) -> int:
        """Bytes of this pool; of an arena, those of its layers."""
        return super().get_kv_size_bytes() if self.share is None else self.share.nbytes

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, sizes and bytes a page of what is sent between servers: the arena, once."""
        if self.share is None:
            return super().get_contiguous_buf_infos()
        if self.share.is_draft:
            return [], [], []
        memory = self.share.arena.memory
        return [memory.data_ptr()], [memory.nbytes], [self.share.arena.layout.page_bytes]

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """The same of what is sent beside: nothing, where index keys lie in the arena."""
        return super().get_state_buf_infos() if self.share is None else ([], [], [])

    def host_pool_decls(self) -> tuple[Any, ...]:
        """The host pools that HiCache keeps: of page-major pages one, which holds all of them."""
        decls = super().host_pool_decls()
        return decls if self.share is None else decls[:1]


def count_exact_index_bytes(stock: Callable[..., int]) -> Callable[..., int]:
    """Wrap SGLang's count of index-cache bytes a token, so that it knows the exact layout.

    SGLang sizes the pool by bytes a token. It counts fp32 latents rightly (it multiplies by the
    cache dtype's size) but always counts 132 bytes for an index key, where the exact layout
    takes 512.

    Args:
        stock: `DefaultPoolConfigurator._compute_dsa_indexer_cell_size` (same name and keyword-only
            parameters `kvc`, `num_layers`, `allocate_all_layers` in 0.5.22 and 0.5.23).

    Returns:
        The function to put in its place: (self, *, kvc, num_layers, allocate_all_layers=False) ->
        bytes a token. It changes nothing unless `kvc` will build a `GlmTokenToKVPool` with an
        fp32 cache.
    """

    def compute(self: Any, *, kvc: Any, num_layers: int, **kwargs: Any) -> int:
        size = stock(self, kvc=kvc, num_layers=num_layers, **kwargs)
        if kvc.kv_cache_dtype != torch.float32 or not builds_our_pool():
            return size
        real, exact = IndexPage(exact=False), IndexPage(exact=True)
        return size * exact.token_bytes // real.token_bytes

    compute.__wrapped__ = stock  # type: ignore[attr-defined]
    return compute


def builds_our_pool() -> bool:
    """Whether SGLang will build its DSA pool from our class in this process."""
    from sglang.srt.platforms import current_platform

    return current_platform.get_kv_pool_cls(kind="dsa") is GlmTokenToKVPool
