"""Results as a table and as JSON."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sglang_glm53 import __version__
from sglang_glm53.checks.engine import PASS, SKIPPED, STATUSES, Result
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.rule import FAIL, WARN

NARROWEST = 60  # columns
TITLE = 13  # columns of the words before versions, machine and notes
MOST = 8  # lines of a rule's details
PACKAGES = ("sglang", "torch", "transformers")


def table(
    results: Sequence[Result],
    facts: Facts,
    notes: Sequence[str],
    *,
    all_: bool = False,
    most: int = MOST,
    here: bool = True,
    columns: int | None = None,
) -> str:
    """Failures, warnings, passes as one line, and one line for each reason to skip rules.

    Args:
        all_: one line a rule that passed.
        most: lines of a rule's details.
        here: whether the machine that is judged for is this one.
        columns: width of the lines, at least 60; default: the terminal's.
    """
    wide = max(NARROWEST, columns or shutil.get_terminal_size().columns)
    head = [("versions", versions(facts)), ("machine", machine(facts))]
    if not here:
        head.append(("environment", "this machine's: its packages, plugins and variables"))
    lines = [
        _wrapped(f"{name:<{TITLE}}{text}", wide, TITLE)
        for name, text in (*head, *(("note", note) for note in notes))
    ]
    lines.append("")
    shown = [result for result in results if result.status in ((FAIL, WARN, PASS)[: 2 + all_])]
    shown.sort(key=lambda result: (FAIL, WARN, PASS).index(result.status))  # stays in order within
    for result in shown:
        what = f"{result.message}; {result.cure}" if result.message else result.rule.title
        lines.append(_wrapped(f"{result.status:<6}{result.rule.id}: {what}", wide, 6))
        lines += [f"      - {printable(detail)}" for detail in result.details[:most]]
        if (more := len(result.details) - most) > 0:
            lines.append(f"      - and {more:,} more (--json lists them)")
    passed = sum(result.status == PASS for result in results)
    if passed and not all_:
        lines.append(f"pass  {_rules(passed)} (--all names them)")
    skipped: dict[str, list[str]] = {}
    for result in results:
        if result.status == SKIPPED:
            skipped.setdefault(result.message, []).append(result.rule.id)
    for reason, ids in skipped.items():
        lines.append(_wrapped(f"skip  {_rules(len(ids))}: {reason}", wide, 6))
    return "\n".join([*lines, "", summary(results)])


def _rules(count: int) -> str:
    return f"{count} rule{'s' if count != 1 else ''}"


def _wrapped(line: str, columns: int, indent: int) -> str:
    """Lines of at most `columns`, with a hanging indent; options and paths stay whole."""
    return textwrap.fill(
        printable(line),
        columns,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def printable(text: str) -> str:
    """One line without what a terminal would obey: names of a checkpoint are anybody's."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def summary(results: Sequence[Result]) -> str:
    """ "1 fail, 2 warn, 40 pass, 12 skipped"."""
    counts = Counter(result.status for result in results)
    order = (FAIL, WARN, PASS, SKIPPED)
    return ", ".join(f"{counts[status]} {status}" for status in order)


def versions(facts: Facts) -> str:
    known = facts.versions or {}
    shown = [f"{name} {known.get(name) or 'missing'}" for name in PACKAGES]
    return ", ".join([f"sglang-glm53 {__version__}", *shown])


def machine(facts: Facts) -> str:
    if facts.gpu_name and facts.gpus:
        return f"{facts.gpus} x {facts.gpu_name}"
    return "no GPU" if facts.device in ("cpu", None) else str(facts.device)


def as_json(results: Sequence[Result], facts: Facts, notes: Sequence[str]) -> dict[str, Any]:
    """The same, for programs. The keys stay from release to release."""
    counts = Counter(result.status for result in results)
    return {
        "package": __version__,
        "versions": {name: (facts.versions or {}).get(name) for name in PACKAGES},
        "machine": machine(facts),
        "notes": list(notes),
        "counts": {status: counts[status] for status in STATUSES},
        "results": [
            {
                "id": result.rule.id,
                "title": result.rule.title,
                "status": result.status,
                "message": result.message,
                "cure": result.cure,
                "details": list(result.details),
                "source": list(result.rule.source),
            }
            for result in results
        ],
    }
