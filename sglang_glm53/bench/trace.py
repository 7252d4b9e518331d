"""Reads a torch profiler trace: which kernels ran on the GPU, how often, for how long."""

from __future__ import annotations

import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_glm53.errors import Glm53Error

NAME_LENGTH = 160  # of a kernel's name; templates run to thousands of letters
LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of work on the GPU


@dataclass(frozen=True)
class Kernel:
    """One kernel name in a step.

    Attributes:
        name: cut to `NAME_LENGTH` letters.
        calls: a step.
        us: microseconds a call, from its start to its end.
        exposed_us: microseconds a call by which it puts off the end of the step (`exposed`).
    """

    name: str
    calls: float
    us: float
    exposed_us: float

    @property
    def total_us(self) -> float:
        """Microseconds a step."""
        return self.calls * self.us


def read_events(path: Path) -> list[dict[str, Any]]:
    """The launches of a Chrome trace (.json or .json.gz) in the order in which they started.

    Raises:
        Glm53Error: the file cannot be read, is no trace, or holds no launches.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            events = json.load(file)["traceEvents"]
        found = [event for event in events if event.get("cat") in LAUNCHES]
        found.sort(key=lambda event: float(event["ts"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Glm53Error(f"{path} is no profiler trace: {error!r}") from error
    if not found:
        raise Glm53Error(f"{path}: the profiler saw nothing run on a GPU; does it have the rights?")
    return found


IDLE = "(idle)"  # the name under which `kernels` tells the time in which nothing runs


def kernels(events: Sequence[Mapping[str, Any]], steps: int) -> list[Kernel]:
    """The table of a trace of `steps` steps, the longest total first; long names are cut.

    The row `IDLE` has the gaps in which nothing runs, as often as there is one. The exposed times
    of all rows sum to the time from the first start to the last end.
    """
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event, (own, gap) in zip(events, exposed(events), strict=True):
        times[str(event["name"])[:NAME_LENGTH]].append((float(event["dur"]), own))
        if gap:
            times[IDLE].append((gap, gap))
    table = [
        Kernel(
            name, len(each) / steps, *(statistics.fmean(part) for part in zip(*each, strict=True))
        )
        for name, each in times.items()
    ]
    return sorted(table, key=lambda kernel: -kernel.total_us)


def as_rows(table: Iterable[Kernel]) -> list[list[Any]]:
    """The table as a report keeps it: name, calls a step, us a call, exposed us a call."""
    return [[k.name, k.calls, round(k.us, 3), round(k.exposed_us, 3)] for k in table]


def exposed(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """For each launch, in the order in which they started: by how many microseconds it puts off the
    time up to which the GPU has worked, and how long nothing ran before it.

    Launches of two streams overlap, and so do those of one where programmatic dependent launch
    starts a kernel before the one ahead of it has ended: the sum of their times is then more than
    the time that passes. What a launch adds to the end of the work so far is what it costs.
    """
    found: list[tuple[float, float]] = []
    reached: float | None = None
    for event in events:
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        before = start if reached is None else reached
        found.append((max(0.0, end - max(before, start)), max(0.0, start - before)))
        reached = max(before, end)
    return found


def launches_a_step(events: Sequence[Mapping[str, Any]], steps: int) -> float:
    """Launches of one step, from a trace of about `steps` steps that starts and ends anywhere.

    A name that occurs once a step marks where a step begins: between its first and its last
    occurrence lie whole steps. The median over all such names.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        places[str(event["name"])].append(index)
    counts = [
        (at[-1] - at[0]) / (len(at) - 1)
        for at in places.values()
        if len(at) > 1 and abs(len(at) - steps) <= 1
    ]
    return statistics.median(counts) if counts else len(events) / max(steps, 1)
