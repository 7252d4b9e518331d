"""The watchdog's judgement, options, alarms and probe; no server."""

from __future__ import annotations

import logging
import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_glm53.errors import Glm53Error
from sglang_glm53.watch import alarms, hooks, logits, options, probe, slots
from sglang_glm53.watch.alarms import Book
from sglang_glm53.watch.options import Options
from sglang_glm53.watch.request import (
    ACCEPT_LENGTH,
    ACCEPT_RATE,
    REPETITION,
    Alarm,
    Watched,
    shortest_period,
)

STEPS = 5  # drafts a pass


def served(
    lengths: list[int],
    tokens: list[int] | None = None,
    prompt: list[int] | None = None,
    given: Options | None = None,
) -> dict[str, int]:
    """Feed passes of these accept lengths: each kind of alarm, and after how many tokens."""
    output = array("q")
    watched = Watched(given or Options(), prompt or [], output)
    text = iter(tokens if tokens is not None else range(sum(lengths)))
    found: dict[str, int] = {}
    for length in lengths:
        new = [next(text) for _ in range(length)]
        for alarm in (watched.speculated(new, STEPS), watched.repeated()):
            if alarm is not None:
                found.setdefault(alarm.kind, len(output) + length)
        output.extend(new)
    return found


def of_length(mean: float, tokens: int, seed: int) -> list[int]:
    """Accept lengths of `tokens` tokens with about that mean."""
    rng = random.Random(seed)
    share = (mean - 1) / STEPS
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(1 + sum(rng.random() < share for _ in range(STEPS)))
    return lengths


# --- accept length ------------------------------------------------------------------------------


def test_a_draft_that_never_agrees_alarms_after_128_tokens() -> None:
    assert served([1] * 300) == {ACCEPT_LENGTH: 128}


@pytest.mark.parametrize(
    ("mean", "alarms_"), [(1.15, True), (1.2, True), (1.6, False), (3.5, False)]
)
def test_the_threshold_is_1_4(mean: float, alarms_: bool) -> None:
    for seed in range(50):
        assert (ACCEPT_LENGTH in served(of_length(mean, 130, seed))) == alarms_, seed


def test_a_request_that_breaks_late_alarms_within_256_tokens() -> None:
    healthy = of_length(3.5, 1000, 1)
    found = served(healthy + [1] * 300)
    assert sum(healthy) < found[ACCEPT_LENGTH] <= sum(healthy) + 256


def test_less_than_128_tokens_are_not_judged() -> None:
    assert served([1] * 127) == {}


def test_a_grammar_may_disagree_with_its_draft() -> None:
    watched = Watched(Options(), [], array("q"))
    assert [watched.speculated([7], STEPS, judge=False) for _ in range(300)] == [None] * 300


# --- repetition and accept rate -----------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 3, 17, 32])
def test_a_high_rate_alarms_with_repetition_alone(period: int) -> None:
    lengths = [6] * 60
    varied = random.Random(period).sample(range(100_000), sum(lengths))
    block = varied[:period]
    looping = (block * (sum(lengths) // period + 1))[: sum(lengths)]
    assert served(lengths, varied) == {}
    assert served(lengths, looping)[ACCEPT_RATE] <= 132
    assert served(lengths, looping, prompt=varied + looping) == {}


def test_repetition_alone_alarms_within_300_tokens_and_not_where_the_prompt_has_it() -> None:
    loop = [7, 8, 9] * 200
    found = served([1] * 600, loop, given=Options(accept=0))
    assert 256 <= found[REPETITION] <= 256 + 32 + 1
    assert served([1] * 600, loop, prompt=[1, 2, *loop, 3], given=Options(accept=0)) == {}
    assert REPETITION in served([1] * 600, loop, prompt=loop[:200], given=Options(accept=0))


def test_a_prompt_is_searched_by_ids_and_not_by_bytes() -> None:
    """256 times id 1 << 8 looks, a byte further, like 256 times id 1."""
    ones = [1] * 400
    assert REPETITION in served([1] * 400, ones, prompt=[256] * 400, given=Options(accept=0))


def test_1000_healthy_requests_raise_no_alarm() -> None:
    """Text of any length, and copies of prompts that hold tables and rulers, at any rate."""
    rng = random.Random(11)
    for request in range(1000):
        mean = rng.choice((2.0, 2.8, 3.5, 4.5, 5.9, 6.0))
        lengths = of_length(mean, rng.randrange(20, 900), request)
        total = sum(lengths)
        text = [rng.randrange(500) for _ in range(total)]
        prompt = [rng.randrange(500) for _ in range(50)]
        if request % 2:  # copying, of a passage with a run of one token
            at = rng.randrange(total)
            text[at : at + 400] = [5] * len(text[at : at + 400])
            prompt = prompt + text
        assert served(lengths, text, prompt) == {}, request


@pytest.mark.parametrize("seed", range(20))
def test_the_shortest_period_is_that_of_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    block = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
    tokens = array("q", (block * 20)[: rng.randrange(30, 60)])
    if rng.random() < 0.3:
        tokens[rng.randrange(len(tokens))] = 9
    first = next(
        (p for p in range(1, 13) if all(tokens[i] == tokens[i - p] for i in range(p, len(tokens)))),
        0,
    )
    assert shortest_period(tokens, 12) == first


# --- options ------------------------------------------------------------------------------------


def test_options_are_words_and_numbers() -> None:
    assert options.parse("") == Options()
    asked = options.parse("abort, debug,no-probe,accept=1.2,rate=0.9,after=64,repeat=512")
    assert asked == Options(
        abort=True, debug=True, probe=False, accept=1.2, rate=0.9, after=64, repeat=512
    )
    assert options.parse("off").off


@pytest.mark.parametrize(
    "text", ["on", "abort=1", "accept", "after=1.5", "after=3", "accept=nan", "rate=-1", "repeat="]
)
def test_what_means_nothing_is_one_line(text: str) -> None:
    with pytest.raises(Glm53Error, match="GLM53_WATCH") as raised:
        options.parse(text)
    assert "\n" not in str(raised.value) and text in str(raised.value)


# --- alarms -------------------------------------------------------------------------------------


class Request(SimpleNamespace):
    def finished(self) -> bool:
        return False


def request(rid: str = "r1", **fields: Any) -> Request:
    return Request(
        **{
            "rid": rid,
            "to_finish": None,
            "origin_input_ids": array("q", [1]),
            "output_ids": array("q"),
            "is_retracted": False,
            "beam_group": None,
            "grammar": None,
            **fields,
        }
    )


def test_an_alarm_is_counted_and_told_once_with_the_id(caplog: pytest.LogCaptureFixture) -> None:
    from prometheus_client import REGISTRY

    book, asked = Book(Options()), request("abc-1")
    book.count_in(SimpleNamespace(labels={"model_name": "m-once"}, _counter_cls=None))
    name, labels = alarms.METRIC, {"model_name": "m-once", "kind": REPETITION}
    assert REGISTRY.get_sample_value(name, labels) == 0
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            book.raise_alarm(Alarm(REPETITION, "again"), asked, tells=True, may_abort=True)
    assert REGISTRY.get_sample_value(name, labels) == 1 and book.block() == {REPETITION: 1}
    assert [record.getMessage().count("abc-1") for record in caplog.records] == [1]
    assert asked.to_finish is None


@pytest.mark.parametrize(
    ("spec", "may", "ends"), [("abort", True, True), ("abort", False, False), ("", True, False)]
)
def test_a_request_is_ended_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, spec: str, may: bool, ends: bool
) -> None:
    monkeypatch.setattr(alarms, "_end", lambda alarm: alarm)  # tests/server has the real one
    book, asked = Book(options.parse(spec)), request()
    book.raise_alarm(Alarm(ACCEPT_LENGTH, "short"), asked, tells=False, may_abort=may)
    assert (asked.to_finish is not None) == ends and book.block() == {}


def test_alarms_of_a_pass_wait_for_their_request() -> None:
    book = Book(Options())
    book.waiting = [("b", Alarm(alarms.BAD_SLOT, "slot 1"))]
    book.deliver([request("a")], tells=True, may_abort=True)
    assert book.block() == {} and len(book.waiting) == 1
    book.deliver([request("b")], tells=True, may_abort=True)
    assert book.block() == {alarms.BAD_SLOT: 1} and book.waiting == []


# --- logits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_request_with_bad_logits_is_found(bad: float, dtype: torch.dtype) -> None:
    values = torch.full((12, 1000), 300.0, dtype=dtype)
    output = SimpleNamespace(next_token_logits=values)
    logits.keep_sums(output)
    assert logits.bad_requests(output, 6, 2) == []
    values[7, 13] = bad
    logits.keep_sums(output)
    assert logits.bad_requests(output, 6, 2) == [1]
    assert logits.bad_requests(output, 6, 1) == []  # a row of padding


def test_a_pass_without_logits_is_none() -> None:
    for output in (None, SimpleNamespace(next_token_logits=None)):
        logits.keep_sums(output)
        assert logits.bad_requests(output, 1, 3) == []


# --- slots --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "read", "free", "says"),
    [
        ([64, 65], [128], [3], None),
        ([0, 0, 64], [], [], None),  # padding may share its slot
        ([64, 320], [], [], "slot 320 is to be written; the cache has 0 to 319"),
        ([64], [-1], [], "slot -1 is to be read"),
        ([64, 70, 64], [], [], "two tokens are to be written to slot 64"),
        ([64], [200], [3], "page 3 is to be read, and free for others"),
        ([130], [], [2], "page 2 is to be written, and free for others"),
    ],
)
def test_slots_that_cannot_be_right(
    written: list[int], read: list[int], free: list[int], says: str | None
) -> None:
    given = [torch.tensor(part, dtype=torch.int64) for part in (written, read, free)]
    problem = slots.slots_problem(*given, slots=320, page_size=64)
    assert problem is None if says is None else says in problem


class Pool:
    """Two layers, of which the first has index keys: pages of 64 slots."""

    def __init__(self) -> None:
        self.page_size, self.size, self.layer_num, self.start_layer = 64, 256, 2, 3
        self.latents = [torch.zeros(5, 64, 16, dtype=torch.uint8) for _ in range(2)]
        self.index = torch.zeros(5, 64, 128, dtype=torch.uint8)
        buffer = [torch.zeros(5, 1), torch.zeros(0, 1)]
        self.index_key_cache = SimpleNamespace(buffer=buffer, keys=lambda local: self.index)

    def latent_pages(self, layer: int) -> torch.Tensor:
        return self.latents[layer - self.start_layer]

    def write(self, at: list[int], *, index: bool = True) -> None:
        page, offset = torch.tensor(at) // 64, torch.tensor(at) % 64
        for latents in self.latents:
            latents[page, offset] = 1
        if index:
            self.index[page, offset] = 1


def test_entries_that_a_pass_did_not_write_are_found() -> None:
    pool, asked = Pool(), torch.tensor([0, 70, 130, 131])
    marked = slots.mark(pool, asked)
    assert marked.tolist() == [70, 130, 131] and not pool.index[0].any()
    pool.write([70, 130, 131])
    assert slots.check_after(pool, marked) is None
    marked = slots.mark(pool, asked)
    pool.write([70, 130])
    alarm = slots.check_after(pool, marked)
    assert alarm.kind == alarms.NOT_WRITTEN and "1 of 3 tokens" in alarm.says
    assert "latents of layer 3" in alarm.says or "index keys of layer 3" in alarm.says
    assert "slot 131" in alarm.says


def test_index_keys_are_checked_where_the_pass_writes_them() -> None:
    pool, asked = Pool(), torch.tensor([70])
    for index_keys in (True, False):
        pool.write([70])
        marked = slots.mark(pool, asked, index_keys=index_keys)
        pool.write([70], index=False)
        alarm = slots.check_after(pool, marked, index_keys=index_keys)
        assert (alarm is not None) == index_keys
    assert slots.mark(SimpleNamespace(), asked) is None


# --- hooks --------------------------------------------------------------------------------------


def processor() -> Any:
    reporter = SimpleNamespace(current_scheduler_metrics_enabled=False)
    config = SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"])
    model = SimpleNamespace(hf_config=config)
    return SimpleNamespace(metrics_reporter=reporter, model_config=model, is_generation=True)


def test_steps_of_a_request_are_judged_where_sglang_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hooks, "_tells", lambda **_: True)
    monkeypatch.setattr(hooks, "_one_stage", lambda: True)
    monkeypatch.setattr(alarms, "_end", lambda alarm: alarm)
    book = Book(options.parse("abort"))
    looping, healthy = request("loops"), request("reads")
    batch = SimpleNamespace(
        reqs=[looping, healthy], spec_algorithm=SimpleNamespace(is_none=lambda: False)
    )
    given = {"speculative_output_stride": None, "speculative_num_draft_tokens": 6}
    read = hooks._decoded(book)(lambda self, **kwargs: (kwargs["next_token_ids"], None))
    output = SimpleNamespace(next_token_logits=torch.zeros(12, 8))
    logits.keep_sums(output)
    for step in range(64):
        tokens = [[5], [6 * step + i for i in range(4)]]
        result = SimpleNamespace(**given)
        read(processor(), batch=batch, result=result, logits_output=output, next_token_ids=tokens)
        for one, new in zip(batch.reqs, tokens, strict=True):
            one.output_ids.extend(new)
    assert book.block() == {} and looping.to_finish is None
    for _ in range(80):
        result = SimpleNamespace(**given)
        tokens = [[5], [1000 + len(healthy.output_ids)]]
        healthy.is_retracted = True  # is not judged until it runs again
        read(processor(), batch=batch, result=result, logits_output=output, next_token_ids=tokens)
        looping.output_ids.extend([5])
    assert book.block() == {ACCEPT_LENGTH: 1}
    assert looping.to_finish is not None and healthy.to_finish is None


def test_bad_logits_of_a_prefill_end_the_request_before_its_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hooks, "_tells", lambda **_: True)
    monkeypatch.setattr(hooks, "_one_stage", lambda: True)
    monkeypatch.setattr(alarms, "_end", lambda alarm: alarm)
    book, asked = Book(options.parse("abort")), request()
    output = SimpleNamespace(next_token_logits=torch.tensor([[1.0, float("nan")]]))
    logits.keep_sums(output)
    seen: list[Any] = []
    take = hooks._prefilled(book)(lambda self, batch, result: seen.append(asked.to_finish))
    take(processor(), SimpleNamespace(reqs=[asked]), SimpleNamespace(logits_output=output))
    assert book.block() == {alarms.NOT_FINITE: 1} and seen[0] is not None


# --- probe --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "level"), [(0, logging.WARNING), (1, logging.INFO)])
def test_a_draft_that_is_never_right_is_told_with_causes(
    right: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    meta = {"spec_verify_ct": 23, "spec_num_correct_drafts": right, "completion_tokens": 24}
    with caplog.at_level(logging.INFO):
        probe.tell(meta)
        probe.tell({"completion_tokens": 24})  # nothing was drafted: nothing is said
    assert [record.levelno for record in caplog.records] == [level]
    line = caplog.records[0].getMessage()
    assert "23 target passes" in line
    assert ("glm53 check" in line) == (right == 0)


def test_the_probe_fills_no_page() -> None:
    assert len(probe.PROMPT) + probe.NEW_TOKENS < 64


@pytest.mark.parametrize("succeeded", [True, False])
def test_the_probe_runs_after_the_warm_up(monkeypatch: pytest.MonkeyPatch, succeeded: bool) -> None:
    order: list[str] = []

    def warm_up(server_args: Any) -> bool:
        order.append("warm-up")
        return succeeded

    def wait(server_args: Any, callback: Any = None, execute_warmup_func: Any = warm_up) -> None:
        order.append(f"ready {execute_warmup_func(server_args)}")

    monkeypatch.setattr(probe, "_probe_while_starting", lambda args: order.append(f"probe {args}"))
    probe.before_ready(wait)("args", None)
    probed = ["probe args"] if succeeded else []
    assert order == ["warm-up", *probed, f"ready {succeeded}"]


# --- doctor -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "what"),
    [("abort,after=64", None), ("abrt", "'abrt' is unknown"), ("after=x", "after=x")],
)
def test_the_doctor_reads_the_variable(value: str, what: str | None) -> None:
    from sglang_glm53.checks.loading import _variables

    found = _variables(SimpleNamespace(environment={"GLM53_WATCH": value}))
    assert found is None if what is None else what in found["what"] and found["do"]


def test_rows_of_padding_do_not_end_the_scheduler() -> None:
    reporter = SimpleNamespace(current_scheduler_metrics_enabled=False)
    processor = SimpleNamespace(metrics_reporter=reporter)
    hooks._judge(Book(Options()), processor, [], None, [[1]], 1)
