"""How a server's answer is held against the reference, with the issue's exemption for near ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .harness import Answer, Recording

if TYPE_CHECKING:
    from reference.hf import Reference, Trace

TOLERANCE = 1e-4  # of a log-probability, in nats
NEAR_TIE = 1e-5  # relative difference of the k-th and the next index score
NEAR_TIE_TOLERANCE = 1e-2
NEAR_TIE_SHARE = 0.01  # of all positions
# Below this relative difference, rounding decides between two index scores: the set is not
# defined, and one other key of 64 can move later log-probabilities by much more than 1e-2.
ROUNDING = 2e-6


def random_prompt(vocabulary: int, length: int, seed: int) -> list[int]:
    """``length`` random token ids.

    The vocabulary's last id is left out: SGLang reports token 0's log-probability for it.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary - 1, (length,), generator=generator).tolist()


_settled: dict[tuple[object, ...], list[int]] = {}


def settled_prompt(
    model: Reference, length: int, new: int, seed: int, start: Sequence[int] = ()
) -> list[int]:
    """``start`` and then ``length`` random tokens, for which every selected set is defined.

    Also those of the ``new`` greedy tokens after it: the first seed from ``seed`` on, in steps of
    10,000, at which no index score at the edge of a set is within ROUNDING of the next one.
    Near ties (NEAR_TIE) stay in. Tests name seeds that pass with room to spare: with unlucky ones
    the search takes minutes.

    start: the beginning of a settled prompt, which is not looked at again.
    """
    key = (model.path, length, new, seed, *start)
    if key not in _settled:
        _settled[key] = _search(model, length, new, seed, start)
    return _settled[key]


def _search(model: Reference, length: int, new: int, seed: int, start: Sequence[int]) -> list[int]:
    def tied(tokens: list[int]) -> bool:
        return float(model.trace(tokens).gap[len(start) :].min()) < ROUNDING

    for attempt in range(200):
        random = random_prompt(model.config.vocab_size, length, seed + 10_000 * attempt)
        prompt = [*start, *random]
        if not tied(prompt) and not tied(prompt + model.generate(prompt, new)):
            return prompt
    raise AssertionError(f"200 random prompts of {length} tokens have index scores that tie")


@dataclass
class Tally:
    """Counts over many positions; ``check`` applies the limits."""

    positions: int = 0  # whose sets were compared
    near_ties: int = 0  # of these
    compared: int = 0  # log-probabilities
    worst: float = 0.0
    worst_near_tie: float = 0.0
    failures: list[str] = field(default_factory=list)

    def logprobs(self, answer: Answer, trace: Trace, name: str) -> None:
        """Prompt's and output's log-probabilities against the reference's."""
        for position, value in answer.logprobs.items():
            row = position - 1  # the row that predicts this token
            delta = abs(value - float(trace.logprobs[row]))
            self.compared += 1
            if float(trace.gap[row]) < NEAR_TIE:
                self.worst_near_tie = max(self.worst_near_tie, delta)
                limit = NEAR_TIE_TOLERANCE
            else:
                self.worst = max(self.worst, delta)
                limit = TOLERANCE
            if not delta <= limit:
                self.failures.append(f"{name}, token {position}: |delta| {delta:.2e} > {limit}")

    def sets(self, recording: Recording, trace: Trace, model: Reference, name: str) -> None:
        """Each layer's selected set against the reference's; near ties may differ."""
        n = recording.length
        clear = trace.gap[:n] >= NEAR_TIE
        self.positions += n
        self.near_ties += int((~clear).sum())
        selecting = recording.layers("select")
        sparse = [i for i in recording.layers("attend") if not recording.dense_rows(i).all()]
        if sparse:
            assert selecting == model.full_layers, f"{name}: indexers ran on layers {selecting}"
        for layer in range(model.config.num_hidden_layers):
            used = recording.mask("attend", layer)
            expected = trace.used[layer][:n, :n]
            wrong = (used != expected).any(dim=1) & clear
            for row in wrong.nonzero()[:, 0].tolist():
                self.failures.append(f"{name}, layer {layer}, position {row}: another set")
            above = model.layer_above(layer)
            rows = ~recording.dense_rows(layer)
            chosen = recording.tensor("select", above)[rows] if rows.any() else None
            if chosen is not None and not torch.equal(
                recording.tensor("attend", layer)[rows], chosen
            ):
                self.failures.append(f"{name}, layer {layer}: not the set of layer {above}")

    def check(self) -> None:
        """Fails with every deviation; prints the figures."""
        print(
            f"{self.compared} log-probabilities, largest |delta| {self.worst:.2e}; "
            f"{self.near_ties} near ties in {self.positions} positions, "
            f"there {self.worst_near_tie:.2e}"
        )
        assert not self.failures, f"{len(self.failures)} deviations:\n" + "\n".join(
            self.failures[:20]
        )
        assert self.near_ties < NEAR_TIE_SHARE * self.positions


def largest_difference(left: Answer, right: Answer) -> float:
    """Largest |difference| of the log-probabilities that both answers have; tokens must agree."""
    assert left.tokens == right.tokens, f"tokens differ:\n{left.tokens}\n{right.tokens}"
    common = left.logprobs.keys() & right.logprobs.keys()
    assert common, "no log-probability in common"
    return max(abs(left.logprobs[i] - right.logprobs[i]) for i in common)
