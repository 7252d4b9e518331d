"""The host's copy of page-major pages, for SGLang's hierarchical cache (HiCache).

One entry a page: latents, index keys and the draft's layer in one piece, so that none can be left
behind. A page is written to the host in one copy. It is loaded back in a few, a run of whole layers
each (`PageLayout.ranges`): prefill starts when the first layers are there, and waits for the next
while it computes, as with SGLang's own layer by layer.

What copies: with `--hicache-io-backend kernel` a kernel (page numbers stay on the GPU), with
`direct` the GPU's copy engines (kernels/page_copy.py); without a GPU, torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

from sglang_glm53.errors import Glm53Error
from sglang_glm53.kernels import page_copy

if TYPE_CHECKING:
    from sglang_glm53.memory.pool import GlmTokenToKVPool

# Copies that a page is loaded back in. More let prefill start earlier; each costs one descriptor.
LOAD_GROUPS = 8
GROUPS_VARIABLE = "GLM53_LOAD_GROUPS"


def load_groups() -> int:
    """How many copies a page is loaded back in: GLM53_LOAD_GROUPS, or the default.

    Raises:
        Glm53Error: the variable is no positive number.
    """
    value = os.environ.get(GROUPS_VARIABLE, str(LOAD_GROUPS))
    if not value.isdecimal() or int(value) < 1:
        raise Glm53Error(f'{GROUPS_VARIABLE} is "{value}"; it must be 1 or more')
    return int(value)


class PageHostPool(HostKVCache):
    """Pinned host memory for whole pages of one arena.

    `kv_buffer` is [pages, page_bytes] uint8. Slots are allocated by the base class, 64 a page.
    """

    stores_page_envelope = True

    def __init__(
        self,
        device_pool: GlmTokenToKVPool,
        *,
        host_to_device_ratio: float,
        host_size: float,
        layout: str,
        allocator_type: str = "default",
        groups: int | None = None,
    ) -> None:
        """Room for `host_size` GB, or for `host_to_device_ratio` times the device's tokens.

        Raises:
            ValueError: there is not as much host memory.
        """
        assert device_pool.share is not None and not device_pool.share.is_draft
        self.device_pool = device_pool
        self.arena = device_pool.share.arena
        self.page = self.arena.layout
        self.storage_format_tag = self.page.tag
        self.ranges = self.page.ranges(load_groups() if groups is None else groups)
        self._range_of_layer = {first: (start, end) for first, start, end in self.ranges}
        self.layer_num = self.page.layers
        self.target_layer_num = self.page.target_layers
        on_a_cpu = self.arena.memory.device.type == "cpu"
        super().__init__(
            dtype=torch.uint8,
            device_capacity_tokens=device_pool.size,
            size_per_token=-(-self.page.page_bytes // self.page.page_size),
            start_layer=device_pool.start_layer,
            end_layer=device_pool.end_layer,
            host_to_device_ratio=host_to_device_ratio,
            host_size=host_size,
            page_size=self.page.page_size,
            layout=layout,
            pin_memory=not on_a_cpu,
            device="cpu",
            allocator_type=allocator_type,
        )

    def get_size_per_token(self) -> int:
        """Bytes that a token takes."""
        return self.size_per_token

    get_ksize_per_token = get_size_per_token

    def _allocate_host_buffer(self) -> None:
        if self.pin_memory:
            super()._allocate_host_buffer()
            return
        # Without a GPU the cache is a miniature's, and SGLang's reserve of 10 GiB would refuse it.
        self.kv_buffer, self.fd = self.init_kv_buffer(), None

    def init_kv_buffer(self) -> torch.Tensor:
        """The host memory, registered with CUDA where there is a GPU."""
        allocate = ALLOC_MEMORY_FUNCS[self.arena.memory.device.type]
        return allocate(
            (self.page_num, self.page.page_bytes),
            dtype=torch.uint8,
            device=self.device,
            pin_memory=self.pin_memory,
            allocator=self.allocator,
            # It is registered in chunks, and a copy must not reach from one into the next.
            registration_granularity_bytes=self.page.page_bytes,
        )

    # Between host and device. SGLang gives slots, whole pages of them in order.

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """Copy pages to the host, each in one piece."""
        pages = self._pages(host_indices), self._pages(device_indices)
        self._copy(self.kv_buffer, self.arena.pages, *pages, 0, self.page.page_bytes, io_backend)

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        """Copy to the device what a layer begins: its run of layers, or nothing inside a run.

        The draft's layers come with the last run, before the last layer of the target is done.
        """
        part = self._range_of_layer.get(layer_id)
        if part is None or is_draft:
            return
        pages = self._pages(device_indices), self._pages(host_indices)
        self._copy(self.arena.pages, self.kv_buffer, *pages, *part, io_backend)

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        if slots.numel() % self.page.page_size:
            raise ValueError(f"{slots.numel()} slots are no whole pages")
        return slots[:: self.page.page_size] // self.page.page_size

    def _copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        target_pages: torch.Tensor,
        source_pages: torch.Tensor,
        start: int,
        end: int,
        io_backend: str,
    ) -> None:
        arguments = (target, source, target_pages, source_pages, start, end)
        if self.arena.memory.device.type == "cpu":
            page_copy.copy_pages_torch(*arguments)
        elif io_backend == "kernel":
            page_copy.copy_pages(*arguments)
        elif io_backend == "direct":
            stream = torch.cuda.current_stream(self.arena.memory.device).cuda_stream
            page_copy.copy_engine().copy(*arguments, stream=stream)
        else:
            raise Glm53Error(
                f"--hicache-io-backend {io_backend}: pages are copied by kernel or direct"
            )

    # One page at a time, for storage behind the host

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """The page that holds slot `index`: uint8 [page_bytes], or [1, page_bytes]; a view."""
        page = self.kv_buffer[int(index) // self.page.page_size]
        return page if flat else page.unsqueeze(0)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """An empty page to read into."""
        return torch.zeros(self.page.page_bytes, dtype=torch.uint8, pin_memory=self.pin_memory)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Write the page that holds slot `index`."""
        page = self.kv_buffer[int(index) // self.page.page_size]
        page.copy_(data_page.view(torch.uint8).reshape(-1))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the pages of some slots."""
        first = self.kv_buffer.data_ptr()
        pages = [first + page * self.page.page_bytes for page in self._pages(indices).tolist()]
        return pages, [self.page.page_bytes] * len(pages)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """The memory that storage may register."""
        return [self.kv_buffer]

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        """Whether each page begins at a multiple of that."""
        places = self.kv_buffer.data_ptr(), self.page.page_bytes
        return all(place % page_size_bytes == 0 for place in places)
