"""The measuring functions themselves, without a server."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from . import checks, faults, planted, settings
from . import measurements as m
from .ask import Reply, batches
from .recall import (
    DEPTHS,
    Plan,
    Question,
    Tally,
    first_haystacks,
    make_haystack,
    make_haystacks,
)
from .report import Found, Job, dense_checks


@pytest.fixture(scope="module")
def tasks() -> Any:
    """The tasks over a tokenizer built here: no checkpoint is needed."""
    from miniature.tasks import Tasks
    from miniature.tokenizer import build_tokenizer

    return Tasks(build_tokenizer())


def reply(tokens: list[int], **fields: Any) -> Reply:
    return Reply(tokens, **{"cached": 0, "retractions": 0, "verifies": 0, **fields})


# --- recall --------------------------------------------------------------------------------------


def test_questions_about_the_same_records(tasks: Any) -> None:
    """Equal but for the question; each asks for a record at its depth, which stands there once."""
    questions = make_haystack(tasks, random.Random(1), 1024, DEPTHS)
    first = questions[0]
    for question, depth in zip(questions, DEPTHS, strict=True):
        tokens, place = question.tokens, question.planted
        assert (question.depth, len(tokens)) == (depth, 1024)
        assert tokens[:-3] == first.tokens[:-3]
        assert tokens[place - 2 : place] == tokens[-2:]
        assert tokens[place] == question.answer
        keys = [tuple(tokens[i : i + 2]) for i in range(place % 4 + 2, 1021, 4)]
        assert keys.count(tuple(tokens[-2:])) == 1
    places = [question.planted for question in questions]
    assert places == sorted(places) and len(set(places)) == len(DEPTHS)
    assert places[0] < 10 and places[-1] > 1010


def test_another_question_equals_the_first_of_its_depth(tasks: Any) -> None:
    """Asking for the depth that was planted gives the planted prompt itself."""
    for context in (64, 1024, 1025, 1026, 1027):
        first, again = make_haystack(tasks, random.Random(2), context, (0.75, 0.75))
        assert again == first


def test_depths_take_turns(tasks: Any) -> None:
    plan = Plan(haystacks=5, hits=1, contexts=(64, 128))
    haystacks = make_haystacks(tasks, plan, seed=1)
    assert len(haystacks) == 10
    for context in plan.contexts:
        mine = [h for h in haystacks if h[0].context == context]
        assert sorted(h[0].depth for h in mine) == sorted(h[1].depth for h in mine) == list(DEPTHS)
    chosen = first_haystacks(haystacks, 2)
    assert [h[0].context for h in chosen] == [64, 64, 128, 128]
    assert chosen[0] is haystacks[0] and chosen[2] is haystacks[5]
    assert make_haystacks(tasks, plan, seed=1) == haystacks
    assert make_haystacks(tasks, plan, seed=2) != haystacks


def question(context: int, depth: float, answer: int) -> Question:
    return Question(context, depth, [0] * context, answer, 0)


def test_tally() -> None:
    tally = Tally()
    tally.add(question(8, 0.0, 5), [5], -0.1)
    tally.add(question(8, 0.5, 5), [6], -0.3)
    tally.add(question(16, 0.5, 5), [5, 6])
    other = Tally(ranks={1})
    other.add(question(8, 0.0, 5), [])
    tally.merge([other])
    assert (tally.accuracy(), tally.accuracy(8), tally.accuracy(16)) == (2 / 4, 1 / 3, 1.0)
    assert (tally.accuracy(8, 0.0), tally.asked(8), tally.ranks) == (0.5, 3, {1})
    assert tally.mean_logprob() == pytest.approx(-0.2)
    assert tally.as_json()["contexts"]["8"]["depths"] == {"0.0": [1, 2], "0.5": [0, 1]}
    with pytest.raises(ValueError, match="was asked"):
        tally.accuracy(32)


def test_requests_stay_short() -> None:
    parts = list(batches([[0] * n for n in (5, 5, 1, 20, 3)], most=10))
    assert parts == [[0, 1], [2], [3], [4]]


def test_haystacks_are_grouped_by_what_the_cache_holds(tasks: Any) -> None:
    haystacks = make_haystacks(tasks, Plan(4, 1, (1024,)), seed=1)
    sizes = [len(g) for g in m.groups_that_fit(haystacks, 3 * (1024 + 256))]
    assert sizes == [3, 1]
    assert [len(g) for g in m.groups_that_fit(haystacks, 1)] == [1] * 4


# --- conditions that did not come about ----------------------------------------------------------


class Canned:
    """Stands in for a server: `ask` and `capacity` are replaced."""

    def flush(self) -> None:
        pass


def test_a_hit_that_was_none_is_told(tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    haystacks = make_haystacks(tasks, Plan(1, 1, (256,)), seed=1)
    cached = iter([0, 192, 0, 128, 64, 192])

    def ask(_: Any, prompts: list[list[int]], *__: Any, **___: Any) -> list[Reply]:
        return [reply([1], cached=next(cached)) for _ in prompts]

    monkeypatch.setattr(m, "ask", ask)
    monkeypatch.setattr(m, "capacity", lambda _: 10_000)
    m.recall_with_hits(Canned(), haystacks)
    with pytest.raises(m.NotReached, match="128 of 256"):
        m.recall_with_hits(Canned(), haystacks)
    with pytest.raises(m.NotReached, match="hit the cache"):
        m.recall_with_hits(Canned(), haystacks)
    with pytest.raises(m.NotReached, match="never evicted"):
        m.recall_after_eviction(Canned(), haystacks)


def test_no_retraction_is_told(tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = m.passages(tasks, 2, 16, seed=1)
    retractions = iter([0, 0, 0, 1])

    def ask(_: Any, asked: list[list[int]], *__: Any, **___: Any) -> list[Reply]:
        answers = [p.answer for one in asked for p in prompts if p.tokens == one]
        return [reply(answer, retractions=next(retractions)) for answer in answers]

    monkeypatch.setattr(m, "ask", ask)
    with pytest.raises(m.NotReached, match="retracted"):
        m.copying_with_retraction(Canned(), prompts)
    copies = m.copying_with_retraction(Canned(), prompts)
    assert (copies.accuracy, copies.retractions) == (1.0, 1)


# --- selections ----------------------------------------------------------------------------------


def selection(rows: int, k: int, start: int, last: list[int]) -> np.ndarray:
    """What a request alone in its cache chose: everything at first, `last` in the last row."""
    chosen = np.full((rows, k), -1, dtype=np.int32)
    for row in range(rows - 1):
        chosen[row, : min(row + 1, k)] = np.arange(min(row + 1, k)) + start
    chosen[-1, : len(last)] = np.array(last) + start
    return chosen


@pytest.mark.parametrize("start", [0, 64, 640])
def test_positions_of_slots(start: int) -> None:
    assert m.positions(selection(20, 4, start, [0, 7, 19, 3]), 20, 4) == {0, 3, 7, 19}
    assert m.positions(selection(20, 4, start, [0, 7]), 20, 4) == {0, 7}


def test_slots_that_do_not_lie_together_are_told() -> None:
    with pytest.raises(m.NotReached, match="slots"):
        m.positions(selection(20, 4, 64, [0, 7, 19, 30]), 20, 4)


def test_positions_where_the_first_rows_were_dense() -> None:
    chosen = selection(20, 4, 0, [2, 5, 9, 19])
    chosen[:5] = 0
    assert m.positions(chosen, 20, 4) == {2, 5, 9, 19}


# --- copying and chat ----------------------------------------------------------------------------


def test_copies() -> None:
    copies = m.Copies()
    copies.add([1, 2, 3, 4, 5, 6, 7], reply([1, 2, 3, 4, 5, 6, 7], verifies=1))
    copies.add([1, 2, 3, 4, 5, 6, 7], reply([1, 2, 0, 4, 5, 6, 7], verifies=2, retractions=1))
    assert copies.accuracy == 13 / 14
    assert (copies.whole, copies.retractions) == (1, 1)
    assert copies.accept_length == 12 / 3  # the prefill gives each first token
    assert m.Copies(tokens=5, asked=1).accept_length is None
    with pytest.raises(ValueError):
        copies.add([1, 2], reply([1]))


def test_what_is_wrong_with_an_answer() -> None:
    said = SimpleNamespace(
        reasoning="Ones: 7+5=12.", content="17 + 25 = 42.", tool_calls=[], kind="addition"
    )
    good = {"reasoning_content": "Ones: 7+5=12.", "content": "17 + 25 = 42.", "tool_calls": None}
    assert m.what_is_wrong(good, said) == ""
    assert "content" in m.what_is_wrong({**good, "content": "41"}, said)
    assert "reasoning" in m.what_is_wrong({**good, "reasoning_content": None}, said)
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    assert "tool calls" in m.what_is_wrong({**good, "tool_calls": [call]}, said)
    asked = SimpleNamespace(
        reasoning="", content="", tool_calls=[("get_weather", {"city": "Paris"})], kind="tool"
    )
    assert m.what_is_wrong({"content": None, "tool_calls": [call]}, asked) == ""
    broken = {"function": {"name": "get_weather", "arguments": '{"city": '}}
    assert "tool calls" in m.what_is_wrong({"content": None, "tool_calls": [broken]}, asked)


def test_relative_error() -> None:
    a = torch.ones(3, 2)
    assert m.relative_error(a, a) == 0
    assert m.relative_error(a * 1.5, a) == pytest.approx(0.5)
    with pytest.raises(AssertionError):
        m.relative_error(a, a[:2])


# --- limits --------------------------------------------------------------------------------------


def tally_of(right: int, asked: int, context: int = 1024) -> Tally:
    return Tally({(context, 0.0): [right, asked]})


def test_limits_of_recall() -> None:
    def passed(right: int, asked: int) -> bool:
        return all(check.passed for check in checks.recall("x", tally_of(right, asked)))

    assert passed(10, 10) and passed(9, 10) and not passed(8, 10)
    assert passed(60, 60) and not passed(59, 60)
    assert passed(198, 200) and not passed(197, 200)


def test_a_fault_is_noticed_only_by_a_wide_margin() -> None:
    def value(of: float) -> planted.Shown:
        return planted.Shown([checks.Check("recall", of, 0.9)], [])

    one = planted.Planted("fault", lambda _: [], beyond=0.5)
    assert planted.noticed(one, value(1.0), value(0.1))
    assert not planted.noticed(one, value(1.0), value(0.8))
    assert not planted.noticed(one, value(1.0), value(1.0))
    assert not planted.noticed(one, value(0.8), value(0.1))
    beside = planted.Shown(value(1.0).judged, value(0.1).judged)
    assert not planted.noticed(one, value(1.0), beside)
    assert not planted.noticed(one, beside, value(0.1))
    error = planted.Shown([checks.Check("error", 0.7, 0.1, at_least=False)], [])
    fine = planted.Shown([checks.Check("error", 0.01, 0.1, at_least=False)], [])
    assert planted.noticed(one, fine, error)
    assert not planted.noticed(one, fine, fine)


def test_every_fault_has_a_metric() -> None:
    assert sorted(one.fault for one in planted.PLANTED) == sorted(faults.FAULTS)


def test_dense_is_held_against_the_same_side_and_cache() -> None:
    def found(setting: settings.Setting, side: str, kv: str, right: int) -> Found:
        return Found(Job(setting, side, kv), prefilled=tally_of(right, 200))

    runs = [
        found(settings.WITH_MTP, "ours", "bfloat16", 199),
        found(settings.WITH_MTP, "ours", "fp8_e4m3", 200),
        found(settings.DENSE_ON_GPU, "ours", "bfloat16", 200),
        found(settings.DENSE_ON_GPU, "ours", "fp8_e4m3", 197),
        found(settings.DENSE_ON_GPU, "stock", "bfloat16", 0),
    ]
    rows = dense_checks(runs)
    assert [check.passed for check in rows] == [True, False]
    assert [check.value for check in rows] == pytest.approx([0.005, 0.015])


# --- the faults, on made-up objects --------------------------------------------------------------


@pytest.fixture
def broken(tmp_path: Any) -> Callable[[str], faults.Faults]:
    """A function of a fault to the hooks with it on."""

    def make(fault: str) -> faults.Faults:
        (tmp_path / "active").write_text(fault)
        made = faults.Faults(tmp_path)
        made.read()
        return made

    return make


POOL = SimpleNamespace(size=256, page_size=64)


def test_shifted_keys_stay_in_the_cache(broken: Callable[[str], faults.Faults]) -> None:
    """One page further; the last page's go to the first; padding stays where it is."""
    seen: list[list[int]] = []
    slots = torch.tensor([0, 63, 64, 65, 128, 256, 319])
    broken(faults.SHIFTED_KEYS).store_key(
        lambda pool, layer, loc, key: seen.append(loc.tolist()), POOL, 0, slots, torch.zeros(7, 1)
    )
    assert seen == [[0, 63, 128, 129, 192, 64, 127]]


def test_a_stale_index_keeps_the_first_key(broken: Callable[[str], faults.Faults]) -> None:
    store = torch.zeros(320)

    def write(pool: Any, layer: int, loc: torch.Tensor, key: torch.Tensor) -> None:
        store[loc] = key[:, 0]

    one = broken(faults.STALE_INDEX)
    one.store_key(write, POOL, 0, torch.tensor([70, 71]), torch.tensor([[1.0], [2.0]]))
    one.store_key(write, POOL, 0, torch.tensor([71, 72]), torch.tensor([[8.0], [9.0]]))
    assert store[70:73].tolist() == [1.0, 2.0, 9.0]


def test_half_of_the_selection(broken: Callable[[str], faults.Faults]) -> None:
    backend = SimpleNamespace(index_topk=8)

    def select(backend: Any) -> torch.Tensor:
        return torch.arange(backend.index_topk).repeat(2, 1)

    chosen = broken(faults.HALF_TOPK).select(select, backend)
    assert chosen.tolist() == [[0, 1, 2, 3, -1, -1, -1, -1]] * 2
    assert backend.index_topk == 8


def test_neox_turns_halves(broken: Callable[[str], faults.Faults]) -> None:
    """At position 0 nothing turns; elsewhere value i turns with value i + 2, not with its
    neighbour, and what is beyond the rope part stays."""
    angle = torch.tensor([[0.0, 0.0], [0.5, 2.0]])
    table = torch.cat([angle.cos(), angle.sin()], dim=-1)
    indexer = SimpleNamespace(rope_head_dim=4, rotary_emb=SimpleNamespace(cos_sin_cache=table))
    keys = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]).repeat(2, 1)
    queries = keys[:, None].repeat(1, 3, 1)
    one = broken(faults.NEOX)
    turned_queries, turned = one.rotate(None, indexer, queries, keys, torch.tensor([0, 1]))
    assert torch.equal(turned[0], keys[0])
    complex_values = torch.complex(keys[1, :2], keys[1, 2:4]) * torch.polar(torch.ones(2), angle[1])
    expected = torch.cat([complex_values.real, complex_values.imag, keys[1, 4:]])
    assert torch.allclose(turned[1], expected)
    assert torch.allclose(turned_queries[1], expected.expand(3, 5))
    assert one.rotate(None, indexer, None, keys, torch.tensor([0, 1]))[0] is None


def test_no_fault_changes_nothing(broken: Callable[[str], faults.Faults]) -> None:
    off = broken("")
    assert off.rotate(lambda *a: "as it was", None, None, None, None) == "as it was"
    assert off.select(lambda *a: "as it was", SimpleNamespace(index_topk=8)) == "as it was"
    assert off.reuse(lambda _, given: given, SimpleNamespace(skip_topk=True), "given") == "given"
    assert off.route(lambda *a: "as it was", None, None) == "as it was"
    assert off.acted == 0
