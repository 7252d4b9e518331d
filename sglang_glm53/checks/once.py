"""One mistake is told once: by the rule that knows most of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sglang_glm53.checks.engine import SKIPPED, Result
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.rule import FAIL

GENERAL = "flags-refused"  # whatever SGLang's own parser says
_UNKNOWN = "unrecognized arguments:"
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")


def without_repeats(results: Sequence[Result], facts: Facts) -> list[Result]:
    """Results in which SGLang's own refusal counts as skipped, where another rule that fails tells
    of an option that it names."""
    _, listed, names = (facts.args_problem or "").partition(_UNKNOWN)
    refused = set(_OPTION.findall(names if listed else facts.args_problem or ""))
    told = {
        result.rule.id: refused & set(_OPTION.findall(result.message))
        for result in results
        if result.status == FAIL and result.rule.id != GENERAL
    }
    tellers = [name for name, options in told.items() if options]
    # Of several unknown options SGLang's line may be the one that names them all.
    if not tellers or (listed and set().union(*told.values()) != refused):
        return list(results)
    return [
        Result(result.rule, SKIPPED, f"told by {', '.join(tellers)}")
        if result.rule.id == GENERAL and result.status == FAIL
        else result
        for result in results
    ]
