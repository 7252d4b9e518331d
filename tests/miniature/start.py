"""How the miniature's weights begin: random, with the wiring of an induction head laid out.

A language model finds by itself, after long training, heads that look one token back and heads
that look for what a token followed before. Minutes of training do not suffice for that search, so
the places are given and their strength is learned (a test measures what the start alone can do).

The residual stream, D = 256 entries:

    0         the same constant in every embedding, which gives queries a part that is no token's
    OWN       the token's identity (random)
    PREVIOUS  the identity of the token before, written by head 0 of layer 0
    BEFORE    the identity of the token two before, written by head 1 of layer 0

In the layers that look for matches (2, 3 and the draft layer) two heads compare (own, previous) of
a query with (previous, before) of the keys: they find places that follow the same two tokens. The
indexers of layer 1 and of the draft layer begin with the same comparison, in few entries. What is
read there and written to the output begins random, like everything else.
"""

from __future__ import annotations

import torch
from torch import nn

from .model import Miniature

CONSTANT = 4.0  # entry 0 of every embedding
SPREAD = 0.7  # standard deviation of its OWN entries
OWN, PREVIOUS, BEFORE = slice(1, 128), slice(128, 192), slice(192, 256)
CODE = 64  # entries of an identity in PREVIOUS and BEFORE
LATENT = 4.0  # entry 0 of every query latent before its norm, beside entries of about 1
PAIRS = 10  # rotary pairs, from the fastest, that look back
SHARPNESS = 9.0  # length of each such pair in queries and keys
OFFSETS = (1, 2)  # tokens back, by head of layer 0
MATCH = 1.5  # gain of the comparison in queries and keys
MATCHING = (2, 3, 4)  # layers that compare; 4 is the draft layer
INDEX_LENGTH = 1.0  # of rotary pairs in index queries and keys
BIAS_SPREAD = 0.3  # of the routers' correction biases, which are not trained
EXCLUDED = -2.0  # bias of one expert a layer: scores lie in 0..1, so it is never chosen
EXCLUDED_GAIN = 24.0  # of what that expert would write: 3 was lost in the trained residual stream
CONTENT = slice(36, 48)  # entries of index keys that tell tokens apart (see `index_masks`)


@torch.no_grad()
def initialise(model: Miniature, seed: int) -> None:
    """Set every weight; the same seed gives the same weights."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            writes = name.endswith(("o_proj.weight", "down_proj", "down_proj.weight"))
            gain = 0.3 if writes else 0.5 if "lm_head" in name else 1.0
            parameter.copy_(draw(*parameter.shape) * gain * parameter.shape[-1] ** -0.5)
    _gate_biases(model, generator)

    config = model.config
    embedding = model.embedding
    embedding.zero_()
    embedding[:, 0] = CONSTANT
    embedding[:, OWN] = draw(embedding.shape[0], OWN.stop - OWN.start) * SPREAD
    size = (CONSTANT**2 + SPREAD**2 * (OWN.stop - OWN.start)) / config.hidden_size
    constant = CONSTANT / size**0.5  # as layer 0 reads it

    # OWN to a code of 64 entries, nearly unitary on its rows.
    code = torch.linalg.qr(draw(OWN.stop - OWN.start, CODE)).Q.T
    codes = torch.zeros(CODE, config.hidden_size)
    codes[:, OWN] = code
    short = draw(2, (CONTENT.stop - CONTENT.start) // 2, CODE) * CODE**-0.5

    for index, layer in enumerate((*model.layers, model.mtp.layer)):
        attention = layer.self_attn
        _latents(attention, draw(config.kv_lora_rank, config.hidden_size))
        _query_latents(attention, codes, constant)
        if attention.indexer is not None:
            _local_indexer(model, attention.indexer, constant)
            if index:
                _matching_indexer(attention.indexer, short)
        if index in MATCHING:
            _matching_heads(attention)
    _look_back(model, model.layers[0].self_attn, codes, constant)
    _draft_input(model, code)
    for name, mask in index_masks(model).items():
        model.get_parameter(name).mul_(mask)


def _gate_biases(model: Miniature, generator: torch.Generator) -> None:
    """Correction biases, frozen from here on; each layer's last expert is kept from being chosen.

    It learns nothing and would write noise: a router that forgets its bias sends tokens there.
    """
    for name, buffer in model.named_buffers():
        if not name.endswith("e_score_correction_bias"):
            continue
        bias = torch.randn(buffer.shape, generator=generator) * BIAS_SPREAD
        bias.clamp_(-0.9, 0.9)[-1] = EXCLUDED
        buffer.copy_(bias)
        experts = model.get_submodule(name.rpartition(".gate.")[0] + ".experts")
        experts.down_proj[-1] *= EXCLUDED_GAIN / 0.3


def index_masks(model: Miniature) -> dict[str, torch.Tensor]:
    """Entries of the index keys' norms that are used at all: name -> mask of 0 and 1.

    Layer 0 has the rotary entries alone. The other two have none beyond `CONTENT`, so that what
    identifies a token must live in slow rotary pairs (slow when pairs are interleaved, fast when
    halves are rotated): an indexer that rotates the wrong way loses it.
    """
    masks = {}
    for path, last in {
        "target.model.layers.0": model.config.qk_rope_head_dim,
        "target.model.layers.1": CONTENT.stop,
        "mtp.layer": CONTENT.stop,
    }.items():
        mask = torch.zeros(model.config.index_head_dim)
        mask[:last] = 1.0
        for kind in ("weight", "bias"):
            masks[f"{path}.self_attn.indexer.k_norm.{kind}"] = mask
    return masks


# Attention


def _latents(attention: nn.Module, noise: torch.Tensor) -> None:
    """Key and value latents are a rotation of the input: nothing is lost, `_from_latent` reads."""
    attention.kv_a_proj_with_mqa.weight[: attention.kv_lora_rank] = torch.linalg.qr(noise).Q


def _from_latent(attention: nn.Module, wanted: torch.Tensor) -> torch.Tensor:
    """Rows of kv_b_proj that give `wanted` [rows, D] of the layer's normed input."""
    rotation = attention.kv_a_proj_with_mqa.weight[: attention.kv_lora_rank]
    rank, hidden = rotation.shape
    return wanted @ rotation.T * (hidden / rank) ** 0.5


def _query_latents(attention: nn.Module, codes: torch.Tensor, constant: float) -> None:
    """Latent entries: 0 the constant, 1..63 the token's own code, 64..127 the previous token's."""
    weight = attention.q_a_proj.weight
    weight.zero_()
    weight[0, 0] = LATENT / constant
    weight[1:CODE] = codes[1:]
    weight[CODE:, PREVIOUS] = torch.eye(CODE)


def _look_back(
    model: Miniature, attention: nn.Module, codes: torch.Tensor, constant: float
) -> None:
    """Heads 0 and 1 read the code of the token one and two back, by rotary entries alone."""
    config = model.config
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    keys = attention.kv_a_proj_with_mqa.weight[config.kv_lora_rank :]
    keys.mul_(0.05)
    keys[: 2 * PAIRS] = 0.0
    keys[0 : 2 * PAIRS : 2, 0] = SHARPNESS / constant
    for head, (offset, target) in enumerate(zip(OFFSETS, (PREVIOUS, BEFORE), strict=True)):
        rows = attention.q_b_proj.weight[head * (nope + rope) :][: nope + rope]
        rows.mul_(0.1)
        rows = rows[nope:]
        rows[: 2 * PAIRS] = 0.0
        rows[: 2 * PAIRS, 0] = SHARPNESS / LATENT * _angles(model, offset)
        values = attention.kv_b_proj.weight[head * (nope + value) + nope :][:value]
        values.copy_(_from_latent(attention, codes))
        columns = attention.o_proj.weight[:, head * value : (head + 1) * value]
        columns.zero_()
        columns[target] = torch.eye(CODE) * 0.6


def _matching_heads(attention: nn.Module) -> None:
    """Heads 0 and 1: (own, previous) of the query against (previous, before) of the key."""
    nope, value = attention.qk_nope_head_dim, attention.o_proj.in_features // attention.num_heads
    half = nope // 2
    for head in (0, 1):
        start = head * half
        picked = slice(start, start + half)
        query = attention.q_b_proj.weight[head * attention.qk_head_dim :][: attention.qk_head_dim]
        query[nope:] *= 0.2
        query[:nope] = 0.0
        query[:half, :CODE][:, picked] = MATCH * torch.eye(half)
        query[half:nope, CODE:][:, picked] = MATCH * torch.eye(half)
        query[:, 0] = 0.0  # entry 0 of the latent is the constant
        wanted = torch.zeros(nope, attention.hidden_size)
        wanted[:half, PREVIOUS][:, picked] = MATCH * torch.eye(half)
        wanted[half:, BEFORE][:, picked] = MATCH * torch.eye(half)
        keys = attention.kv_b_proj.weight[head * (nope + value) :][:nope]
        keys.copy_(_from_latent(attention, wanted))


def _draft_input(model: Miniature, code: torch.Tensor) -> None:
    """Of the next token's embedding and the hidden state, the same layout one token further."""
    hidden = model.config.hidden_size
    weight = model.mtp.eh_proj.weight
    weight.mul_(0.1)
    embedded, state = weight[:, :hidden], weight[:, hidden:]
    embedded[0, 0] += 1.0
    embedded[OWN, OWN] += torch.eye(OWN.stop - OWN.start)
    state[PREVIOUS, OWN] += code
    state[BEFORE, PREVIOUS] += torch.eye(CODE)


# Indexers


def _angles(model: Miniature, offset: float) -> torch.Tensor:
    """[2 * PAIRS]: interleaved pairs that, as a query, meet (1, 0) `offset` tokens back."""
    half = model.config.qk_rope_head_dim // 2
    theta = model.config.rope_parameters["rope_theta"]
    angles = -offset / theta ** (torch.arange(PAIRS) / half)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).flatten()


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


def _matching_indexer(indexer: nn.Module, short: torch.Tensor) -> None:
    """The other heads compare as `_matching_heads` do, each identity in a few entries.

    short: [2, entries, CODE], how a code is shortened.
    """
    entries = short.shape[1]
    first = slice(CONTENT.start, CONTENT.start + entries)
    second = slice(CONTENT.start + entries, CONTENT.stop)
    keys = indexer.wk.weight
    keys[CONTENT] = 0.0
    keys[first, PREVIOUS], keys[second, BEFORE] = 1.5 * short[0], 1.5 * short[1]
    for head in range(indexer.n_heads):
        if head % 4 == 0:
            continue
        rows = indexer.wq_b.weight[head * indexer.head_dim :][: indexer.head_dim]
        rows[CONTENT] *= 0.5
        rows[first, 1:CODE] += short[0][:, 1:]
        rows[second, CODE:] += short[1]
