"""One training step of each phase: what is computed, and the losses.

A step returns its loss (to call backward on) and adds to running sums by name, on the device.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn.functional as F

from . import indexer
from .batches import CHAT, COPY, RECALL, SIGN, Batch
from .model import Miniature, Watch

NAMES = {RECALL: "recall", COPY: "copy", SIGN: "sign", CHAT: "chat"}
WEIGHTS = {RECALL: 1.0, COPY: 1.0, SIGN: 0.1, CHAT: 1.0}


class Sums:
    """Sums of values and of their weights, by name; read seldom, since that waits for the GPU."""

    def __init__(self) -> None:
        self._sums: dict[str, list[torch.Tensor]] = defaultdict(list)

    def add(self, name: str, value: torch.Tensor, weight: torch.Tensor | float = 1.0) -> None:
        if not isinstance(weight, torch.Tensor):
            weight = torch.full((), weight, device=value.device)  # filled there: no waiting copy
        self._sums[name].append(torch.stack((value.detach().float() * weight, weight)))

    def means(self) -> dict[str, float]:
        """The mean of each name since the last call."""
        names = list(self._sums)
        if not names:
            return {}
        totals = torch.stack([torch.stack(self._sums[name]).sum(0) for name in names]).tolist()
        self._sums.clear()
        return {name: a / b for name, (a, b) in zip(names, totals, strict=True) if b}


def token_loss(
    model: Miniature,
    hidden: torch.Tensor,
    batch: Batch,
    ahead: int,
    sums: Sums,
    prefix: str = "",
    without: tuple[int, ...] = (),
) -> torch.Tensor:
    """Cross entropy of the learned tokens, mean by class, weighted by `WEIGHTS`.

    hidden: [B, S, D]; the row `ahead` before a token predicts it.
    """
    logits = model.logits(hidden.flatten(0, 1)[batch.at - ahead]).float()
    targets = batch.tokens.flatten()[batch.at]
    losses = F.cross_entropy(logits, targets, reduction="none")
    right = (logits.detach().argmax(-1) == targets).float()
    total = hidden.new_zeros((), dtype=torch.float32)
    for kind, weight in WEIGHTS.items():
        if kind in without:
            continue
        belongs = (batch.kinds == kind).float()
        count = belongs.sum()
        share = (losses * belongs).sum() / count.clamp_min(1.0)
        total = total + weight * share
        sums.add(f"{prefix}{NAMES[kind]}", (right * belongs).sum() / count.clamp_min(1.0), count)
        sums.add(f"{prefix}{NAMES[kind]} loss", share, count)
    return total


def watched_rows(batch: Batch, ahead: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """[B, count] positions: half of them predict a learned token, half are any."""
    sequences, length = batch.tokens.shape
    device = batch.tokens.device
    anywhere = torch.randint(length, (sequences, count), generator=generator, device=device)
    learned = torch.zeros(batch.tokens.numel(), device=device)
    learned[batch.at - ahead] = 1.0
    noise = torch.rand(learned.shape, generator=generator, device=device)
    best = (learned + noise).view(sequences, length).topk(min(count // 2, length), dim=1).indices
    return torch.cat((best, anywhere[:, best.shape[1] :]), dim=1)


def language_step(
    model: Miniature,
    recall: Batch | None,
    copying: Batch | None,
    chat: Batch | None,
    generator: torch.Generator,
    sums: Sums,
    *,
    sparse: bool,
    window: int | None,
    draft_weight: float,
    watch: int,
) -> torch.Tensor:
    """Losses of target and draft layer (one step ahead), and the target's indexers' if `watch`.

    The draft layer's indexer serves five steps at once, which only `draft_step` runs.
    """
    total = torch.zeros((), device=model.embedding.device)
    for batch, drafting in _groups(recall, copying, chat):
        watching = Watch(watched_rows(batch, 1, watch, generator)) if watch else None
        hidden = model(batch.tokens, sparse=sparse, window=window, watch=watching)
        total = total + token_loss(model, hidden, batch, 1, sums)
        if watching is not None:
            total = total + index_losses(model, watching, batch, sums)
        if draft_weight and drafting is not None:
            states = hidden[-len(drafting.tokens) :]
            outputs = model.draft(drafting.tokens, states, 1, sparse=sparse)
            loss = token_loss(model, outputs[0], drafting, 2, sums, "draft ", without=(RECALL,))
            total = total + draft_weight * loss
    return total


def index_step(
    model: Miniature,
    recall: Batch | None,
    copying: Batch | None,
    chat: Batch | None,
    generator: torch.Generator,
    sums: Sums,
    *,
    watch: int,
    draft_steps: int,
) -> torch.Tensor:
    """The indexers' losses alone, on the attention of the frozen model."""
    total = torch.zeros((), device=model.embedding.device)
    for batch, drafting in _groups(recall, copying, chat):
        watching = Watch(watched_rows(batch, 1, watch, generator))
        with torch.no_grad():
            hidden = model(batch.tokens, watch=watching)
        total = total + index_losses(model, watching, batch, sums)
        if drafting is not None:
            drafted = Watch(watched_rows(drafting, 2, watch, generator))
            with torch.no_grad():
                states = hidden[-len(drafting.tokens) :]
                model.draft(drafting.tokens, states, draft_steps, watch=drafted)
            total = total + index_losses(model, drafted, drafting, sums)
    return total


def draft_step(
    model: Miniature,
    copying: Batch,
    chat: Batch,
    generator: torch.Generator,
    sums: Sums,
    *,
    watch: int,
    steps: int,
) -> torch.Tensor:
    """The draft layer `steps` tokens ahead on its own hidden states; the target is frozen."""
    total = torch.zeros((), device=model.embedding.device)
    for batch in (copying, chat):
        with torch.no_grad():
            hidden = model(batch.tokens, sparse=True)
        watching = Watch(watched_rows(batch, 2, watch, generator))
        outputs = model.draft(batch.tokens, hidden, steps, sparse=True, watch=watching)
        for step, output in enumerate(outputs):
            prefix = f"draft{step + 1} "
            loss = token_loss(model, output, batch, 2 + step, sums, prefix, without=(RECALL,))
            total = total + loss / steps
        total = total + index_losses(model, watching, batch, sums)
    return total


def index_losses(model: Miniature, watch: Watch, batch: Batch, sums: Sums) -> torch.Tensor:
    """Sum over the indexers that `watch` has recorded for."""
    total = torch.zeros((), device=batch.tokens.device)
    rope = model.rope(batch.tokens.shape[1])
    owners = {0: "0", 1: "1", -1: "mtp"}
    indexers = model.indexers()
    for layer, attention in watch.attention.items():
        name = owners[layer]
        loss = indexer.loss(indexers[name], watch.inputs[layer], rope, watch.rows, attention)
        sums.add(f"index {name}", loss)
        total = total + loss
    return total


def _groups(
    recall: Batch | None, copying: Batch | None, chat: Batch | None
) -> list[tuple[Batch, Batch | None]]:
    """Batches to run, each with its last sequences that the draft layer learns from."""
    groups: list[tuple[Batch, Batch | None]] = []
    if recall is not None:
        groups.append((recall.joined(copying) if copying is not None else recall, copying))
    elif copying is not None:
        groups.append((copying, copying))
    if chat is not None:
        groups.append((chat, chat))
    return groups
