"""The rules of parity, over plain data: what is a difference, and what is one too many.

Greedy answers must agree up to the first token that differs, and there the two best
log-probabilities of one of the sides must be within ``TIE``: rounding decides between them.
Prompt log-probabilities are held against transformers in FP32; ours may be off by at most
``AT_MOST`` times what SGLang's own class is off, in the mean and in the largest.

SGLang's kernels do not repeat themselves: where a row sees more than index_topk tokens, two runs of
the same class on the same prompt differ (the selection comes in another order, attention sums in
another order). So every long prompt is run twice, and where stock's own two runs differ, a tie may
be as wide as what one token in a hundred moves between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

TIE = 5e-3  # nats
AT_MOST = 1.2

Answer = Mapping[str, Any]  # one answer as generate.ask returns it


@dataclass(frozen=True)
class Check:
    """One row of the report: what was compared, what came out, and whether it may be so."""

    name: str
    passed: bool
    detail: str

    def row(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}  {self.name:44}  {self.detail}"


@dataclass(frozen=True)
class Divergence:
    """The first token at which two answers differ.

    position: in the answer. gap: the smallest difference between the two best log-probabilities
    there, over the sides whose two best are the two tokens; infinite if no side's are.
    """

    position: int
    gap: float


def first_divergence(left: Answer, right: Answer) -> Divergence | None:
    """Where two answers part; None if they are the same.

    Raises:
        ValueError: one is longer than the other and they do not differ before.
    """
    for position, (a, b) in enumerate(zip(left["tokens"], right["tokens"], strict=False)):
        if a != b:
            gaps = [gap for side in (left, right) if (gap := _gap(side, position, {a, b}))]
            return Divergence(position, min((gap[0] for gap in gaps), default=math.inf))
    if len(left["tokens"]) != len(right["tokens"]):
        raise ValueError(f"{len(left['tokens'])} tokens and {len(right['tokens'])}")
    return None


def _gap(answer: Answer, position: int, tokens: set[int]) -> tuple[float] | None:
    """The side's distance of its two best at a position, if they are the two tokens in question."""
    best = answer["top"][position] if position < len(answer["top"]) else []
    if len(best) < 2 or {best[0][1], best[1][1]} != tokens:
        return None
    return (abs(best[0][0] - best[1][0]),)


@dataclass(frozen=True)
class Noise:
    """|difference| of the prompt log-probabilities of two runs, nats.

    often: what one token in a hundred exceeds.
    """

    mean: float = 0.0
    often: float = 0.0

    @property
    def tie(self) -> float:
        """The widest near tie, nats."""
        return max(TIE, self.often)


def noise(first: Sequence[Answer], again: Sequence[Answer]) -> Noise:
    """The difference of two runs over the same prompts.

    Raises:
        ValueError: they do not have the same tokens' log-probabilities, or one is no number.
    """
    parts = []
    for a, b in zip(first, again, strict=True):
        one, other = (np.asarray(x["prompt_logprobs"], dtype=np.float64) for x in (a, b))
        if one.shape != other.shape or not len(one):
            raise ValueError(f"{len(one)} and {len(other)} log-probabilities")
        parts.append(np.abs(one - other))
    joined = np.concatenate(parts)
    if not np.isfinite(joined).all():
        raise ValueError("a log-probability is no number")
    return Noise(float(joined.mean()), float(np.quantile(joined, 0.99)))


def widest(left: Sequence[Answer], right: Sequence[Answer]) -> float:
    """The widest gap at which answers of two runs part; 0 where none does, infinite where one
    ends before the other."""
    try:
        found = [first_divergence(a, b) for a, b in zip(left, right, strict=True)]
    except ValueError:
        return math.inf
    return max((divergence.gap for divergence in found if divergence), default=0.0)


def greedy(name: str, left: Sequence[Answer], right: Sequence[Answer], tie: float = TIE) -> Check:
    """Greedy answers of two runs to the same prompts, by the rule of the near tie."""
    if not left or len(left) != len(right):
        return Check(name, False, f"{len(left)} answers and {len(right)}")
    same, parted, worst = 0, [], []
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        if not a["tokens"]:
            return Check(name, False, f"answer {number} is empty")
        try:
            divergence = first_divergence(a, b)
        except ValueError as error:
            return Check(name, False, f"answer {number}: {error}")
        if divergence is None:
            same += 1
            continue
        parted.append(f"#{number}@{divergence.position}: {divergence.gap:.1e}")
        worst.append(divergence.gap)
    detail = f"{same} of {len(left)} identical"
    if parted:
        detail += f"; parted {', '.join(parted)} (allowed {tie:.1e})"
    return Check(name, all(gap <= tie for gap in worst), detail)


@dataclass(frozen=True)
class Error:
    """|difference| of log-probabilities, nats: mean, largest, how many."""

    mean: float
    largest: float
    count: int


def error(answers: Sequence[Answer], references: Sequence[np.ndarray]) -> Error:
    """Prompt log-probabilities of some answers against the reference's, over all of them.

    Raises:
        ValueError: nothing to compare, another count, or a value that is no number.
    """
    deltas = []
    for answer, reference in zip(answers, references, strict=True):
        given = np.asarray(answer["prompt_logprobs"], dtype=np.float64)
        if given.shape != reference.shape or not len(given):
            raise ValueError(f"{len(given)} log-probabilities, the reference has {len(reference)}")
        deltas.append(np.abs(given - reference))
    joined = np.concatenate(deltas)
    if not np.isfinite(joined).all():
        raise ValueError(f"{int((~np.isfinite(joined)).sum())} log-probabilities are no numbers")
    return Error(float(joined.mean()), float(joined.max()), len(joined))


def against_reference(name: str, ours: Error, stock: Error) -> Check:
    """Ours may be off by at most `AT_MOST` times stock's, in the mean and in the largest."""
    passed = ours.mean <= AT_MOST * stock.mean and ours.largest <= AT_MOST * stock.largest
    return Check(
        name,
        passed and ours.count == stock.count,
        f"mean {ours.mean:.4f} / {stock.mean:.4f} = {_ratio(ours.mean, stock.mean)}, "
        f"largest {ours.largest:.3f} / {stock.largest:.3f} = "
        f"{_ratio(ours.largest, stock.largest)} ({ours.count} tokens)",
    )


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.3f}" if b else "-"


def prefix_hit(
    name: str, first: Sequence[Answer], again: Sequence[Answer], page: int, tie: float = TIE
) -> Check:
    """A repeated prompt takes whole pages from the cache, and its answer obeys the greedy rule.

    first: the answers without the cache; their prompts' lengths follow from their log-probabilities
    """
    check = greedy(name, first, again, tie)
    for answer, before in zip(again, first, strict=True):
        length = len(before["prompt_logprobs"]) + 1
        wanted = (length - 1) // page * page
        if not wanted <= answer["cached"] <= length - 1:
            detail = f"{answer['cached']} of {length} tokens cached, expected {wanted}"
            return Check(name, False, detail)
    cached = ", ".join(str(answer["cached"]) for answer in again)
    return Check(name, check.passed, f"cached {cached}; {check.detail}")


def accept_length(groups: Mapping[str, Sequence[Answer]]) -> float:
    """Tokens a target pass over all answers; 0 without speculation."""
    answers = [answer for group in groups.values() for answer in group]
    passes = sum(answer["verifies"] for answer in answers)
    return sum(len(answer["tokens"]) for answer in answers) / passes if passes else 0.0


def same_accept_length(
    name: str, ours: Mapping[str, Sequence[Answer]], stock: Mapping[str, Sequence[Answer]]
) -> Check:
    """Ours accepts as much as stock does, up to a tenth (near ties part the answers)."""
    mine, theirs = accept_length(ours), accept_length(stock)
    detail = f"ours {mine:.2f}, stock {theirs:.2f} tokens a target pass"
    return Check(name, mine > 1 and theirs > 1 and mine >= 0.9 * theirs, detail)


def report(title: str, checks: Sequence[Check]) -> str:
    """The table, with a verdict."""
    failed = sum(not check.passed for check in checks)
    verdict = f"{len(checks) - failed} of {len(checks)} hold" if checks else "nothing was compared"
    return "\n".join([f"== {title}", *(check.row() for check in checks), f"== {title}: {verdict}"])


def as_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [asdict(check) for check in checks]


def failures(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of checks as `as_json` gives them: the lines of those that failed."""
    return [f"{check['name']}: {check['detail']}" for check in checks if not check["passed"]]
