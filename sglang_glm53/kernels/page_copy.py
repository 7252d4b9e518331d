"""Copies of whole pages, or of the same run of bytes of each, between two arenas of pages.

One of the two may be pinned host memory that the GPU reaches by its address. Two ways:

* `copy_pages`, a Triton kernel: takes page numbers that are on the GPU, so nothing waits for them;
  it occupies multiprocessors while it runs.
* `CopyEngine`, the GPU's copy engines: one call for all pages (cudaMemcpyBatchAsync, CUDA 12.8),
  one descriptor a page; wants the page numbers on the host.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from sglang_glm53.errors import Glm53Error

WORD = 4
BLOCK = 4096  # words that one program copies


@triton.jit
def _copy_pages(
    target,
    source,
    target_pages,
    source_pages,
    page_words,
    start,
    words,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    to = tl.load(target_pages + number).to(tl.int64) * page_words + start
    origin = tl.load(source_pages + number).to(tl.int64) * page_words + start
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    tl.store(target + to + word, tl.load(source + origin + word, mask=inside), mask=inside)


def copy_pages(
    target: torch.Tensor,
    source: torch.Tensor,
    target_pages: torch.Tensor,
    source_pages: torch.Tensor,
    start: int = 0,
    end: int | None = None,
) -> None:
    """Copy bytes start..end of each page.

    Args:
        target, source: uint8 [pages, page_bytes], contiguous; page_bytes, start and end are
            multiples of 4.
        target_pages, source_pages: page numbers, [n] each, on the GPU.
    """
    if target_pages.numel() == 0:
        return
    words = ((target.shape[1] if end is None else end) - start) // WORD
    _copy_pages[(target_pages.numel(), triton.cdiv(words, BLOCK))](
        target.view(torch.int32),
        source.view(torch.int32),
        target_pages,
        source_pages,
        target.shape[1] // WORD,
        start // WORD,
        words,
        BLOCK=BLOCK,
        num_warps=8,
    )


def copy_pages_torch(
    target: torch.Tensor,
    source: torch.Tensor,
    target_pages: torch.Tensor,
    source_pages: torch.Tensor,
    start: int = 0,
    end: int | None = None,
) -> None:
    """`copy_pages` in plain torch, for two arenas on one device."""
    part = slice(start, end)
    target[target_pages.long(), part] = source[source_pages.long(), part]


def descriptors(
    target: int,
    source: int,
    page_bytes: int,
    target_pages: torch.Tensor,
    source_pages: torch.Tensor,
    start: int,
    end: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a batch of copies is told: (target addresses, source addresses, bytes), uint64 each.

    One copy a page, also where pages lie next to each other: host memory is registered with CUDA in
    chunks of whole pages, and a copy must not reach from one chunk into the next.

    Args:
        target, source: addresses of the arenas' first bytes.
        target_pages, source_pages: page numbers, [n] each, on the host.
    """
    to, origin = (pages.numpy().astype(np.uint64) for pages in (target_pages, source_pages))
    step, offset = np.uint64(page_bytes), np.uint64(start)
    return (
        np.uint64(target) + to * step + offset,
        np.uint64(source) + origin * step + offset,
        np.full(to.shape, end - start, dtype=np.uint64),
    )


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):  # cudaMemcpyAttributes
    _fields_ = [
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    ]


_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_DEFAULT = 4  # cudaMemcpyDefault: the addresses tell the direction


class CopyEngine:
    """Batches of copies on a CUDA stream, through the CUDA runtime that torch loaded."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        version = ctypes.c_int()
        self._check(runtime.cudaRuntimeGetVersion(ctypes.byref(version)))
        self.version = version.value
        self.batched = self.version >= 12080 and hasattr(runtime, "cudaMemcpyBatchAsync")

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        target_pages: torch.Tensor,
        source_pages: torch.Tensor,
        start: int = 0,
        end: int | None = None,
        *,
        stream: int,
    ) -> int:
        """As `copy_pages`, with the page numbers on the host, on a CUDA stream (its handle).

        Returns:
            How many copies were issued.

        Raises:
            Glm53Error: the CUDA runtime refuses.
        """
        if target_pages.numel() == 0:
            return 0
        end = target.shape[1] if end is None else end
        to, origin, length = descriptors(
            target.data_ptr(),
            source.data_ptr(),
            target.shape[1],
            target_pages,
            source_pages,
            start,
            end,
        )
        # The batch call takes no legacy default stream.
        if self.batched and stream != 0:
            self._batch(to, origin, length, stream)
        else:
            call = self.runtime.cudaMemcpyAsync
            for a, b, n in zip(to.tolist(), origin.tolist(), length.tolist(), strict=True):
                self._check(
                    call(
                        ctypes.c_void_p(a),
                        ctypes.c_void_p(b),
                        ctypes.c_size_t(n),
                        _DEFAULT,
                        ctypes.c_void_p(stream),
                    )
                )
        return to.size

    def _batch(self, to: np.ndarray, origin: np.ndarray, length: np.ndarray, stream: int) -> None:
        attributes = _Attributes(order=_STREAM_ORDER)
        first = ctypes.c_size_t(0)  # the attributes hold from the first copy on
        arguments = [
            to.ctypes.data_as(ctypes.c_void_p),
            origin.ctypes.data_as(ctypes.c_void_p),
            length.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(to.size),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if self.version < 13000:  # CUDA 13 no longer tells which copy failed
            failed = ctypes.c_size_t(0)
            arguments.append(ctypes.byref(failed))
        self._check(self.runtime.cudaMemcpyBatchAsync(*arguments, ctypes.c_void_p(stream)))

    def _check(self, code: int) -> None:
        if code:
            self.runtime.cudaGetErrorString.restype = ctypes.c_char_p
            text = self.runtime.cudaGetErrorString(code)
            raise Glm53Error(
                f"copying cache pages: the CUDA runtime says {text.decode()} (code {code})"
            )


@functools.cache
def copy_engine() -> CopyEngine:
    """The engine of this process.

    Raises:
        Glm53Error: torch's CUDA runtime library is not loaded.
    """
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return CopyEngine(ctypes.CDLL(f"libcudart.so.{major}"))
    except OSError as error:
        raise Glm53Error(
            f"copying cache pages: libcudart.so.{major} does not load ({error}); use "
            "--hicache-io-backend kernel"
        ) from error


def sanitizer_cases() -> list[tuple[str, Callable[[], object]]]:
    """Launches for compute-sanitizer: whole pages, and a run of bytes of each."""
    source, target = (torch.ones(4, 50432, dtype=torch.uint8, device="cuda") for _ in range(2))
    to, origin = (torch.tensor(pages, device="cuda") for pages in ([3, 0], [1, 3]))
    return [
        ("whole pages", functools.partial(copy_pages, target, source, to, origin)),
        ("a run", functools.partial(copy_pages, target, source, to, origin, 41984, 50432)),
    ]
