"""The limits: what a healthy server must reach, and what a planted fault must miss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Share of right answers, of each context. Ten prompts cannot tell 99 % from 98 %: one of them may
# be wrong there.
RECALL = 0.99
RECALL_OF_FEW = 0.9
ENOUGH = 60  # prompts a context for RECALL
PLANTED = 0.99  # prompts whose planted value is in the selected set
DENSE_GAP = 0.005  # of accuracy, between dense and sparse attention
ACCEPT_LENGTH = 3.5  # tokens a target pass, 5-1-6, copying
COPIED = 0.99  # share of right tokens
CHAT = 0.9  # share of answers that are word for word the learned ones
# Draft cache after drafting against a fresh prefill: bf16 rounding on one side, other tokens'
# entries on the other.
DRAFT_CACHE = 0.1


@dataclass(frozen=True)
class Check:
    """A value held against its limit, if it has one.

    at_least: the value must not be below the limit, else not above.
    """

    name: str
    value: float
    limit: float | None
    at_least: bool = True

    @property
    def passed(self) -> bool:
        if self.limit is None:
            return True
        # 1 - 0.995 is a little above 0.005 in floating point.
        by = self.value - self.limit if self.at_least else self.limit - self.value
        return by >= -1e-9

    def past(self, bound: float) -> bool:
        """Whether the value is as bad as `bound`, or worse."""
        return self.value <= bound if self.at_least else self.value >= bound

    def row(self) -> str:
        verdict = "pass" if self.passed else "FAIL"
        row = f"{verdict}  {self.name:44}  {self.value:.4g}"
        if self.limit is None:
            return row
        return row + f" ({'>=' if self.at_least else '<='} {self.limit:.4g})"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "limit": self.limit,
            "at_least": self.at_least,
            "passed": self.passed,
        }


def recall(name: str, tally: Any) -> list[Check]:
    """One check a context."""
    return [
        Check(
            f"{name}, {context} tokens",
            tally.accuracy(context),
            RECALL if tally.asked(context) >= ENOUGH else RECALL_OF_FEW,
        )
        for context in tally.contexts()
    ]


def answer_logprob(name: str, tally: Any) -> Check:
    """How likely the right answers are, in nats; told, and judged by nothing."""
    return Check(f"{name}: mean log-probability of the answer", tally.mean_logprob(), None)


def planted(name: str, selected: dict[int, Any], index_topk: int) -> list[Check]:
    """The set that the shared layers use holds the planted value, and has its full size."""
    layer = max(selected)
    return [
        Check(f"{name}: planted value in layer {layer}'s set", selected[layer].share, PLANTED),
        *(selected_size(name, selected, index_topk)),
    ]


def selected_size(name: str, selected: dict[int, Any], index_topk: int) -> list[Check]:
    """Every full layer selects as many positions as the config says."""
    smallest = min(min(one.sizes) for one in selected.values())
    return [Check(f"{name}: distinct selected positions", smallest, index_topk)]


def accept_length(name: str, copies: Any) -> Check:
    return Check(f"{name}: accept length", copies.accept_length or 0.0, ACCEPT_LENGTH)


def copied(name: str, copies: Any) -> Check:
    return Check(f"{name}: copied tokens", copies.accuracy, COPIED)


def chat(name: str, share: float) -> Check:
    return Check(f"{name}: chat answers", share, CHAT)


def dense_gap(context: int, sparse: float, dense: float) -> Check:
    return Check(
        f"dense against sparse, {context} tokens", abs(dense - sparse), DENSE_GAP, at_least=False
    )


def draft_cache(name: str, error: float) -> Check:
    return Check(f"{name}: draft cache against a prefill", error, DRAFT_CACHE, at_least=False)


def failures(checks: list[Check]) -> list[str]:
    """Rows of the checks that did not pass."""
    return [check.row() for check in checks if not check.passed]
