"""The edges between attention, FFN and the residual stream, declared to SGLang's layer boundary.

A layer declares two stages. Attention and FFN return partial sums over their tensor-parallel
ranks; the boundary completes a sum where the next stage reads it, together with the residual add
and the RMSNorm, and moves rows when attention and FFN hold different ones (attention DP).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.layer_boundary import append_stages, declare_attn, declare_ffn
from torch import nn

from sglang_glm53.config import Glm53Config


def declare_layer(config: Glm53Config, layer_id: int, *, is_nextn: bool = False) -> tuple[Any, Any]:
    """The attention and FFN stage of a layer, from the configuration alone.

    Pipeline ranks call it for layers that they do not hold, so it must not need the layer.
    """
    following = layer_id + 1
    return (
        declare_attn(),
        declare_ffn(
            sparse=is_nextn or config.is_sparse(layer_id),
            next_layer_sparse=config.is_sparse(following),
        ),
    )


def append_layer(
    config: Glm53Config,
    layer_id: int,
    *,
    input_layernorm: nn.Module,
    post_attention_layernorm: nn.Module,
    qkv_latent_func: Callable[..., torch.Tensor],
    is_nextn: bool = False,
) -> tuple[Any, Any]:
    """Append a layer's stages to the open stack; returns ``(attn_boundary, ffn_boundary)``.

    ``qkv_latent_func(hidden_states, forward_batch)`` is the first projection of attention: the
    boundary owns the call, so that it may gather rows after the narrow projection instead of
    before it.
    """
    attn, ffn = declare_layer(config, layer_id, is_nextn=is_nextn)
    return append_stages(
        (attn, input_layernorm, {"qkv_latent_func": qkv_latent_func}),
        (ffn, post_attention_layernorm),
    )
