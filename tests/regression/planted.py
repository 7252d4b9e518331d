"""The planted faults, each with the metric that must notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from server.harness import Server

from . import checks, faults
from . import measurements as m
from .checks import Check
from .recall import Haystack, Plan, make_haystacks
from .settings import COPY_LENGTH, SEED
from .switch import Switch

if TYPE_CHECKING:
    from miniature.tasks import Tasks


Metric = Callable[["Bench"], list[Check]]


@dataclass(frozen=True)
class Bench:
    """A running server with its switch, and what it is asked.

    healthy: what each metric gave without a fault; several faults share a metric.
    """

    server: Server
    switch: Switch
    tasks: Tasks
    config: dict[str, Any]
    healthy: dict[Metric, list[Check]] = field(default_factory=dict)


def recall(bench: Bench) -> list[Check]:
    """Ten questions about two haystacks of 1,024 and of 4,096 tokens."""
    prefilled, hits = m.recall_with_hits(
        bench.server, make_haystacks(bench.tasks, Plan(2, 4, (1024, 4096)), SEED + 1)
    )
    both = prefilled.merge([hits])
    return [*checks.recall("recall", both), checks.answer_logprob("recall", both)]


def recall_again(bench: Bench) -> list[Check]:
    """Prompts of 1,024 tokens, asked once more after others have taken their slots."""
    room = m.capacity(bench.server)
    haystacks = make_haystacks(bench.tasks, Plan(room // 1024 + 4, 0, (1024,)), SEED + 2)
    asked: list[Haystack] = haystacks[:4]
    bench.server.flush()
    first, _ = m.recall(bench.server, [haystack[0] for haystack in asked])
    m.recall(bench.server, [haystack[0] for haystack in haystacks[4:]])
    again = m.recall_after_eviction(bench.server, asked)
    return [*checks.recall("first asked", first), *checks.recall("recall after eviction", again)]


def selected(bench: Bench) -> list[Check]:
    """Distinct positions that the answering row selects, of one prompt of 1,024 tokens."""
    (haystack,) = make_haystacks(bench.tasks, Plan(1, 0, (1024,)), SEED + 3)
    found = m.planted_in_selection(bench.server, haystack, bench.config)
    return checks.selected_size("recall", found, bench.config["index_topk"])


def accept_length(bench: Bench) -> list[Check]:
    """Two passages copied with MTP."""
    copies = m.copying(bench.server, m.passages(bench.tasks, 2, COPY_LENGTH, SEED + 4))
    return [checks.accept_length("copying", copies)]


def draft_cache(bench: Bench) -> list[Check]:
    """The draft's cache after a copy beside that of a fresh prefill."""
    (prompt,) = m.passages(bench.tasks, 1, COPY_LENGTH, SEED + 5)
    error = m.draft_cache_error(bench.server, bench.switch, prompt, bench.switch.next_name())
    return [checks.draft_cache("copying", error)]


@dataclass(frozen=True)
class Planted:
    """A fault and what must notice it.

    metric: one of its checks must fail with the fault, and be `beyond`: far from its limit, not
    just past it. also: what is told beside it. speculates: whether it needs the server with MTP.
    """

    fault: str
    metric: Metric
    beyond: float
    also: tuple[Metric, ...] = ()
    speculates: bool = False


PLANTED = (
    Planted(faults.NEOX, recall, 0.5),
    Planted(faults.OTHER_SET, recall, 0.5),
    Planted(faults.SHIFTED_KEYS, recall, 0.5),
    Planted(faults.STALE_INDEX, recall_again, 0.5),
    Planted(faults.HALF_TOPK, selected, 64, also=(recall,)),
    Planted(faults.NO_BIAS, recall, 0.5),
    Planted(faults.STALE_DRAFT, draft_cache, 0.3, also=(accept_length,), speculates=True),
)


@dataclass(frozen=True)
class Shown:
    """Checks of the metric that must notice, and of what is told beside it."""

    judged: list[Check]
    told: list[Check]


def measure(bench: Bench, planted: Planted) -> Shown:
    """Without a fault; each metric is taken once a server."""
    for metric in (planted.metric, *planted.also):
        if metric not in bench.healthy:
            bench.server.flush()
            bench.healthy[metric] = metric(bench)
    told = [check for metric in planted.also for check in bench.healthy[metric]]
    return Shown(bench.healthy[planted.metric], told)


def measure_faulty(bench: Bench, planted: Planted) -> Shown:
    """With the fault on; the cache is empty before and after."""
    bench.server.flush()
    with bench.switch.fault(planted.fault):
        judged = planted.metric(bench)
        told = [check for metric in planted.also for check in metric(bench)]
    bench.server.flush()
    return Shown(judged, told)


def noticed(planted: Planted, healthy: Shown, faulty: Shown) -> bool:
    """Whether all is well without the fault, and one check fails by a wide margin with it."""
    return all(check.passed for check in (*healthy.judged, *healthy.told)) and any(
        not check.passed and check.past(planted.beyond) for check in faulty.judged
    )
