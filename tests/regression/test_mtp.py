"""With MTP 5-1-6: whole prefill, hits, retraction, accept length, chat; the draft's fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from server.harness import Server

from . import checks
from . import measurements as m
from .planted import PLANTED, Bench, Planted
from .recall import first_haystacks, make_haystacks
from .settings import COPY_LENGTH, SEED, WITH_MTP, Amount
from .switch import Switch
from .test_plain import expect, notices

pytestmark = pytest.mark.server("regression mtp")


@pytest.fixture(scope="module")
def bench(start: Callable[..., tuple[Server, Switch]], tasks: Any, config: dict[str, Any]) -> Bench:
    """The server with MTP."""
    server, switch = start(WITH_MTP, switchable=True)
    return Bench(server, switch, tasks, config)


def test_recall(bench: Bench, amount: Amount) -> None:
    """Prompts prefilled whole, and hits on their prefix."""
    haystacks = make_haystacks(bench.tasks, amount.recall, SEED)
    prefilled, hits = m.recall_with_hits(bench.server, haystacks)
    print(f"whole {prefilled.as_json()}\nhits {hits.as_json()}")
    # In CI the longest context is evicted on the server without MTP alone.
    again = m.recall_after_eviction(
        bench.server, first_haystacks(haystacks, amount.again)[: None if amount.full else -1]
    )
    print(f"after eviction {again.as_json()}")
    expect(
        [
            *checks.recall("whole", prefilled),
            *checks.recall("prefix hit", hits),
            *checks.recall("after eviction", again),
        ]
    )


def test_accept_length(bench: Bench, amount: Amount) -> None:
    """One passage at a time: what is drafted is mostly right, and what is written is."""
    prompts = m.passages(bench.tasks, amount.copies, COPY_LENGTH, SEED)
    copies = m.copying(bench.server, prompts)
    print(copies.as_json())
    expect([checks.accept_length("MTP", copies), checks.copied("MTP", copies)])


def test_copying_with_retraction(bench: Bench, amount: Amount) -> None:
    prompts = m.passages(bench.tasks, max(3, amount.copies), COPY_LENGTH, SEED + 1)
    copies = m.copying_with_retraction(bench.server, prompts)
    print(copies.as_json())
    expect([checks.copied("MTP, retraction", copies)])


def test_chat(bench: Bench, amount: Amount) -> None:
    asked = m.conversations(bench.tasks, amount.chats, SEED)
    share, wrong = m.chat_accuracy(bench.server, asked)
    print("\n".join(wrong))
    expect([checks.chat("MTP", share)])


@pytest.mark.parametrize(
    "planted", [p for p in PLANTED if p.speculates], ids=lambda planted: planted.fault
)
def test_fault(planted: Planted, bench: Bench) -> None:
    notices(bench, planted)
