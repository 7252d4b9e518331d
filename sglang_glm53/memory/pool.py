"""The KV cache of GLM-5.3: latents of every layer, index keys of the full indexer layers.

SGLang asks the platform for a pool class (`get_kv_pool_cls`) and builds it with the arguments of
its own `DSATokenToKVPool`. Ours stores the same bytes where the cache is bf16 (see page.py), and
adds an exact layout for `--dtype float32`, which makes a server comparable with a reference
implementation to fp32 accuracy. All reads and writes that the torch attention backend needs are
plain torch here, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from sglang_glm53.memory.page import EXACT, REAL, IndexPage

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

FP8_MAX = 448.0
# Below this the largest value of a key counts as this much, as in SGLang's own writer.
SMALLEST_AMAX = 1e-4


def quantise_index_key(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 form of index keys: key = fp8 * scale, scale = max(largest |value|, 1e-4) / 448.

    Args:
        key: [tokens, 128], any float dtype.

    Returns:
        fp8 (float8_e4m3fn, [tokens, 128]) and scale (fp32, [tokens]).
    """
    key = key.float()
    scale = key.abs().amax(dim=-1).clamp_min(SMALLEST_AMAX) / FP8_MAX
    scaled = key * (1.0 / scale).unsqueeze(-1)
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def fp8_values(stored: torch.Tensor) -> torch.Tensor:
    """The values of FP8 (e4m3) bytes, fp32 of the same shape; exact.

    torch converts FP8 one value at a time on a CPU; this is about ten times faster. A byte's
    exponent and mantissa are put where fp32 has its own, which gives the value times 2 ** -120 (the
    difference of the exponents' offsets), subnormals included. NaN (0x7f), which nothing here
    stores, would read as 480.

    Args:
        stored: uint8, any shape.
    """
    bits = stored.view(torch.int8).to(torch.int32)
    # The sign was extended to the left by the line above: keep it, and the seven bits below 27.
    bits = bits.bitwise_left_shift_(20).bitwise_and_(0x87F00000 - (1 << 32))
    return bits.view(torch.float32).mul_(2.0**120)


class GlmIndexKeyCache(IndexKeyCache):
    """Index keys, paged, in either layout.

    `buffer[layer]` is [pages, 8448] uint8 or [pages, 8192] fp32; [0, …] on layers that reuse the
    selection of the layer above.
    """

    def __init__(self, pool: GlmTokenToKVPool, index_buf_size: int) -> None:
        self.page = IndexPage(exact=pool.exact, page_size=pool.index_page_size)
        super().__init__(pool, index_buf_size)

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


class GlmTokenToKVPool(DSATokenToKVPool):
    """SGLang's DSA pool with plain-torch reads and writes and an exact fp32 layout.

    The constructor is SGLang's. The cache dtype decides the layout: SGLang passes fp32 exactly
    when the server runs with `--dtype float32` and no other `--kv-cache-dtype`.
    """

    def __init__(self, *args: Any, dtype: torch.dtype, **kwargs: Any) -> None:
        self.exact = dtype == torch.float32
        if self.exact:
            # The index cache takes its dtype from here while the base class builds it.
            self.index_k_with_scale_buffer_dtype = torch.float32
        super().__init__(*args, dtype=dtype, **kwargs)

    @property
    def layout(self) -> str:
        """`exact-fp32` or `bf16+fp8-index`; another latent dtype is named in place of bf16."""
        if self.exact:
            return EXACT
        if self.dtype == torch.bfloat16:
            return REAL
        return f"{str(self.dtype).removeprefix('torch.')}+fp8-index"

    def _create_index_key_cache(self) -> GlmIndexKeyCache:
        return GlmIndexKeyCache(self, self.index_buf_size)

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
            keys fp32 [n * 64, 128] (in the exact layout a view of the cache where `pages` is a
            slice: do not write to it), and scales fp32 [n * 64] to multiply the keys with, or
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

    def _wait_for_layer(self, layer_id: int) -> None:
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)

    # Latents

    def _write_mla_kv_buffer(
        self,
        dst_buffer: torch.Tensor,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
    ) -> None:
        if dst_buffer.is_cuda and not self.exact:
            super()._write_mla_kv_buffer(dst_buffer, loc, cache_k_nope, cache_k_rope)
            return
        row = torch.cat(
            [
                cache_k_nope.reshape(-1, 1, self.kv_lora_rank).to(self.dtype),
                cache_k_rope.reshape(-1, 1, self.qk_rope_head_dim).to(self.dtype),
            ],
            dim=-1,
        )
        dst_buffer.index_copy_(0, loc.long(), row)

    def get_mla_kv_buffer(
        self,
        layer: RadixAttention,
        loc: torch.Tensor,
        dst_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [n, 1, kv_lora_rank] and rope keys [n, 1, qk_rope_head_dim] of slots `loc`."""
        buffer = self.get_key_buffer(layer.layer_id)
        if buffer.is_cuda and not self.exact:
            return super().get_mla_kv_buffer(layer, loc, dst_dtype)
        rows = buffer.index_select(0, loc.long()).to(dst_dtype or self.dtype)
        return rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :]

    def read_latents(
        self, layer: RadixAttention, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `get_mla_kv_buffer` in ``dtype``; FP8 latents (four scales a token) dequantised."""
        if not self.dsa_kv_cache_store_fp8:
            return self.get_mla_kv_buffer(layer, slots, dtype)
        from sglang.kernels.ops.attention.dsa.dequant_k_cache import dequantize_k_cache_paged_dsa

        rows = dequantize_k_cache_paged_dsa(self.get_key_buffer(layer.layer_id), slots).to(dtype)
        latents = rows[..., : self.kv_lora_rank].contiguous()
        return latents, rows[..., self.kv_lora_rank :]

    # Host copies of retracted requests. SGLang's versions call torch.cuda without asking.

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> dict[str, Any]:
        """Copies of a request's cache on the host; `indices` are its slots in order."""
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
        if torch.device(self.device).type == "cuda":
            super().load_cpu_copy(kv_cache_cpu_dict, indices, mamba_indices, req_pool_index)
            return
        chunks = indices.long().split(self.cpu_offloading_chunk_size)
        for buffer, saved in zip(self.kv_buffer, kv_cache_cpu_dict["kv"], strict=True):
            for chunk, rows in zip(chunks, saved, strict=True):
                buffer[chunk] = rows
        self.index_key_cache.load_cpu_copy(kv_cache_cpu_dict["index_k"], indices)


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
