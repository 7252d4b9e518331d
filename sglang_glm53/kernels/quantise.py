"""The piece of a kernel that quantises: called by the kernels beside it (Triton).

Its twin is `fp8.quantise_groups`.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl


@triton.jit
def to_fp8(value, AXIS: tl.constexpr, SMALLEST_AMAX: tl.constexpr, LARGEST: tl.constexpr):
    """A tile in fp32, groups along AXIS: their values within e4m3's range, and a scale each."""
    amax = tl.maximum(tl.max(tl.abs(value), axis=AXIS), SMALLEST_AMAX)
    scale = amax / LARGEST
    value = value * tl.expand_dims(1.0 / scale, AXIS)
    return tl.minimum(tl.maximum(value, -LARGEST), LARGEST), scale


def sanitizer_cases() -> list[tuple[str, Callable[[], object]]]:
    """No kernel of its own: those that call it have theirs."""
    return []
