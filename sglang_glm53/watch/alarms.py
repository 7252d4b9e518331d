"""What an alarm does: a counter, one log line with the request's id, and an end if asked for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sglang_glm53.watch.options import Options
from sglang_glm53.watch.request import ACCEPT_LENGTH, ACCEPT_RATE, REPETITION, Alarm

logger = logging.getLogger(__name__)

NOT_FINITE = "not_finite"
BAD_SLOT = "bad_slot"
NOT_WRITTEN = "not_written"
KINDS = (ACCEPT_LENGTH, ACCEPT_RATE, REPETITION, NOT_FINITE, BAD_SLOT, NOT_WRITTEN)
_TOLD = "_glm53_told"  # on a request: the kinds that were raised for it
METRIC = "sglang:glm53_watch_alarms_total"

# What to look at, for the line.
CAUSES = {
    ACCEPT_LENGTH: "a draft that is broken (glm53 check DIR), or a cache that holds another "
    "request's tokens (flush_cache, then ask again)",
    ACCEPT_RATE: "a cache that holds other tokens than the request's (flush_cache, then ask again)",
    REPETITION: "a loop of the model's, or a cache that holds other tokens than the request's "
    "(flush_cache, then ask again at another temperature)",
    NOT_FINITE: "weights that were not loaded (glm53 check DIR), or an overflow in a kernel",
    BAD_SLOT: "the scheduler and the cache disagree about who owns a page",
    NOT_WRITTEN: "a kernel skipped cache entries, which keep what another request left there",
}


@dataclass
class Book:
    """The alarms of one scheduler process.

    Attributes:
        counts: alarms of each kind since the start.
        waiting: alarms found while a pass ran, by request id, until its result is processed.
    """

    options: Options
    counts: Counter[str] = field(default_factory=Counter)
    waiting: list[tuple[str, Alarm]] = field(default_factory=list)
    _counter: Any = None
    _labels: dict[str, str] | None = None

    def count_in(self, collector: Any) -> None:
        """Show the counts among SGLang's metrics, with SGLang's labels for this process.

        Args:
            collector: SGLang's SchedulerMetricsCollector.
        """
        if self._labels is not None:
            return
        # Imported late: the client reads where several processes share their files.
        from prometheus_client import Counter as Metric

        self._labels = {str(name): str(value) for name, value in collector.labels.items()}
        make = getattr(collector, "_counter_cls", None) or Metric
        self._counter = make(
            name=METRIC,
            documentation="Alarms of sglang-glm53's watchdog (GLM53_WATCH).",
            labelnames=[*self._labels, "kind"],
        )
        for kind in KINDS:
            self._counter.labels(**self._labels, kind=kind).inc(self.counts[kind])

    def raise_alarm(self, alarm: Alarm, request: Any, *, tells: bool, may_abort: bool) -> None:
        """Count an alarm, tell it, and mark its request for its end; once a request and kind.

        Args:
            request: SGLang's Req.
            tells: whether this rank speaks for the others that see the same.
            may_abort: whether every rank that must agree on the end sees this alarm.
        """
        told = request.__dict__.setdefault(_TOLD, set())
        if alarm.kind in told:
            return
        told.add(alarm.kind)
        aborts = self.options.abort and may_abort and not request.finished()
        if tells:
            self.counts[alarm.kind] += 1
            if self._counter is not None:
                self._counter.labels(**self._labels, kind=alarm.kind).inc()
            logger.warning(
                "sglang-glm53 watch: request %s: %s: %s; likely %s%s",
                request.rid,
                alarm.kind,
                alarm.says,
                CAUSES[alarm.kind],
                "; the request is aborted (GLM53_WATCH=abort)" if aborts else "",
            )
        if aborts:
            request.to_finish = _end(alarm)

    def deliver(self, requests: Iterable[Any], *, tells: bool, may_abort: bool) -> None:
        """Raise the alarms that waited for these requests, and drop those of requests gone."""
        by_id = {request.rid: request for request in requests}
        waiting, self.waiting = self.waiting, []
        for rid, alarm in waiting:
            if rid in by_id:
                self.raise_alarm(alarm, by_id[rid], tells=tells, may_abort=may_abort)
            else:
                self.waiting.append((rid, alarm))
        del self.waiting[:-64]  # of requests that ended meanwhile

    def block(self) -> dict[str, int]:
        """Counts by kind, zeros left out."""
        return {kind: self.counts[kind] for kind in KINDS if self.counts[kind]}


def _end(alarm: Alarm) -> Any:
    """SGLang's finish reason: an error of the server's, which a client may try again."""
    from http import HTTPStatus

    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return FINISH_ABORT(
        f"The watchdog ended this request: {alarm.kind}: {alarm.says}.",
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "InternalServerError",
    )
