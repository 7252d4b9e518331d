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
    """One kernel name in a step: calls a step, microseconds a call."""

    name: str
    calls: float
    us: float

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


def kernels(events: Iterable[Mapping[str, Any]], steps: int) -> list[Kernel]:
    """The table of a trace of `steps` steps, the longest total first; long names are cut."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[str(event["name"])[:NAME_LENGTH]].append(float(event["dur"]))
    table = [
        Kernel(name, len(each) / steps, statistics.fmean(each)) for name, each in times.items()
    ]
    return sorted(table, key=lambda kernel: -kernel.total_us)


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
