"""GPUs for which SGLang's arguments can be resolved on a machine that has none of them."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger import hardware


@dataclass(frozen=True)
class Device:
    """What SGLang asks a machine while it resolves its arguments.

    Attributes:
        name: as the driver says it.
        capability: CUDA compute capability; on ROCm the major and minor number of the gfx name.
        memory_bytes: of one GPU, as the driver says it.
        count: GPUs that one server process sees (those of one machine).
        platform: "cuda", "rocm" or "cpu".
        gfx: ROCm's architecture name, "" elsewhere.
        processors: streaming multiprocessors, or compute units.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    count: int = 8
    platform: str = "cuda"
    gfx: str = ""
    processors: int = 132


CPU = Device("CPU", (0, 0), 0, count=0, platform="cpu", processors=0)

# Names as in ledger/data, which has the memory: (driver's name, capability, gfx, SMs or CUs).
# Capabilities: NVIDIA's table of CUDA GPUs. gfx names: LLVM's AMDGPU processor table.
_KINDS: dict[str, tuple[str, tuple[int, int], str, int]] = {
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), "", 132),
    "h200": ("NVIDIA H200", (9, 0), "", 132),
    "b200": ("NVIDIA B200", (10, 0), "", 148),
    "b300": ("NVIDIA B300 SXM6 AC", (10, 3), "", 148),
    "gb300": ("NVIDIA GB300", (10, 3), "", 152),
    "mi300x": ("AMD Instinct MI300X", (9, 4), "gfx942", 304),
    "mi325x": ("AMD Instinct MI325X", (9, 4), "gfx942", 304),
    "mi355x": ("AMD Instinct MI355X", (9, 5), "gfx950", 256),
}


def device(kind: str, count: int = 8) -> Device:
    """The GPU of that name; `cpu` for a machine without one.

    Raises:
        Glm53Error: a name that is not known.
    """
    if kind == "cpu":
        return CPU
    if kind not in _KINDS:
        raise Glm53Error(f"no GPU {kind!r}; use one of {', '.join(kinds())}")
    name, capability, gfx, processors = _KINDS[kind]
    return Device(
        name,
        capability,
        int(hardware.load(kind).memory_bytes.best_known),
        count=count,
        platform="rocm" if gfx else "cuda",
        gfx=gfx,
        processors=processors,
    )


def kinds() -> list[str]:
    """The names that `device` knows."""
    return ["cpu", *_KINDS]
