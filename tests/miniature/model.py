"""The miniature in torch: transformers' modules hold the weights, this file runs them for training.

The functions here compute what ``GlmMoeDsaForCausalLM.forward`` computes (a test holds them
together), in forms that train fast: causal attention through the fused kernels, windows while the
model is young, one mask for all layers that share a selection, all experts in one product.

Shapes: B sequences, S tokens, H heads, D hidden. Attention weights never stand as [B, H, S, S].
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaDecoderLayer,
    GlmMoeDsaRMSNorm,
)

from . import indexer
from .indexer import Selection

LAYERS = 4
LOCAL_LAYERS = (0, 1)  # whose attention is a window in the first phase
GROUPS = {0: (0,), 1: (1, 2, 3)}  # full layer -> the layers that read with its selection


def config_fields(vocab: int, special_ids: dict[str, int]) -> dict[str, Any]:
    """config.json of the miniature: GLM-5.3's fields and its own sizes."""
    from sglang_glm53.tiny.options import TinyOptions, config_json

    options = TinyOptions(
        layers=LAYERS, experts=4, heads=4, index_heads=32, index_topk=128, hidden=256, vocab=vocab
    )
    fields = config_json(options, special_ids)
    fields.update(
        first_k_dense_replace=1,
        index_skip_topk_offset=2,
        indexer_types=["full", "full", "shared", "shared"],
    )
    return fields


class Mtp(nn.Module):
    """The draft layer: eh_proj([enorm(next token), hnorm(hidden)]) -> decoder layer -> norm."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__()
        alone = copy.deepcopy(config)
        alone.indexer_types, alone.mlp_layer_types = ["full"], ["sparse"]
        self.enorm = GlmMoeDsaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = GlmMoeDsaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = GlmMoeDsaDecoderLayer(alone, 0)
        self.norm = GlmMoeDsaRMSNorm(config.hidden_size, config.rms_norm_eps)


@dataclass
class Watch:
    """What a forward pass records for the indexers' loss.

    rows: [B, R] positions whose attention is recorded.
    attention: full layer -> [B, R, S] fp32, attention of its group over all visible positions,
        mean over heads and layers.
    inputs: full layer -> (normed hidden states, query latent), detached.
    """

    rows: torch.Tensor
    attention: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Miniature(nn.Module):
    """Target and draft layer."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__()
        self.config = config
        self.target = GlmMoeDsaForCausalLM(config)
        self.mtp = Mtp(config)
        for layer in (*self.target.model.layers, self.mtp.layer):
            # transformers hard-wires 1e-6; the engines read the config.
            layer.self_attn.q_a_layernorm.variance_epsilon = config.rms_norm_eps
            layer.self_attn.kv_a_layernorm.variance_epsilon = config.rms_norm_eps

    @property
    def layers(self) -> nn.ModuleList:
        return self.target.model.layers

    @property
    def embedding(self) -> torch.Tensor:
        return self.target.model.embed_tokens.weight

    def indexers(self) -> dict[str, nn.Module]:
        """Name of each indexer's owner ("0", "1", "mtp") -> the indexer."""
        return {
            "0": self.layers[0].self_attn.indexer,
            "1": self.layers[1].self_attn.indexer,
            "mtp": self.mtp.layer.self_attn.indexer,
        }

    def rope(self, length: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [length, rope / 2] fp32 of positions start .. start + length - 1."""
        theta = self.config.rope_parameters["rope_theta"]
        half = self.config.qk_rope_head_dim // 2
        device = self.embedding.device
        powers = torch.arange(half, device=device, dtype=torch.float32) / half
        positions = torch.arange(start, start + length, device=device, dtype=torch.float32)
        angles = positions[:, None] * (1.0 / theta**powers)
        return angles.cos(), angles.sin()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.target.lm_head.weight)

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        sparse: bool = False,
        window: int | None = None,
        watch: Watch | None = None,
        how: Selection | None = None,
    ) -> torch.Tensor:
        """[B, S] tokens -> [B, S, D] hidden states after the final norm.

        sparse: attention reads the indexers' selections; else everything before.
        window: attention of `LOCAL_LAYERS` reads this many positions back (dense only).
        watch: records attention of some rows.
        how: how selections are made (rounding, planted faults), the model's own way by default.
        """
        x = self.through(tokens, LAYERS, sparse, window, watch, how or Selection())
        return rms_norm(self.target.model.norm, x)

    def through(
        self,
        tokens: torch.Tensor,
        layers: int,
        sparse: bool,
        window: int | None,
        watch: Watch | None,
        how: Selection,
    ) -> torch.Tensor:
        """The residual stream [B, S, D] after the first `layers` layers."""
        rope = self.rope(tokens.shape[1])
        x = F.embedding(tokens, self.embedding)
        mask: torch.Tensor | None = None
        first_mask: torch.Tensor | None = None
        for index in range(layers):
            layer = self.layers[index]
            attention = layer.self_attn
            normed = rms_norm(layer.input_layernorm, x)
            latent = query_latent(attention, normed)
            q = queries(attention, latent, rope)
            k, v = keys_and_values(attention, normed, rope)
            if watch is not None:
                if attention.indexer is not None:
                    watch.inputs[index] = (normed.detach(), latent.detach())
                _record(watch, index, q.detach(), k.detach(), attention.scaling)
            if sparse and attention.indexer is not None:
                mask = indexer.select(attention.indexer, normed, latent, rope, how, index)
                first_mask = mask if first_mask is None else first_mask
            used = first_mask if how.first_set_everywhere and sparse else mask
            local = window if index in LOCAL_LAYERS and not sparse else None
            x = x + attend(attention, q, k, v, used, local)
            x = x + feed_forward(layer, x, how.gate_bias)
        return x

    def draft(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        steps: int,
        *,
        sparse: bool = False,
        watch: Watch | None = None,
        how: Selection | None = None,
        greedy: bool = False,
    ) -> list[torch.Tensor]:
        """What the draft layer makes of every position, `steps` tokens ahead.

        Row p of step j stands at position p + j. It embeds token p + 1 + j, takes the target's
        hidden state of p (j = 0) or its own output of the step before, and reads the committed rows
        0 .. p of step 0: with a selection, those that row p of step 0 selected.

        tokens: [B, S]; hidden: [B, S, D] after the target's final norm.
        greedy: each step embeds what the step before drafted, in place of the true token.
        watch: records, under "mtp" as layer -1, the mean attention over the steps.

        Returns:
            per step [B, S, D], normed; its logits at p are for token p + 2 + j.
        """
        how = how or Selection()
        layer, length = self.mtp.layer, tokens.shape[1]
        attention = layer.self_attn
        long = self.rope(length + steps)
        following = F.pad(tokens, (0, steps + 1))
        outputs: list[torch.Tensor] = []
        k = v = mask = None
        recorded = 0.0
        token = following[:, 1 : 1 + length]
        for step in range(steps):
            if step:
                token = (
                    self.logits(outputs[-1]).argmax(-1)
                    if greedy
                    else following[:, 1 + step : 1 + step + length]
                )
            rope = tuple(part[step : step + length] for part in long)
            joined = (
                rms_norm(self.mtp.enorm, F.embedding(token, self.embedding)),
                rms_norm(self.mtp.hnorm, outputs[-1] if step else hidden),
            )
            x = F.linear(torch.cat(joined, dim=-1), self.mtp.eh_proj.weight)
            normed = rms_norm(layer.input_layernorm, x)
            latent = query_latent(attention, normed)
            q = queries(attention, latent, rope)
            if step == 0:
                k, v = keys_and_values(attention, normed, rope)
                if watch is not None:
                    watch.inputs[-1] = (normed.detach(), latent.detach())
                if sparse:
                    mask = indexer.select(attention.indexer, normed, latent, rope, how, -1)
            if watch is not None:
                recorded = recorded + row_attention(
                    watch.rows, q.detach(), k.detach(), attention.scaling
                )
            x = x + attend(attention, q, k, v, mask, None)
            x = x + feed_forward(layer, x, how.gate_bias)
            outputs.append(rms_norm(self.mtp.norm, x))
        if watch is not None:
            watch.attention[-1] = recorded / steps
        return outputs


# Pieces of a layer


def rms_norm(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """RoPE over interleaved pairs; [..., S, rope] -> the same, first all cosines' halves.

    The order of the entries differs from the input's, for queries and keys alike.
    """
    cos, sin = (part.to(x.dtype) for part in rope)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def query_latent(attention: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(attention.q_a_layernorm, F.linear(x, attention.q_a_proj.weight))


def queries(
    attention: nn.Module, latent: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """[B, S, q_lora_rank] -> [B, H, S, nope + rope]."""
    q = F.linear(latent, attention.q_b_proj.weight)
    q = q.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
    nope = attention.qk_nope_head_dim
    return torch.cat((q[..., :nope], rotate(q[..., nope:], rope)), dim=-1)


def keys_and_values(
    attention: nn.Module, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S, D] -> keys [B, H, S, nope + rope] and values [B, H, S, v], expanded."""
    joined = F.linear(x, attention.kv_a_proj_with_mqa.weight)
    latent, k_rope = joined.split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    latent = rms_norm(attention.kv_a_layernorm, latent)
    expanded = F.linear(latent, attention.kv_b_proj.weight)
    expanded = expanded.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
    k_nope, v = expanded.split([attention.qk_nope_head_dim, attention_value(attention)], dim=-1)
    k_rope = rotate(k_rope, rope)[:, None].expand(-1, attention.num_heads, -1, -1)
    return torch.cat((k_nope, k_rope), dim=-1), v


def attention_value(attention: nn.Module) -> int:
    """Width of one head's values."""
    return attention.o_proj.in_features // attention.num_heads


def attend(
    attention: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """Attention and output projection; mask: [B, S, S] added to the logits, None for causal."""
    scale = attention.scaling
    width = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - width))  # the fused kernels want values as wide as keys
    if mask is not None:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale)
    elif window is not None and window < q.shape[2]:
        mixed = local_attention(q, k, v, window, scale)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    mixed = mixed[..., :width]
    return F.linear(mixed.transpose(1, 2).flatten(2), attention.o_proj.weight)


def local_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float
) -> torch.Tensor:
    """Causal attention to the last `window` positions, the own one included.

    Blocks of `window` queries read their own block and the one before.
    """
    batch, heads, length, _ = q.shape
    padded = -(-length // window) * window
    q, k, v = (F.pad(part, (0, 0, 0, padded - length)) for part in (q, k, v))

    def blocks(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, window)).transpose(1, 2).flatten(0, 1)

    def with_previous(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((blocks(F.pad(x, (0, 0, window, 0))[:, :, :padded]), blocks(x)), dim=2)

    row = torch.arange(window, device=q.device)[:, None]
    column = torch.arange(2 * window, device=q.device)[None] - window
    near = (column <= row) & (column > row - window)
    first = near & (column >= 0)
    mask = near.expand(padded // window, -1, -1).clone()
    mask[0] = first
    mask = mask.repeat(batch, 1, 1)[:, None]
    mixed = F.scaled_dot_product_attention(
        blocks(q), with_previous(k), with_previous(v), attn_mask=mask, scale=scale
    )
    mixed = mixed.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
    return mixed[:, :, :length]


def feed_forward(layer: nn.Module, x: torch.Tensor, gate_bias: bool = True) -> torch.Tensor:
    """The layer's MLP or mixture of experts on its normed input."""
    normed = rms_norm(layer.post_attention_layernorm, x)
    mlp = layer.mlp
    if not hasattr(mlp, "experts"):
        return _mlp(mlp, normed)
    return _mlp(mlp.shared_experts, normed) + _experts(mlp, normed, gate_bias)


def _mlp(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    gate = F.linear(x, mlp.gate_proj.weight)
    return F.linear(F.silu(gate) * F.linear(x, mlp.up_proj.weight), mlp.down_proj.weight)


def _experts(moe: nn.Module, x: torch.Tensor, gate_bias: bool) -> torch.Tensor:
    """All experts on all tokens, weighted by the router: with four experts one large product."""
    gate, experts = moe.gate, moe.experts
    scores = F.linear(x.float(), gate.weight.float()).sigmoid()
    choice = scores.detach() + (gate.e_score_correction_bias if gate_bias else 0.0)
    chosen = choice.topk(gate.top_k, dim=-1).indices
    kept = torch.zeros_like(scores).scatter(-1, chosen, 1.0) * scores
    weights = kept / (kept.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor
    count, double, _ = experts.gate_up_proj.shape
    both = F.linear(x, experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (count, double))
    opened, up = both.chunk(2, dim=-1)
    inner = F.silu(opened) * up * weights[..., None].to(x.dtype)
    return F.linear(inner.flatten(-2), experts.down_proj.permute(1, 0, 2).flatten(1))


# Attention of some rows, for the indexers


def row_attention(
    rows: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float
) -> torch.Tensor:
    """[B, R, S] fp32: dense causal attention of the rows, mean over heads."""
    wide = rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1])
    logits = (q.gather(2, wide) @ k.transpose(-1, -2)).float() * scale
    hidden = torch.arange(k.shape[2], device=k.device) > rows[..., None]
    return logits.masked_fill(hidden[:, None], float("-inf")).softmax(-1).mean(1)


def _record(watch: Watch, index: int, q: torch.Tensor, k: torch.Tensor, scale: float) -> None:
    full = max(layer for layer in GROUPS if layer <= index)
    share = row_attention(watch.rows, q, k, scale) / len(GROUPS[full])
    watch.attention[full] = watch.attention[full] + share if full in watch.attention else share
