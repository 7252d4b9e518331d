"""Reference of the MTP draft layer, which transformers does not have.

Built from transformers' decoder layer, as the checkpoint's last layer ``num_hidden_layers``
defines it: ``eh_proj([enorm(embed(token p + 1)), hnorm(hidden p)])`` at position p, one decoder
layer with its own indexer and MoE, ``shared_head.norm``, the target's ``lm_head``. The hidden
state is the target's after its final norm for accepted tokens, and the draft's own after
``shared_head.norm`` from one draft step to the next.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaDecoderLayer,
    GlmMoeDsaRMSNorm,
)

from .hf import Reference, prepare_attention, read_tensors, stable_topk_mask, topk_gap


@dataclass
class Proposal:
    """The draft of one step: ``tokens`` and the two margins that decide if it is well defined.

    margin: the smallest difference between the best and the second logit of a drafted token.
    gap: the smallest relative top-k gap (see ``hf.topk_gap``) of a row the draft depends on.
    """

    tokens: list[int]
    margin: float
    gap: float


class ReferenceMtp:
    """The draft layer of ``reference``'s checkpoint."""

    def __init__(self, reference: Reference) -> None:
        self.target = reference
        config = copy.deepcopy(reference.config)
        config.indexer_types = ["full"]
        config.mlp_layer_types = ["sparse"]
        config._attn_implementation = "eager"
        self.config = config
        prefix = f"model.layers.{config.num_hidden_layers}."
        stored = read_tensors(reference.path, prefix)
        weights = {name[len(prefix) :]: value.float() for name, value in stored.items()}
        size, eps = config.hidden_size, config.rms_norm_eps
        self.eh_proj = weights.pop("eh_proj.weight")
        self.enorm = _norm(size, eps, weights.pop("enorm.weight"))
        self.hnorm = _norm(size, eps, weights.pop("hnorm.weight"))
        self.final_norm = _norm(size, eps, weights.pop("shared_head.norm.weight"))
        for shared in ("shared_head.head.weight", "embed_tokens.weight"):
            weights.pop(shared, None)
        self.layer = GlmMoeDsaDecoderLayer(config, 0).eval()
        prepare_attention(self.layer.self_attn, eps)
        self.layer.load_state_dict(_fuse_experts(weights, config.n_routed_experts), strict=True)
        self._rows: dict[int, torch.Tensor] = {}
        inner = self.layer.self_attn.indexer.forward

        def forward(*args: object, **kwargs: object) -> torch.Tensor:
            selected = inner(*args, **kwargs)
            for row, positions in self._rows.items():
                filled = positions[torch.arange(selected.shape[-1]) % len(positions)]
                selected[0, row] = filled.to(selected.dtype)
            return selected

        self.layer.self_attn.indexer.forward = forward

    @torch.no_grad()
    def run(
        self,
        tokens: list[int],
        hidden: torch.Tensor,
        rows: dict[int, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One forward over rows at positions 0..n-1.

        tokens: the token each row embeds (the one after its position); hidden: [n, hidden] the
        hidden state each row takes; rows: row -> positions it must attend in place of its own
        selection. Returns logits [n, vocab], hidden [n, hidden] after shared_head.norm, and the
        index scores [n, n].
        """
        self._rows = rows or {}
        model = self.target.model.model
        embedded = model.embed_tokens(torch.tensor([tokens]))
        x = torch.cat((self.enorm(embedded), self.hnorm(hidden[None])), dim=-1)
        x = torch.nn.functional.linear(x, self.eh_proj)
        n = len(tokens)
        positions = torch.arange(n)[None]
        future = torch.full((n, n), torch.finfo(x.dtype).min).triu(1)
        x, _ = self.layer(
            x,
            attention_mask=future[None, None],
            position_ids=positions,
            position_embeddings=model.rotary_emb(x, position_ids=positions),
        )
        x = self.final_norm(x)
        scores = self.layer.self_attn.indexer.scores[0]
        return self.target.model.lm_head(x)[0], x[0], scores

    def propose(
        self,
        tokens: list[int],
        hidden: torch.Tensor,
        steps: int,
        share: bool,
    ) -> Proposal:
        """The ``steps`` tokens drafted after ``tokens``, whose last one is not in the caches yet.

        tokens: n + 1 committed tokens; hidden: [>= n, hidden] of the target's positions 0..n-1;
        share: the draft steps reuse the set of the last committed row (else each runs the
        indexer over committed and drafted positions).
        """
        n = len(tokens) - 1
        inputs, states = list(tokens[1:]), hidden[:n]
        forced: dict[int, torch.Tensor] = {}
        drafted: list[int] = []
        margin, gap = float("inf"), float("inf")
        seed: torch.Tensor | None = None
        for step in range(steps):
            logits, out, scores = self.run(inputs, states, forced)
            best = logits[-1].topk(2).values
            margin = min(margin, float(best[0] - best[1]))
            row = len(inputs) - 1
            if row not in forced:
                gap = min(gap, float(topk_gap(scores, self.target.topk)[row]))
            if seed is None:
                seed = stable_topk_mask(scores, self.target.topk)[row].nonzero()[:, 0]
            drafted.append(int(logits[-1].argmax()))
            if step + 1 < steps:
                inputs.append(drafted[-1])
                states = torch.cat((states, out[-1:]))
                if share:
                    forced[len(inputs) - 1] = seed
        return Proposal(drafted, margin, gap)


def _norm(size: int, eps: float, weight: torch.Tensor) -> GlmMoeDsaRMSNorm:
    norm = GlmMoeDsaRMSNorm(size, eps)
    norm.weight.data = weight
    return norm.requires_grad_(False)


def _fuse_experts(weights: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """Per-expert matrices to the two stacked tensors that transformers holds."""
    fused = {name: value for name, value in weights.items() if ".experts." not in name}

    def stack(kind: str) -> torch.Tensor:
        return torch.stack([weights[f"mlp.experts.{e}.{kind}.weight"] for e in range(experts)])

    fused["mlp.experts.gate_up_proj"] = torch.cat((stack("gate_proj"), stack("up_proj")), dim=1)
    fused["mlp.experts.down_proj"] = stack("down_proj")
    return fused
