"""Triton's interpreter, with casts that round to the nearest value as a GPU's do.

Import before Triton. The interpreter of Triton 3.x cuts off what does not fit into bf16 or FP8.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

_cut_off = interpreter._convert_float
NARROW = {"bf16": (torch.bfloat16, torch.int16), "fp8e4nv": (torch.float8_e4m3fn, torch.uint8)}


def _rounded(values: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
    if str(source) != "fp32" or str(target) not in NARROW:
        return _cut_off(values, source, target, mode)
    kind, bits = NARROW[str(target)]
    wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    narrow = wide.to(kind).view(bits).numpy()
    return narrow.view(np.uint16 if bits is torch.int16 else np.uint8).reshape(values.shape)


interpreter._convert_float = _rounded
_dot = interpreter.InterpreterBuilder.create_dot


def _float_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter keeps bf16 as integers and would multiply those."""
    return _dot(self, *(_widened(part) for part in (a, b)), *rest)


def _widened(handle: Any) -> Any:
    if str(handle.dtype.scalar) != "bf16":
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)


interpreter.InterpreterBuilder.create_dot = _float_dot
