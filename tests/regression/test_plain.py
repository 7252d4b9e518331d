"""Without speculation: chunked prefill, prefix hits, eviction, retraction, chat; six faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from server.harness import Server

from . import checks
from . import measurements as m
from .planted import PLANTED, Bench, Planted, measure, measure_faulty, noticed
from .recall import first_haystacks, make_haystacks
from .settings import COPY_LENGTH, PLAIN, SEED, Amount
from .switch import Switch

pytestmark = pytest.mark.server("regression plain")


@pytest.fixture(scope="module")
def bench(start: Callable[..., tuple[Server, Switch]], tasks: Any, config: dict[str, Any]) -> Bench:
    """The plain server."""
    server, switch = start(PLAIN, switchable=True)
    return Bench(server, switch, tasks, config)


def test_recall(bench: Bench, amount: Amount) -> None:
    """Chunked prefill, hits on its prefix, and once more after eviction."""
    haystacks = make_haystacks(bench.tasks, amount.recall, SEED)
    prefilled, hits = m.recall_with_hits(bench.server, haystacks)
    before = m.evicted_tokens(bench.server)
    again = m.recall_after_eviction(bench.server, first_haystacks(haystacks, amount.again))
    evicted = m.evicted_tokens(bench.server) - before
    assert evicted > 0, "nothing was evicted"
    print(f"chunked {prefilled.as_json()}\nhits {hits.as_json()}")
    print(f"after eviction (of {evicted} tokens meanwhile) {again.as_json()}")
    expect(
        [
            *checks.recall("chunked", prefilled),
            *checks.recall("prefix hit", hits),
            *checks.recall("after eviction", again),
        ]
    )


def test_the_indexer_finds_the_planted_value(bench: Bench, amount: Amount) -> None:
    """The set of the last full layer, which the shared layers use, holds the value's position."""
    haystacks = make_haystacks(bench.tasks, amount.recall, SEED + 6)
    chosen = [haystack[0] for haystack in first_haystacks(haystacks, amount.selected)]
    found = m.planted_in_selection(bench.server, chosen, bench.config)
    print({layer: one.as_json() for layer, one in found.items()})
    expect(checks.planted("recall", found, bench.config["index_topk"]))


def test_copying_with_retraction(bench: Bench, amount: Amount) -> None:
    prompts = m.passages(bench.tasks, max(3, amount.copies), COPY_LENGTH, SEED)
    copies = m.copying_with_retraction(bench.server, prompts)
    print(copies.as_json())
    expect([checks.copied("retraction", copies)])


def test_chat(bench: Bench, amount: Amount) -> None:
    share, wrong = m.chat_accuracy(bench.server, m.conversations(bench.tasks, amount.chats, SEED))
    print("\n".join(wrong))
    expect([checks.chat("plain", share)])


def test_seventeen_and_twenty_five(bench: Bench) -> None:
    """The answer apart from its reasoning, as --reasoning-parser glm45 gives it."""
    message = m.chat(bench.server, [{"role": "user", "content": "17+25"}])
    print(message)
    assert "42" in message["content"]
    assert message["reasoning_content"].strip()
    assert "think>" not in message["content"] + message["reasoning_content"]


def test_a_tool_is_called(bench: Bench) -> None:
    """As --tool-call-parser glm47 gives it."""
    from miniature.conversations import tool

    message = m.chat(
        bench.server,
        [{"role": "user", "content": "What is the weather in Paris?"}],
        [tool("get_weather", "Get the current weather of a city.")],
    )
    print(message)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert m.arguments_of(call) == {"city": "Paris"}


@pytest.mark.parametrize(
    "planted", [p for p in PLANTED if not p.speculates], ids=lambda planted: planted.fault
)
def test_fault(planted: Planted, bench: Bench) -> None:
    notices(bench, planted)


# --- shared with test_mtp ------------------------------------------------------------------------


def expect(found: list[checks.Check]) -> None:
    """All checks pass; prints them."""
    print("\n".join(check.row() for check in found))
    assert not checks.failures(found), "\n".join(checks.failures(found))


def notices(bench: Bench, planted: Planted) -> None:
    """The metric passes without the fault, and fails by a wide margin with it."""
    healthy = measure(bench, planted)
    expect([*healthy.judged, *healthy.told])
    faulty = measure_faulty(bench, planted)
    for check in (*faulty.judged, *faulty.told):
        print(f"with {planted.fault}: {check.row()}")
    assert noticed(planted, healthy, faulty)
