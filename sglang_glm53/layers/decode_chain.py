"""The fused chain of a decode, verify or draft step: where it runs, and rows in FP8.

A step has a handful of rows, and each launch of its 36 a layer costs more than the bytes that it
moves. In the fused chain a norm quantises its own output, and what follows takes the FP8 rows: they
travel with the bf16 tensor as an attribute, so that whatever stands between a norm and its reader
either hands both on or, where it makes a new tensor, loses the FP8 form, and the reader quantises
again. The unfused chain is the same function.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from sglang_glm53.errors import Glm53Error
from sglang_glm53.kernels.fp8 import GROUP, MOST_ROWS

if TYPE_CHECKING:
    from sglang_glm53.kernels.few_rows import FewRows

WISH = "GLM53_DECODE"
FUSED, UNFUSED = "fused", "unfused"
DEFAULT = UNFUSED  # until it is measured

Rows = tuple[torch.Tensor, torch.Tensor]  # e4m3 [T, D] and fp32 scales [T, D / 128]

_ATTRIBUTE = "glm53_fp8"

# [out, in] -> (tile, split) of the products that our kernel does faster than DeepGEMM. None yet.
SETTINGS: dict[tuple[int, int], tuple[int, int]] = {}


@functools.lru_cache(maxsize=1)
def wished() -> bool:
    """Whether the fused chain is asked for.

    Raises:
        Glm53Error: GLM53_DECODE is neither "fused" nor "unfused".
    """
    wish = os.environ.get(WISH, DEFAULT)
    if wish not in (FUSED, UNFUSED):
        raise Glm53Error(f"{WISH}={wish}: use {FUSED} or {UNFUSED}, or leave it out")
    return wish == FUSED


def fuses(x: torch.Tensor) -> bool:
    """Whether rows of this shape, dtype and device go through the fused chain."""
    return (
        wished()
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and x.dim() == 2
        and 0 < x.shape[0] <= MOST_ROWS
        and x.shape[1] % GROUP == 0
        and x.is_contiguous()
        and _capability() == (9, 0)
    )


def attach(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`x`, with its FP8 form."""
    setattr(x, _ATTRIBUTE, rows)
    return x


def attached(x: torch.Tensor) -> Rows | None:
    """The FP8 form that a norm left with `x`."""
    return getattr(x, _ATTRIBUTE, None)


def is_block_fp8(layer: nn.Module) -> bool:
    """Whether a linear layer of SGLang's has e4m3 weights in blocks of 128 x 128."""
    scale = getattr(layer, "weight_scale_inv", None)
    if scale is None or layer.weight.dtype != torch.float8_e4m3fn:
        return False
    blocks = tuple(-(-size // GROUP) for size in layer.weight.shape)
    return scale.dtype == torch.float32 and tuple(scale.shape) == blocks


def product(layer: nn.Module, rows: Rows) -> torch.Tensor:
    """A linear layer with block-FP8 weights on quantised rows: [T, out] bf16, a partial sum where
    the layer's are."""
    setting = SETTINGS.get(tuple(layer.weight.shape))
    if setting is None:
        return layer(rows)[0]
    tile, split = setting
    few = _few_rows(rows[0].device)
    return few.matmul(rows, layer.weight, layer.weight_scale_inv, tile=tile, split=split)


@functools.cache
def _few_rows(device: torch.device) -> FewRows:
    from sglang_glm53.kernels.few_rows import FewRows

    return FewRows(device)


@functools.lru_cache(maxsize=1)
def _capability() -> tuple[int, int] | None:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()
