"""A short fault run on a server that others use too; fault_run.py has the long one, with kills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import FLOAT32
from .fault_kinds import KINDS
from .fault_run import Report, answer, run, settle
from .harness import ServerPool
from .test_eagle import eagle_arguments

SECONDS, STREAMS = 12, 24


@pytest.mark.server("eagle 3-1-4-share1")
def test_mixed_streams_leave_a_server_as_it_was(
    servers: ServerPool, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Aborts, clients that leave or read slowly, and what must be refused: nothing ends the
    server, hangs or keeps a page, and every refusal is a 4xx with a reason."""
    server = servers.get(tiny_checkpoint(), *FLOAT32, *eagle_arguments(3, 4))
    settle(server)
    said, free = answer(server), server.flush()
    report = Report()
    run(server, report, seconds=SECONDS, streams=STREAMS)
    assert report.wrong == []
    # Not every kind comes up in so few seconds; what a healthy client gets, and a refusal, do.
    assert report.outcomes["stream: 200"] and report.tokens > 0
    assert any(name.endswith(": 400") for name in report.outcomes)
    settle(server)
    assert answer(server) == said
    settle(server)
    assert server.flush() == free > 0


def test_the_kinds_are_what_the_run_is_for() -> None:
    names = {kind.__name__ for kind, weight in KINDS if weight > 0}
    assert names >= {
        *("stream", "slow_reader", "chat", "surrogate", "leave", "abort"),
        *("oversized", "huge_max_tokens", "bad_json", "wrong_role", "wrong_field"),
    }
