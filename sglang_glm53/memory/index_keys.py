"""The index keys of the full indexer layers, paged, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache

from sglang_glm53.memory.page import IndexPage
from sglang_glm53.memory.quantise import quantise_index_key

if TYPE_CHECKING:
    from sglang_glm53.memory.pool import GlmTokenToKVPool


class GlmIndexKeyCache(IndexKeyCache):
    """Index keys, paged, in either layout (see page.py).

    `buffer[layer]` is [pages, 8448] uint8 or [pages, 8192] fp32; [0, …] on layers that reuse the
    selection of the layer above. In a page-major pool it is a view that steps by a whole page.
    """

    def __init__(self, pool: GlmTokenToKVPool, index_buf_size: int) -> None:
        self.page = IndexPage(exact=pool.exact, page_size=pool.index_page_size)
        if pool.share is None:
            super().__init__(pool, index_buf_size)
            return
        self.pool = pool
        share, dtype = pool.share, pool.index_k_with_scale_buffer_dtype
        self.buffer = [
            share.arena.index_keys(share.first + layer, dtype) for layer in range(share.count)
        ]

    def _buffer_shape(self, num_pages: int) -> tuple[int, int]:
        itemsize = self.pool.index_k_with_scale_buffer_dtype.itemsize
        return num_pages, self.page.page_bytes // itemsize

    def keys(self, layer: int) -> torch.Tensor:
        """Keys of local layer `layer` as [pages, 64, 128], fp32 or FP8 bytes (uint8); a view."""
        buffer = self._kernel_view(self.buffer[layer])
        size, dim = self.page.page_size, self.page.head_dim
        return buffer.as_strided((buffer.shape[0], size, dim), (buffer.stride(0), dim, 1))

    def scales(self, layer: int) -> torch.Tensor | None:
        """Scales of local layer `layer` as fp32 [pages, 64] (a view); None in the exact layout."""
        if self.page.exact:
            return None
        buffer = self._kernel_view(self.buffer[layer])
        return buffer[:, self.page.scales_start :].view(torch.float32)

    def store(self, layer: int, loc: torch.Tensor, key: torch.Tensor) -> None:
        """Write keys ([tokens, 128]) to slots `loc` ([tokens]) of local layer `layer`."""
        loc = loc.long()
        page, offset = loc // self.page.page_size, loc % self.page.page_size
        keys, scales = self.keys(layer), self.scales(layer)
        if scales is None:
            keys[page, offset] = key.to(torch.float32)
            return
        fp8, scale = quantise_index_key(key)
        keys[page, offset] = fp8.view(torch.uint8)
        scales[page, offset] = scale

    def get_k_and_scale(
        self,
        layer_id: int,
        seq_len_tensor: torch.Tensor,
        page_indices: torch.Tensor,
        seq_len_sum: int,
        max_seq_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys (uint8 [tokens, 128]) and scales (uint8 [tokens, 4]) of some requests' tokens,
        one after the other, by SGLang's kernel."""
        if self.pool.share is not None:
            # The kernel steps from page to page by the buffer's width, in the page numbers' dtype:
            # in 32 bits a page of 3.4 MB goes up to number 622.
            page_indices = page_indices.long()
        return super().get_k_and_scale(
            layer_id, seq_len_tensor, page_indices, seq_len_sum, max_seq_len
        )

    def get_buffer(self, layer_id: int) -> torch.Tensor:
        """What `get_k_and_scale` reads: page p begins at p times the buffer's width."""
        buffer = self.get_local_buffer(layer_id)
        if self.pool.share is None:
            return buffer
        step = buffer.stride(0)
        return buffer.as_strided((1, step), (step, 1))

    def move(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the keys of tokens at `src_loc` to `tgt_loc`, token by token, in every layer."""
        if tgt_loc.numel() == 0:
            return
        target, source = tgt_loc.reshape(-1).long(), src_loc.reshape(-1).long()
        size = self.page.page_size
        to = (target // size, target % size)
        origin = (source // size, source % size)
        for layer, buffer in enumerate(self.buffer):
            if buffer.shape[0] == 0:
                continue
            keys, scales = self.keys(layer), self.scales(layer)
            keys[to] = keys[origin]
            if scales is not None:
                scales[to] = scales[origin]

    def cpu_copy(self, indices: torch.Tensor) -> list[list[torch.Tensor]]:
        """Copies of the pages that hold slots `indices`, a list of chunks a layer, on the host."""
        pages = self._pages_of(indices)
        return [
            [buffer[chunk].cpu() for chunk in pages] if buffer.shape[0] else []
            for buffer in self.buffer
        ]

    def load_cpu_copy(self, index_k_cpu: list[list[torch.Tensor]], indices: torch.Tensor) -> None:
        """Write what `cpu_copy` returned into the pages that hold slots `indices`."""
        pages = self._pages_of(indices)
        for buffer, chunks in zip(self.buffer, index_k_cpu, strict=True):
            if buffer.shape[0] == 0:
                continue
            for chunk, saved in zip(pages, chunks, strict=True):
                buffer[chunk] = saved.to(buffer.device)

    def _pages_of(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Requests own whole pages, and their slots come in order.
        pages = indices[:: self.pool.page_size].long() // self.pool.page_size
        return pages.split(max(1, self.pool.cpu_offloading_chunk_size // self.pool.page_size))
