"""What the servers gave: kept in a file as it comes, judged, and printed as a table."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import checks, settings
from .checks import Check
from .recall import Tally
from .settings import Setting


@dataclass(frozen=True)
class Job:
    """One server to start and measure. kv: the cache's dtype, None for the default of a CPU."""

    setting: Setting
    side: str
    kv: str | None

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.side, self.setting.name, self.kv]))


@dataclass
class Found:
    """What one server gave.

    record: values by measurement. prefilled: the tally of fresh prompts, for the dense comparison.
    faults: one entry a planted fault. errors: what could not be measured, and why.
    """

    job: Job
    record: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    prefilled: Tally | None = None
    faults: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def fail(self, what: str, error: Exception) -> None:
        """Note why `what` could not be measured; prints the traceback."""
        traceback.print_exception(error)
        line = " ".join(str(error).split())[:300] or type(error).__name__
        self.errors.append(f"{what}: {line}")

    def as_json(self) -> dict[str, Any]:
        return {
            "side": self.job.side,
            "setting": self.job.setting.name,
            "reaches": self.job.setting.reaches,
            "kv": self.job.kv,
            **self.record,
            "checks": [check.as_json() for check in self.checks],
            "faults": self.faults,
            "errors": self.errors,
        }

    def failures(self) -> list[str]:
        """What did not pass or could not be measured, and the faults that nobody noticed."""
        return [
            *(f"{self.job.name}: {error}" for error in self.errors),
            *checks.failures(self.checks),
            *(f"{row['fault']} went unnoticed" for row in self.faults if not row["seen"]),
        ]


@dataclass
class Report:
    """The results so far, in `file`. given: what the call was made with."""

    file: Path
    given: dict[str, Any]
    found: list[Found] = field(default_factory=list)

    def keep(self, found: Found) -> None:
        """Add one server's results and write the file."""
        self.found.append(found)
        content = {
            **self.given,
            "runs": {found.job.name: found.as_json() for found in self.found},
            "dense": [check.as_json() for check in dense_checks(self.found)],
            "failures": self.failures(),
        }
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.rename(self.file)

    def failures(self) -> list[str]:
        """Those of our classes; SGLang's own is measured beside them, and judged by nothing."""
        ours = [found for found in self.found if found.job.side == "ours"]
        rows = [row for found in ours for row in found.failures()]
        return rows + checks.failures(dense_checks(self.found))


def dense_checks(found: Sequence[Found]) -> list[Check]:
    """Each dense run of ours beside the sparse one that prefilled the same prompts whole."""
    whole = (settings.WHOLE_PLAIN.name, settings.WITH_MTP.name)
    rows: list[Check] = []
    for dense in (f for f in found if f.job.setting.is_dense and f.prefilled):
        sparse = [
            f
            for f in found
            if f.job.setting.name in whole
            and f.prefilled is not None
            and (f.job.side, f.job.kv) == (dense.job.side, dense.job.kv)
        ]
        if sparse and dense.job.side == "ours":
            a, b = sparse[0].prefilled, dense.prefilled
            rows += [checks.dense_gap(c, a.accuracy(c), b.accuracy(c)) for c in a.contexts()]
    return rows


def table(found: Sequence[Found]) -> str:
    """One line a run: accuracies by context, hits, after eviction, planted, copies, chat."""
    lines = [
        f"{'run':30} {'recall 1K / 4K / 8K':22} {'hits':>6} {'evict':>6} {'top-k':>6} "
        f"{'copied':>7} {'accept':>7} {'retr.':>6} {'chat':>5}"
    ]

    def share(value: float | None, width: int) -> str:
        return f"{value:{width}.3f}" if value is not None else " " * (width - 1) + "-"

    for one in found:
        r = one.record
        of = [c["accuracy"] for c in r.get("recall", {}).get("contexts", {}).values()]
        selected = list(r.get("selected", {}).values())
        lines.append(
            f"{one.job.name:30} {' / '.join(f'{a:.3f}' for a in of):22} "
            + " ".join(
                [
                    share(r.get("hits", {}).get("accuracy"), 6),
                    share(r.get("after_eviction", {}).get("accuracy"), 6),
                    share(selected[-1]["share"] if selected else None, 6),
                    share(r.get("copying", {}).get("accuracy"), 7),
                    share(r.get("copying", {}).get("accept_length"), 7),
                    share(r.get("retraction", {}).get("accuracy"), 6),
                    share(r.get("chat", {}).get("share"), 5),
                ]
            )
        )
    return "\n".join(lines)
