"""The DSA indexer for training: scores, selections as masks, and its loss.

``score(t, s) = sum_h gate_h(t) * relu(q_h(t) . k(s))``, RoPE on the first 64 of 128 entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

Rope = tuple[torch.Tensor, torch.Tensor]

SCORES_AT_ONCE = 1 << 30  # values of [rows, heads, keys] held at a time on a GPU
SCORES_AT_ONCE_CPU = 1 << 24


@dataclass(frozen=True)
class Selection:
    """How selections are made; every field but `fp8` is a planted fault.

    fp8: queries and keys rounded to e4m3 with one scale a token (and head), as caches store them.
    topk: other size of the selection than the model's.
    neox: RoPE rotates halves in place of interleaved pairs.
    shift: keys are read so many positions off.
    first_set_everywhere: shared layers use layer 0's set.
    gate_bias: False leaves the routers' correction bias out.
    """

    fp8: bool = False
    topk: int | None = None
    neox: bool = False
    shift: int = 0
    first_set_everywhere: bool = False
    gate_bias: bool = True


PLAIN = Selection()


def index_keys(indexer: nn.Module, x: torch.Tensor, rope: Rope, how: Selection = PLAIN):
    """[B, S, D] -> [B, S, 128], normed and rotated."""
    norm = indexer.k_norm
    k = F.linear(x, indexer.wk.weight)
    k = F.layer_norm(k, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    k = _rotate_front(k, rope, indexer.qk_rope_head_dim, how.neox)
    k = _rounded(k) if how.fp8 else k
    return torch.roll(k, how.shift, dims=1) if how.shift else k


def index_queries(indexer: nn.Module, latent: torch.Tensor, rope: Rope, how: Selection = PLAIN):
    """[B, T, q_lora_rank] -> [B, T, heads, 128]; rope: [T, 32], or [B, T, 32] of own positions."""
    q = F.linear(latent, indexer.wq_b.weight).unflatten(-1, (indexer.n_heads, -1))
    rope = tuple(part[..., None, :] for part in rope)
    q = _rotate_front(q, rope, indexer.qk_rope_head_dim, how.neox)
    return _rounded(q) if how.fp8 else q


def index_gates(indexer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """[B, T, D] -> [B, T, heads] fp32, all scales folded in."""
    scale = indexer.n_heads**-0.5 * indexer.head_dim**-0.5
    return F.linear(x.float(), indexer.weights_proj.weight.float()) * scale


def row_scores(q: torch.Tensor, gates: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[B, R, heads, 128], [B, R, heads], [B, S, 128] -> [B, R, S] fp32."""
    batch, rows, heads, _ = q.shape
    products = torch.bmm(q.flatten(1, 2), k.transpose(1, 2)).relu_()
    products = products.unflatten(1, (rows, heads)).flatten(0, 1)
    gates = gates.flatten(0, 1)[:, None]
    if products.is_cuda and products.dtype == torch.bfloat16 and not torch.is_grad_enabled():
        # Reads bf16, adds in fp32: in bf16 sums, near scores would tie.
        weighted = torch.bmm(gates.to(products.dtype), products, out_dtype=torch.float32)
    else:
        weighted = torch.bmm(gates, products.float())
    return weighted.unflatten(0, (batch, rows))[:, :, 0]


@torch.no_grad()
def select(
    indexer: nn.Module,
    x: torch.Tensor,
    latent: torch.Tensor,
    rope: Rope,
    how: Selection = PLAIN,
    layer: int = 0,
) -> torch.Tensor:
    """The selection of every row as a mask, [B, S, S]: 0 where row reads column, else -inf.

    Exact: the `index_topk` largest scores among the visible positions (all of them in the first
    rows).
    """
    batch, length, _ = x.shape
    topk = how.topk or indexer.index_topk
    k = index_keys(indexer, x, rope, how)
    gates = index_gates(indexer, x)
    closed = torch.full((batch, length, length), float("-inf"), dtype=x.dtype, device=x.device)
    positions = torch.arange(length, device=x.device)
    budget = SCORES_AT_ONCE if x.is_cuda else SCORES_AT_ONCE_CPU
    step = max(16, budget // (batch * indexer.n_heads * length))
    for start in range(0, length, step):
        end = min(start + step, length)
        part = tuple(table[start:end] for table in rope)
        q = index_queries(indexer, latent[:, start:end], part, how)
        scores = row_scores(q, gates[:, start:end], k[:, :end])
        hidden = positions[:end] > positions[start:end, None]
        scores.masked_fill_(hidden, float("-inf"))
        chosen = scores.topk(min(topk, end), dim=-1)
        open_at = torch.where(chosen.values.isneginf(), float("-inf"), 0.0).to(x.dtype)
        closed[:, start:end].scatter_(-1, chosen.indices, open_at)
    return closed


def loss(
    indexer: nn.Module,
    inputs: tuple[torch.Tensor, torch.Tensor],
    rope: Rope,
    rows: torch.Tensor,
    attention: torch.Tensor,
) -> torch.Tensor:
    """KL(attention || softmax of the scores) of the rows, in nats, mean.

    inputs: normed hidden states [B, S, D] and query latents [B, S, q_lora_rank], no gradient.
    rows: [B, R] positions; attention: [B, R, S] fp32, rows sum to one.
    """
    x, latent = inputs
    wide = rows[..., None]
    picked = latent.gather(1, wide.expand(-1, -1, latent.shape[-1]))
    own = tuple(table[rows] for table in rope)
    q = index_queries(indexer, picked, own)
    gates = index_gates(indexer, x.gather(1, wide.expand(-1, -1, x.shape[-1])))
    scores = row_scores(q, gates, index_keys(indexer, x, rope))
    hidden = torch.arange(x.shape[1], device=x.device) > wide
    log_index = scores.masked_fill(hidden, -1e30).log_softmax(-1)
    log_attention = attention.clamp_min(1e-9).log()
    return (attention * (log_attention - log_index)).masked_fill(hidden, 0.0).sum(-1).mean()


def _rotate_front(x: torch.Tensor, rope: Rope, width: int, neox: bool) -> torch.Tensor:
    front, rest = x[..., :width], x[..., width:]
    cos, sin = (part.to(x.dtype) for part in rope)
    even, odd = front.chunk(2, dim=-1) if neox else (front[..., 0::2], front[..., 1::2])
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin, rest), dim=-1)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """To e4m3 and back, one scale for the last dimension."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-4) / 448.0
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
