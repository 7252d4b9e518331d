"""Rules held against facts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.rule import FAIL, WARN, Rule
from sglang_glm53.errors import Glm53Error, describe

PASS, SKIPPED = "pass", "skipped"
NOT_JUDGED = "could not be judged: "
STATUSES = (FAIL, WARN, SKIPPED, PASS)


@dataclass(frozen=True)
class Result:
    """What became of one rule.

    Attributes:
        status: "pass", "warn", "fail" or "skipped".
        message: what was found, or why the rule was skipped; "" for a pass.
        cure: what to do; "" for a pass.
        details: one line for each thing that was found, where the rule lists them.
    """

    rule: Rule
    status: str
    message: str = ""
    cure: str = ""
    details: tuple[str, ...] = ()


def check(rule: Rule, facts: Facts) -> Result:
    """Hold one rule against the facts."""
    unknown = facts.unknown(rule.reads)
    if unknown is not None:
        return Result(rule, SKIPPED, unknown)
    found = rule.condition(facts)
    if found is None or found is False:
        return Result(rule, PASS)
    values = {} if found is True else found
    message, cure = rule.message.format(**values), rule.cure.format(**values)
    return Result(rule, rule.severity, message, cure, tuple(values.get("details", ())))


def run(rules: Iterable[Rule], facts: Facts) -> list[Result]:
    """Hold rules against the facts, in their order."""
    return [check(rule, facts) for rule in rules]


def judge(rules: Iterable[Rule], facts: Facts) -> list[Result]:
    """As `run`, but a rule that raises counts as skipped, and says so: options as written may have
    any value, and a mistake of ours must not stop somebody's server."""
    results = []
    for rule in rules:
        try:
            results.append(check(rule, facts))
        except Glm53Error:
            raise  # a file that cannot be read, in one line
        except Exception as error:
            results.append(Result(rule, SKIPPED, f"{NOT_JUDGED}{rule.id}: {describe(error)}"))
    return results


def raise_first(results: Iterable[Result]) -> None:
    """Raise the first failure as one line.

    Raises:
        Glm53Error: some rule failed.
    """
    for result in results:
        if result.status == FAIL:
            raise Glm53Error(f"{result.message}; {result.cure} [{result.rule.id}]")
