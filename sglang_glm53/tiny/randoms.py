"""Random tensors that are the same bytes on every machine.

Built from integers, whose generator is exact, with additions and one multiplication that round
the same way everywhere; `torch.randn` goes through logarithms, which do not. Each tensor has a
stream of its own, named by the tensor, so that adding one changes no other.
"""

from __future__ import annotations

import zlib
from typing import Any


def _generator(name: str, seed: int) -> Any:
    import torch

    # 32 bits: the CPU generator takes no more of a seed.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def normal(name: str, seed: int, shape: tuple[int, ...]) -> Any:
    """Mean 0, variance 1, close to normal (the sum of four uniforms); float32."""
    import torch

    parts = torch.randint(
        -32768, 32768, (4, *shape), generator=_generator(name, seed), dtype=torch.int32
    )
    # A uniform integer in [-n, n) has variance n^2 / 3.
    return (parts.sum(0, dtype=torch.int32).float() + 2.0) * ((3 / 4) ** 0.5 / 32768)


def signs(name: str, seed: int, count: int) -> Any:
    """-1 or 1; float32 [count]."""
    import torch

    bits = torch.randint(0, 2, (count,), generator=_generator(name, seed), dtype=torch.int32)
    return (bits * 2 - 1).float()


def permutation(name: str, seed: int, count: int) -> list[int]:
    """A permutation of range(count)."""
    import torch

    return torch.randperm(count, generator=_generator(name, seed)).tolist()
