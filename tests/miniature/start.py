"""How the miniature's weights begin.

Random, with two things given that a language model finds by itself only after long training:
every embedding carries the same constant, and with it the heads of layer 0 look one and two tokens
back by their rotary entries alone. Everything else is learned.
"""

from __future__ import annotations

import torch
from torch import nn

from .model import Miniature

CONSTANT = 4.0  # entry 0 of every embedding, beside entries of standard deviation SPREAD
SPREAD = 0.5
LATENT = 4.0  # entry 0 of every query latent before its norm, beside entries of about 1
PAIRS = 10  # rotary pairs, from the fastest, that look back
SHARPNESS = 9.0  # length of each such pair in queries and keys
OFFSETS = (1, 2, 1, 2)  # tokens back, by head of layer 0
INDEX_LENGTH = 1.0  # the same in index queries and keys
BIAS_SPREAD = 0.3  # of the routers' correction biases, which are not trained
CONTENT = (0, 48)  # entries of index keys that layer 1 and the draft layer use (see `index_masks`)


@torch.no_grad()
def initialise(model: Miniature, seed: int) -> None:
    """Set every weight; the same seed gives the same weights."""
    generator = torch.Generator().manual_seed(seed)

    def draw(parameter: torch.Tensor, spread: float) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)

    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif "embed_tokens" in name:
            draw(parameter, SPREAD)
            parameter[:, 0] = CONSTANT
        else:
            gain = 0.5 if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")) else 1.0
            gain = 0.5 if "lm_head" in name else gain
            draw(parameter, gain * parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            draw(buffer, BIAS_SPREAD)
    hidden = model.config.hidden_size
    eh_proj = model.mtp.eh_proj.weight
    eh_proj.mul_(0.3)
    eh_proj[:, :hidden] += torch.eye(hidden)
    constant = CONSTANT / (SPREAD**2 + CONSTANT**2 / hidden) ** 0.5  # as layer 0 reads it
    for layer in (*model.layers, model.mtp.layer):
        _constant_latent(layer.self_attn, constant)
        if layer.self_attn.indexer is not None:
            _local_indexer(model, layer.self_attn.indexer, constant)
    _look_back(model, model.layers[0].self_attn, constant)
    for name, mask in index_masks(model).items():
        model.get_parameter(name).mul_(mask)


def index_masks(model: Miniature) -> dict[str, torch.Tensor]:
    """Entries of the index keys' norms that are used at all: name -> mask of 0 and 1.

    Layer 0 has the rotary entries alone. The other two have no entries beyond `CONTENT`, so that
    what identifies a token must live in slow rotary pairs (36..47: slow when pairs are interleaved,
    fast when halves are rotated): an indexer that rotates the wrong way loses it.
    """
    masks = {}
    for name, (first, last) in {"0": (0, 64), "1": CONTENT, "mtp": CONTENT}.items():
        path = "mtp.layer" if name == "mtp" else f"target.model.layers.{name}"
        for kind in ("weight", "bias"):
            mask = torch.zeros(model.config.index_head_dim)
            mask[first:last] = 1.0
            masks[f"{path}.self_attn.indexer.k_norm.{kind}"] = mask
    return masks


def _constant_latent(attention: nn.Module, constant: float) -> None:
    """Entry 0 of the query latent is the same for all tokens."""
    attention.q_a_proj.weight[:, 0] = 0.0
    attention.q_a_proj.weight[0] = 0.0
    attention.q_a_proj.weight[0, 0] = LATENT / constant


def _angles(model: Miniature, offset: float) -> torch.Tensor:
    """[2 * PAIRS]: interleaved pairs that, as a query, meet (1, 0) `offset` tokens back."""
    half = model.config.qk_rope_head_dim // 2
    theta = model.config.rope_parameters["rope_theta"]
    angles = -offset / theta ** (torch.arange(PAIRS) / half)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).flatten()


def _look_back(model: Miniature, attention: nn.Module, constant: float) -> None:
    config = model.config
    nope, wide = config.qk_nope_head_dim, config.qk_nope_head_dim + config.qk_rope_head_dim
    keys = attention.kv_a_proj_with_mqa.weight[config.kv_lora_rank :]
    keys.mul_(0.2)
    keys[: 2 * PAIRS] = 0.0
    keys[0 : 2 * PAIRS : 2, 0] = SHARPNESS / constant
    for head, offset in enumerate(OFFSETS):
        rows = attention.q_b_proj.weight[head * wide + nope : (head + 1) * wide]
        rows.mul_(0.2)
        rows[: 2 * PAIRS] = 0.0
        rows[: 2 * PAIRS, 0] = SHARPNESS / LATENT * _angles(model, offset)


def _local_indexer(model: Miniature, indexer: nn.Module, constant: float) -> None:
    """A quarter of the heads look at the last tokens; all gates begin positive."""
    indexer.wk.weight[: 2 * PAIRS] *= 0.2
    indexer.wk.weight[0 : 2 * PAIRS : 2, 0] = INDEX_LENGTH / constant
    for head in range(0, indexer.n_heads, 4):
        rows = indexer.wq_b.weight[head * indexer.head_dim :][: 2 * PAIRS]
        rows.mul_(0.2)
        rows[:, 0] = INDEX_LENGTH * _angles(model, 1.0)
    indexer.weights_proj.weight.mul_(0.3)
    indexer.weights_proj.weight[:, 0] = 1.0 / constant
