"""Facts of this machine, asked of the driver without creating a context on a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sglang_glm53.ledger import hardware as data

T = TypeVar("T")


def environment() -> Mapping[str, str]:
    return os.environ


def device() -> str:
    """ "cuda" with an NVIDIA driver, "rocm" with AMD's, else "cpu"."""
    if gpus():
        return "cuda"
    return "rocm" if Path("/dev/kfd").exists() else "cpu"


def gpus() -> int | None:
    """NVIDIA GPUs that a server started from here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = _ask(lambda nvml: nvml.nvmlDeviceGetCount())
    if visible is None or there is None:
        return there
    names = [name for part in visible.split(",") if (name := part.strip())]
    if any(name.startswith("MIG") for name in names):  # parts of one GPU count each
        return len(names)
    return min(there, len(names))


def capability() -> tuple[int, int] | None:
    return _ask(lambda nvml: tuple(nvml.nvmlDeviceGetCudaComputeCapability(_first(nvml))))


def gpu_name() -> str | None:
    name = _ask(lambda nvml: nvml.nvmlDeviceGetName(_first(nvml)))
    return name.decode() if isinstance(name, bytes) else name


def gpu_memory_bytes() -> int | None:
    return _ask(lambda nvml: int(nvml.nvmlDeviceGetMemoryInfo(_first(nvml)).total))


def driver_cuda() -> str | None:
    """The newest CUDA version that the driver runs, "13.0"."""
    number = _ask(lambda nvml: nvml.nvmlSystemGetCudaDriverVersion())
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def hardware() -> data.Hardware | None:
    """The ledger's row whose name stands in the GPU's ("NVIDIA H200" is h200)."""
    words = (gpu_name() or "").lower().split()
    return next((data.load(row) for row in data.available() if row in words), None)


def host_memory_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _first(nvml: Any) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(0)


def _ask(question: Callable[[Any], T]) -> T | None:
    """The driver's answer; None where there is no driver, or it does not say."""
    with _driver() as nvml:
        if nvml is None:
            return None
        try:
            return question(nvml)
        except nvml.NVMLError:
            return None


@contextlib.contextmanager
def _driver() -> Iterator[Any]:
    """NVML, as SGLang's environment has it (nvidia-ml-py); None without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library, no driver: each is one way to have no GPU
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
