"""The watchdog on healthy requests of a trained model: copies, which accept nearly every draft, and
chat. Planted faults are in tests/server/test_watch.py, which needs no trained weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server.harness import Server

from . import measurements as m
from .settings import SEED, WITH_MTP, Amount
from .switch import Switch

pytestmark = pytest.mark.server("regression mtp")

FULL, FEW, AT_ONCE = 1000, 30, 8
LONGEST = 256  # tokens of a copy: a whole block of repetition


def alarms(server: Server) -> dict[str, int]:
    """The alarms of all ranks since the server's start."""
    found: dict[str, int] = {}
    for state in server.get("/server_info")["internal_states"]:
        for kind, count in state["glm53"]["alarms"].items():
            found[kind] = found.get(kind, 0) + count
    return found


def ask_healthy(server: Server, tasks: Any, count: int, seed: int) -> list[float]:
    """`count` requests, two of three copies of 130 to 256 tokens; the copies' accept lengths."""
    rng = random.Random(f"healthy {seed}")
    lengths: list[float] = []
    copies = count * 2 // 3
    while copies > 0:
        prompts = m.passages(
            tasks, min(AT_ONCE, copies), rng.randrange(130, LONGEST), rng.getrandbits(30)
        )
        lengths.append(m.copying(server, prompts, together=True).accept_length or 0.0)
        copies -= len(prompts)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = m.conversations(tasks, count - count * 2 // 3, seed)
        list(pool.map(lambda one: m.ask_conversation(server, one), asked))
    return lengths


def test_healthy_requests_raise_no_alarm(
    start: Callable[..., tuple[Server, Switch]], tasks: Any, amount: Amount
) -> None:
    """30 in CI, 1,000 in a full run; the copies' drafts must be right for this to say anything."""
    server, _ = start(WITH_MTP, switchable=True)
    before = alarms(server)
    lengths = ask_healthy(server, tasks, FULL if amount.full else FEW, SEED)
    assert alarms(server) == before
    assert sum(lengths) / len(lengths) > 2
