"""AdamW on fp32 masters of weights that compute in their own dtype, and its compact state."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .model import Miniature
from .start import index_masks

BETAS = (0.9, 0.98)
DECAY = 0.02  # of matrices
CLIP = 1.0  # norm of the gradient
WEIGHTS, MOMENTS = ("high", "low"), ("first", "second")  # files of a state


class Optimiser:
    """Keeps fp32 masters; `step` takes the gradients of the model's parameters.

    Groups: "main", "index" (the indexers), "draft" (the draft layer without its indexer); a group
    that does not learn is frozen in the model too.
    """

    def __init__(self, model: Miniature) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.live = [parameter for _, parameter in model.named_parameters()]
        self.masters = [p.detach().float().clone() for p in self.live]
        self.first = [torch.zeros_like(p) for p in self.masters]
        self.second = [torch.zeros_like(p) for p in self.masters]
        self.counts = [0] * len(self.names)
        device = self.live[0].device
        self.masks = {
            self.names.index(name): mask.to(device) for name, mask in index_masks(model).items()
        }
        self.groups = [group_of(name) for name in self.names]

    def learn(self, groups: set[str]) -> None:
        """Only these groups have gradients from here on."""
        for parameter, group in zip(self.live, self.groups, strict=True):
            parameter.requires_grad_(group in groups)
            parameter.grad = None

    @torch.no_grad()
    def step(self, rates: dict[str, float]) -> torch.Tensor:
        """One update with a learning rate for each group; returns the gradient's norm."""
        chosen = [i for i, p in enumerate(self.live) if p.grad is not None]
        gradients = [self.live[i].grad.float() for i in chosen]
        for place, i in enumerate(chosen):
            if i in self.masks:
                gradients[place] = gradients[place] * self.masks[i]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_mul_(gradients, (CLIP / (norm + 1e-6)).clamp(max=1.0))
        buckets: dict[tuple[str, bool, int], list[tuple[int, torch.Tensor]]] = {}
        for i, gradient in zip(chosen, gradients, strict=True):
            self.counts[i] += 1
            key = (self.groups[i], self.masters[i].dim() > 1, self.counts[i])
            buckets.setdefault(key, []).append((i, gradient))
        for (group, matrix, count), members in buckets.items():
            places = [i for i, _ in members]
            self._update(
                [self.masters[i] for i in places],
                [self.first[i] for i in places],
                [self.second[i] for i in places],
                [gradient for _, gradient in members],
                rates[group],
                DECAY if matrix else 0.0,
                count,
            )
        torch._foreach_copy_([self.live[i] for i in chosen], [self.masters[i] for i in chosen])
        for i in chosen:
            self.live[i].grad = None
        return norm

    @staticmethod
    def _update(
        weights: list[torch.Tensor],
        first: list[torch.Tensor],
        second: list[torch.Tensor],
        gradients: list[torch.Tensor],
        rate: float,
        decay: float,
        count: int,
    ) -> None:
        torch._foreach_lerp_(first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - BETAS[1])
        if decay:
            torch._foreach_mul_(weights, 1 - rate * decay)
        spread = torch._foreach_sqrt(second)
        torch._foreach_div_(spread, math.sqrt(1 - BETAS[1] ** count))
        torch._foreach_add_(spread, 1e-8)
        torch._foreach_addcdiv_(weights, first, spread, -rate / (1 - BETAS[0] ** count))

    # Its state, in bf16: the master is what the weight rounds to plus "low".

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write the state, and go on from exactly what is written."""
        folder.mkdir(parents=True, exist_ok=True)
        high = [m.bfloat16() for m in self.masters]
        low = [(m - h.float()).bfloat16() for m, h in zip(self.masters, high, strict=True)]
        parts = {
            "high": high,
            "low": low,
            "first": [m.bfloat16() for m in self.first],
            "second": [m.bfloat16() for m in self.second],
        }
        for part, tensors in parts.items():
            stored = dict(zip(self.names, (t.cpu().contiguous() for t in tensors), strict=True))
            if part == "high":
                counts = dict(zip(self.names, self.counts, strict=True))
                stored.update({f"count.{n}": torch.tensor(c) for n, c in counts.items()})
            save_file(stored, folder / f"{part}.safetensors")
        self._adopt({part: dict(zip(self.names, t, strict=True)) for part, t in parts.items()})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read a state; without the files of both moments they begin anew."""
        parts = {p: load_file(folder / f"{p}.safetensors") for p in WEIGHTS}
        if any((folder / f"{p}.safetensors").exists() for p in MOMENTS):
            parts.update({p: load_file(folder / f"{p}.safetensors") for p in MOMENTS})
            self.counts = [int(parts["high"][f"count.{name}"]) for name in self.names]
        else:
            nothing = dict(zip(self.names, map(torch.zeros_like, self.masters), strict=True))
            parts.update(dict.fromkeys(MOMENTS, nothing))
        self._adopt(parts)

    def _adopt(self, parts: dict[str, dict[str, torch.Tensor]]) -> None:
        for i, name in enumerate(self.names):
            master = parts["high"][name].float() + parts["low"][name].float()
            self.masters[i].copy_(master)
            self.live[i].data.copy_(master)
            self.first[i].copy_(parts["first"][name])
            self.second[i].copy_(parts["second"][name])


def group_of(name: str) -> str:
    """The group of a parameter of `Miniature`."""
    if ".indexer." in name:
        return "index"
    return "draft" if name.startswith("mtp.") else "main"
