"""What the machine is, and how fast its memory is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
from typing import Any

from sglang_glm53.errors import Glm53Error

# name in the result: distributions that hold it
VERSIONS = {
    "sglang": ("sglang",),
    "torch": ("torch",),
    "triton": ("triton",),
    "sglang-kernel": ("sglang-kernel", "sgl-kernel"),
    "deep_gemm": ("sgl-deep-gemm", "deep-gemm"),
    "flash_mla": ("sgl-flash-mla", "flash-mla"),
    "flashinfer": ("flashinfer-python",),
    "transformers": ("transformers",),
}
COPY_BYTES = 4 << 30
COPIES = 20


def measure(job: dict[str, Any], result: Any) -> None:
    """Job `machine`: `device`, "cuda" or "cpu".

    Raises:
        Glm53Error: torch finds no GPU.
    """
    import torch

    if job["device"] == "cuda" and not torch.cuda.is_available():
        raise Glm53Error(
            "torch finds no GPU on this machine (torch.cuda.is_available() is false); "
            "run this where SGLang can serve on a GPU"
        )
    result.save(machine=machine(job["device"]), versions=versions())
    result.save(bandwidth=bandwidth(job["device"]))


def machine(device: str) -> dict[str, Any]:
    """GPU, its memory and driver; CPU count and host memory."""
    import torch

    found: dict[str, Any] = {
        "host_cpus": len(os.sched_getaffinity(0)),
        "host_memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        ),
        "system": platform.platform(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        found.update(
            gpu=properties.name,
            gpu_memory_gib=round(total / 2**30, 2),
            gpu_memory_free_gib=round(free / 2**30, 2),
            gpus=torch.cuda.device_count(),
            compute_capability=f"{properties.major}.{properties.minor}",
            cuda=torch.version.cuda,
            driver=_driver(),
        )
    else:
        found.update(gpu=None, gpu_memory_gib=found["host_memory_gib"])
    return found


def versions() -> dict[str, str | None]:
    """Versions of what serves, by name; None where it is not installed."""
    from sglang_glm53 import __version__

    found = {name: _version(names) for name, names in VERSIONS.items()}
    return {"sglang_glm53": __version__, **found, "python": platform.python_version()}


def bandwidth(device: str) -> dict[str, Any]:
    """Bytes a second of a large copy on the device: read and written, the median of several."""
    import time

    import torch

    size = COPY_BYTES if device == "cuda" else COPY_BYTES >> 5
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    seconds = []
    for _ in range(COPIES):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return {
        "bytes_per_second": 2 * size / median,
        "method": f"copy of {size >> 20} MiB on the device, read and written, median of {COPIES}",
        "raw_seconds": seconds,
    }


def _version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None
