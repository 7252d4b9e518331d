"""Recall prompts in groups that share their records, and the count of right answers. No server."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miniature.tasks import QUESTION, RECORD

if TYPE_CHECKING:
    from miniature.tasks import Tasks

CONTEXTS = (1024, 4096, 8192)  # tokens of a prompt
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # where the asked record lies, first to last


@dataclass(frozen=True)
class Question:
    """One recall prompt.

    tokens: the whole prompt, `context` of them. answer: the one token that must follow.
    planted: the position of the value that the answer is read from.
    """

    context: int
    depth: float
    tokens: list[int]
    answer: int
    planted: int


Haystack = list[Question]  # equal but for the question at the end


@dataclass(frozen=True)
class Plan:
    """How much recall is measured.

    contexts: in ascending order. haystacks: prompts with records of their own, a context.
    hits: further questions about each of them.
    """

    haystacks: int
    hits: int
    contexts: tuple[int, ...] = CONTEXTS

    def prompts(self) -> int:
        """Prompts a context, hits included."""
        return self.haystacks * (1 + self.hits)


def make_haystacks(tasks: Tasks, plan: Plan, seed: int) -> list[Haystack]:
    """The plan's haystacks, context by context; the depths take turns over all questions."""
    made: list[Haystack] = []
    for context in plan.contexts:
        rng = random.Random(f"recall {seed} {context}")
        for number in range(plan.haystacks):
            depths = [DEPTHS[(number + hit) % len(DEPTHS)] for hit in range(1 + plan.hits)]
            made.append(make_haystack(tasks, rng, context, depths))
    return made


def first_haystacks(haystacks: Sequence[Haystack], count: int) -> list[Haystack]:
    """The first `count` of each context, contexts in the order in which they come."""
    contexts = dict.fromkeys(haystack[0].context for haystack in haystacks)
    return [
        haystack
        for context in contexts
        for haystack in [h for h in haystacks if h[0].context == context][:count]
    ]


def make_haystack(
    tasks: Tasks, rng: random.Random, context: int, depths: Sequence[float]
) -> Haystack:
    """One question a depth about the same records."""
    prompt = tasks.recall(rng, context, depths[0])
    (answer,), (planted,) = prompt.answer, prompt.planted
    first = Question(context, depths[0], prompt.tokens, answer, planted)
    return [first, *(_ask_another(tasks, first, depth) for depth in depths[1:])]


def _ask_another(tasks: Tasks, question: Question, depth: float) -> Question:
    """The same records, and the question for the one at another depth."""
    records = tasks.records(question.context)
    start = question.context - QUESTION - records * RECORD
    place = start + RECORD * round(depth * (records - 1))
    first, second, value, _ = question.tokens[place : place + RECORD]
    tokens = [*question.tokens[:-QUESTION], question.tokens[-QUESTION], first, second]
    return Question(question.context, depth, tokens, value, place + 2)


@dataclass
class Tally:
    """Right answers by context and depth.

    counts: (context, depth) -> [right, asked]. logprobs: of every expected answer, nats. ranks:
    the data-parallel ranks that answered.
    """

    counts: dict[tuple[int, float], list[int]] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)

    def add(self, question: Question, tokens: Sequence[int], logprob: float | None = None) -> None:
        """Count one reply; `logprob` is that of the expected answer."""
        count = self.counts.setdefault((question.context, question.depth), [0, 0])
        count[0] += bool(tokens) and tokens[0] == question.answer
        count[1] += 1
        if logprob is not None:
            self.logprobs.append(logprob)

    def merge(self, others: Iterable[Tally]) -> Tally:
        """This tally with the others' counts added."""
        for other in others:
            self.logprobs += other.logprobs
            self.ranks |= other.ranks
            for key, (right, asked) in other.counts.items():
                count = self.counts.setdefault(key, [0, 0])
                count[0] += right
                count[1] += asked
        return self

    def _sum(self, context: int | None, depth: float | None) -> tuple[int, int]:
        chosen = [
            count
            for (c, d), count in self.counts.items()
            if context in (None, c) and depth in (None, d)
        ]
        return sum(count[0] for count in chosen), sum(count[1] for count in chosen)

    def asked(self, context: int | None = None, depth: float | None = None) -> int:
        """Replies counted."""
        return self._sum(context, depth)[1]

    def accuracy(self, context: int | None = None, depth: float | None = None) -> float:
        """Share of right answers, 0..1; of all contexts or depths where none is named.

        Raises:
            ValueError: nothing was asked there.
        """
        right, asked = self._sum(context, depth)
        if not asked:
            raise ValueError(f"no question of context {context} and depth {depth} was asked")
        return right / asked

    def mean_logprob(self) -> float | None:
        """Mean log-probability of the expected answers, nats."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else None

    def contexts(self) -> list[int]:
        return sorted({context for context, _ in self.counts})

    def as_json(self) -> dict[str, Any]:
        """Accuracy of each context and depth, with the counts."""
        return {
            "accuracy": round(self.accuracy(), 4) if self.asked() else None,
            "asked": self.asked(),
            "mean_logprob": self.mean_logprob(),
            "contexts": {
                str(context): {
                    "accuracy": round(self.accuracy(context), 4),
                    "asked": self.asked(context),
                    "depths": {
                        str(depth): list(self.counts[context, depth])
                        for c, depth in sorted(self.counts)
                        if c == context
                    },
                }
                for context in self.contexts()
            },
        }
