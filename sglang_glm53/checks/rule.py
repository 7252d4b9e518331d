"""What a rule is. Rules are data: a condition on facts, and the words that go with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_glm53.checks.facts import Facts

FAIL, WARN = "fail", "warn"

# What a condition says of the facts: None or False: they are fine. True, or the values that the
# rule's message and cure name: they are not.
Verdict = Mapping[str, Any] | bool | None


@dataclass(frozen=True)
class Rule:
    """One row.

    Attributes:
        id: lower case with hyphens; stays the same from release to release.
        title: what is checked, in a few words.
        severity: "fail" (the server would not start, or would give garbage, or hang) or "warn".
        reads: facts that the condition needs; where one is unknown the rule is skipped.
        condition: see `Verdict`. It is called only when all of `reads` are known.
        message: what was found, as a format string of the condition's values; one line.
        cure: what to do, likewise.
        symptom: what a user sees where nobody checks.
        cause: why.
        source: where it was reported ("sgl-project/sglang#32176") or read, one or more.
        at_start: whether the rule also runs inside a server that starts. Those that only a person
            at a terminal can use, or that the server checks anyway, do not.
    """

    id: str
    title: str
    severity: str
    reads: tuple[str, ...]
    condition: Callable[[Facts], Verdict]
    message: str
    cure: str
    symptom: str
    cause: str
    source: tuple[str, ...]
    at_start: bool = True
