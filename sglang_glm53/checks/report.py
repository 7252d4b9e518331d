"""Results as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sglang_glm53 import __version__
from sglang_glm53.checks.engine import PASS, SKIPPED, STATUSES, Result
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.rule import FAIL, WARN

PACKAGES = ("sglang", "torch", "transformers")


def table(results: Sequence[Result], facts: Facts, notes: Sequence[str]) -> str:
    """One line a rule, failures first; rules that were skipped for one reason share a line."""
    width = max((len(result.rule.id) for result in results), default=0)
    lines = [f"{'versions':<9} {versions(facts)}", f"{'machine':<9} {machine(facts)}"]
    lines += [f"{'note':<9} {note}" for note in notes]
    lines.append("")
    for status in (FAIL, WARN, PASS):
        for result in results:
            if result.status == status:
                what = f"{result.message}; {result.cure}" if result.message else result.rule.title
                lines.append(f"{status:<5} {result.rule.id:<{width}}  {what}")
    skipped: dict[str, list[str]] = {}
    for result in results:
        if result.status == SKIPPED:
            skipped.setdefault(result.message, []).append(result.rule.id)
    for reason, ids in skipped.items():
        plural = "rules" if len(ids) > 1 else "rule"
        lines.append(f"skip  {f'{len(ids)} {plural}':<{width}}  {reason}")
    return "\n".join([*lines, "", summary(results)])


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
                "source": list(result.rule.source),
            }
            for result in results
        ],
    }
