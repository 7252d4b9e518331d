"""Reasoning apart from the answer, the prompt that says whether there is any, and the budget."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from chat_parse import chunks
from sglang.srt.parser.reasoning_parser import Glm45Detector, ReasoningParser

from sglang_glm53.chat import budget, install, serving
from sglang_glm53.chat.glm45 import Glm53ReasoningDetector, ended_by_itself
from sglang_glm53.errors import Glm53Error

CALL = "<tool_call>now</tool_call>"


def whole(text: str, *, thinks: bool = True, ended: bool = True) -> tuple[str, str]:
    with ended_by_itself(ended):
        found = Glm53ReasoningDetector(force_reasoning=thinks).detect_and_parse(text)
    return found.reasoning_text, found.normal_text


def streamed(
    pieces: list[str], *, thinks: bool = True, ended: bool = True, live: bool = True
) -> tuple[str, str]:
    detector = Glm53ReasoningDetector(force_reasoning=thinks, stream_reasoning=live)
    parts = [detector.parse_streaming_increment(piece) for piece in pieces]
    with ended_by_itself(ended):
        parts.append(detector.finish())
    return "".join(p.reasoning_text for p in parts), "".join(p.normal_text for p in parts)


# What it shows, the answer, and its (reasoning, content) in a prompt that opened <think>.
EXAMPLES = [
    ("both", "Add.</think>4", ("Add.", "4")),
    ("opened-again", "<think>Add.</think>4", ("Add.", "4")),
    ("space-stays", "Add.\n</think>\n\n4\n", ("Add.\n", "\n\n4\n")),
    ("nothing-thought", "</think>4", ("", "4")),
    (
        "tag-in-answer",
        "Add.</think>Write </think> at the end.",
        ("Add.", "Write </think> at the end."),
    ),
    ("word-in-thought", "The <tool_call> tag.</think>4", ("The <tool_call> tag.", "4")),
    ("call-in-thought", f"Maybe {CALL}? No.</think>4", (f"Maybe {CALL}? No.", "4")),
    ("call-after", f"Look.</think>{CALL}", ("Look.", CALL)),
    ("call-instead-of-end", f"Look. {CALL}", ("Look. ", CALL)),
    ("call-begun", "Look. <tool_call>now<arg_key>a", ("Look. ", "<tool_call>now<arg_key>a")),
    ("no-think-block", "The answer is 42.", ("", "The answer is 42.")),
    ("empty", "", ("", "")),
]
IDS = [name for name, *_ in EXAMPLES]


@pytest.mark.parametrize("space", [" \u3000", " \x1c", "\n\xa0"])
def test_white_space_that_ends_no_name_is_given_however_it_is_cut(space: str) -> None:
    """Behind a call's name only ASCII's may follow; other white space makes it a word."""
    text = "Use <tool_call>" + space
    assert streamed([text]) == streamed(list(text)) == (text, text)


@pytest.mark.parametrize(("text", "parts"), [e[1:] for e in EXAMPLES], ids=IDS)
def test_example(text: str, parts: tuple[str, str]) -> None:
    assert whole(text) == parts
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert streamed(pieces, live=False) == parts
        found = streamed(pieces)
        # A stream cannot take back what it gave as reasoning before it knew.
        assert found == ((text, text) if text and not parts[0] and parts[1] == text else parts)


def test_an_answer_that_ran_out_of_tokens_was_thinking() -> None:
    assert whole("Let me add", ended=False) == ("Let me add", "")
    assert streamed(["Let me", " add"], ended=False) == ("Let me add", "")


def test_without_a_think_block_the_answer_is_an_answer() -> None:
    """GLM-5.2 has the switch: with enable_thinking=false its prompt closes the block."""
    assert whole("4", thinks=False) == ("", "4")
    assert whole("</think>4", thinks=False) == ("", "4")
    assert whole("<think>Add.</think>4", thinks=False) == ("Add.", "4")
    assert whole("Write <think> first.", thinks=False) == ("", "Write <think> first.")


def expected(text: str, *, thinks: bool, ended: bool) -> tuple[str, str]:
    """Reasoning and content of a whole answer, with regular expressions."""
    opened = re.match(r"\s*<think>", text)
    if not (thinks or opened):
        return "", re.sub(r"^\s*</think>", "", text)
    text = text[opened.end() :] if opened else text
    if "</think>" in text:
        reasoning, _, content = text.partition("</think>")
        return reasoning, content
    call = re.search(r"<tool_call>\s*[A-Za-z0-9_.:/-]{1,128}\s*(<arg_key>|</tool_call>)", text)
    if call:
        return text[: call.start()], text[call.start() :]
    return ("", text) if ended else (text, "")


PIECES = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</th", "now", " "),
    *("\n", "<", "é", "<tool_call>now</tool_call>", "<tool_call>now<arg_key>"),
)


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_any_answer_in_any_chunks(thinks: bool, ended: bool) -> None:
    rng = random.Random(3)
    for _ in range(2000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 9)))
        parts = expected(text, thinks=thinks, ended=ended)
        assert whole(text, thinks=thinks, ended=ended) == parts, text
        cut = chunks(rng, text)
        assert streamed(cut, thinks=thinks, ended=ended, live=False) == parts, cut
        reasoning, content = streamed(cut, thinks=thinks, ended=ended)
        assert content == parts[1], cut
        assert reasoning == parts[0] or (not parts[0] and content.startswith(reasoning)), cut


def test_reasoning_streams_while_it_grows() -> None:
    detector = Glm53ReasoningDetector(force_reasoning=True)
    assert detector.parse_streaming_increment("Let me").reasoning_text == "Let me"
    assert detector.parse_streaming_increment(" <tool_call> it").reasoning_text == " "
    assert detector.parse_streaming_increment(" is</th").reasoning_text == "<tool_call> it is"


def test_a_turn_that_goes_on_after_its_reasoning() -> None:
    detector = Glm53ReasoningDetector(
        force_reasoning=True, continue_final_message=True, previous_content="<think>a</think>b"
    )
    assert detector.parse_streaming_increment("c").normal_text == "c"


def test_sglangs_detector_gets_these_wrong() -> None:
    """When this fails, SGLang has mended it, and the docs can say so."""
    stock = Glm45Detector(force_reasoning=True).detect_and_parse("The answer is 42.")
    assert stock.normal_text == ""
    thought = Glm45Detector(force_reasoning=True)
    said = [
        thought.parse_streaming_increment(p).normal_text
        for p in ("A <tool_call>", " tag.", "</think>4")
    ]
    assert "</think>" in "".join(said)


def test_sglangs_parser_takes_ours_under_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReasoningParser, "DetectorMap", dict(ReasoningParser.DetectorMap))
    install._register_reasoning(ReasoningParser.DetectorMap)
    parser = ReasoningParser("glm45", stream_reasoning=False, force_reasoning=True)
    assert type(parser.detector) is Glm53ReasoningDetector
    assert parser.parse_non_stream("a</think>b") == ("a", "b")
    request = SimpleNamespace(chat_template_kwargs={"force_nonempty_content": True})
    forced = ReasoningParser("glm45", force_reasoning=True, request=request)
    assert forced.parse_non_stream("a") == ("", "a")


# --- the endpoint -------------------------------------------------------------------------------


class Tokenizer:
    """Renders as GLM-5.3's template does, or as GLM-5.2's, which has a switch."""

    def __init__(self, *, switch: bool) -> None:
        self.switch, self.renders = switch, 0

    def apply_chat_template(self, messages: Any, **arguments: Any) -> str:
        self.renders += 1
        closed = self.switch and arguments.get("enable_thinking") is False
        return "<|user|>?<|assistant|><think>" + ("</think>" if closed else "")


def chat(*, switch: bool = False, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        template_manager=SimpleNamespace(chat_template_name=None),
        tokenizer_manager=SimpleNamespace(tokenizer=Tokenizer(switch=switch)),
        _reasoning_detector=Glm53ReasoningDetector(),
        **more,
    )


def request(effort: str | None = None, **arguments: Any) -> SimpleNamespace:
    return SimpleNamespace(
        reasoning_effort=effort, chat_template_kwargs=arguments or None, separate_reasoning=True
    )


def test_the_prompt_says_whether_an_answer_thinks() -> None:
    ask = serving.ask_the_prompt(lambda self, request: pytest.fail("SGLang was asked"))
    assert ask(chat(), request(enable_thinking=False))
    assert not ask(chat(switch=True), request(enable_thinking=False))
    assert ask(chat(switch=True), request())
    endpoint = chat()
    for _ in range(3):
        ask(endpoint, request(enable_thinking=False))
    assert endpoint.tokenizer_manager.tokenizer.renders == 1


def test_clients_cannot_fill_the_memory_with_arguments() -> None:
    endpoint = chat()
    for n in range(1000):
        serving.opens_thinking(endpoint, {"n": n})
    assert len(endpoint._glm53_opens_thinking) <= 64


@pytest.mark.parametrize("reason", ["other-parser", "conversation", "template-fails"])
def test_sglang_is_asked_where_the_prompt_cannot_be(reason: str) -> None:
    endpoint = chat()
    if reason == "other-parser":
        endpoint._reasoning_detector = Glm45Detector()
    elif reason == "conversation":
        endpoint.template_manager.chat_template_name = "chatml"
    else:
        endpoint.tokenizer_manager.tokenizer = None
    assert serving.ask_the_prompt(lambda self, request: "asked")(endpoint, request()) == "asked"


@pytest.mark.parametrize(
    ("effort", "arguments", "switch", "becomes"),
    [
        (None, {}, False, None),
        ("high", {}, False, "high"),
        ("none", {"enable_thinking": False}, False, "low"),
        ("minimal", {}, False, "low"),
        (None, {"enable_thinking": False}, False, "low"),
        ("max", {"enable_thinking": False}, False, "max"),
        (None, {"enable_thinking": False}, True, None),
    ],
    ids=["nothing", "high", "none", "minimal", "off", "off-but-max", "has-a-switch"],
)
def test_no_thinking_becomes_the_lowest_effort(
    effort: str | None,
    arguments: dict[str, Any],
    switch: bool,
    becomes: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = request(effort, **arguments)
    process = serving.ask_for_what_it_can(lambda self, request, is_multimodal: request)
    endpoint = chat(switch=switch)
    assert process(endpoint, asked, False).reasoning_effort == becomes
    process(endpoint, request(effort, **arguments), False)
    told = [r for r in caplog.records if "always opens <think>" in r.message]
    assert len(told) == (becomes == "low" or effort == "max")


def test_the_servers_defaults_do_not_undo_the_lowest_effort() -> None:
    asked = request()
    serving.lower_effort(chat(), asked, {"reasoning_effort": "none"})
    assert asked.chat_template_kwargs["reasoning_effort"] == "low"


ENDS = [
    ({"type": "stop", "matched": 154820}, True),
    ({"type": "stop", "matched": "answer"}, False),
    ({"type": "length", "length": 2}, False),
    ({"type": "abort"}, False),
]


@pytest.mark.parametrize(("reason", "by_itself"), ENDS, ids=["token", "string", "length", "abort"])
def test_whole_answers_of_one_request_end_each_in_their_way(
    reason: dict[str, Any], by_itself: bool
) -> None:
    def build(self: Any, request: Any, ret: list[dict[str, Any]], created: int) -> list[Any]:
        return [whole(item["text"], ended=False) for item in ret]

    endpoint = chat(_get_reasoning_from_request=lambda request: True)
    texts = ["42.", "Add.</think>42.", f"Look. {CALL}"]
    ret = [{"text": text, "meta_info": {"finish_reason": reason}} for text in texts]
    first, *rest = serving.tell_how_answers_end(build)(endpoint, request(), ret, 0)
    assert first == (("", "42.") if by_itself else ("42.", ""))
    assert rest == [("Add.", "42."), ("Look. ", CALL)]
    assert ret[0]["text"] == "42."  # what others read of it is as it was


@pytest.mark.parametrize(("reason", "by_itself"), ENDS, ids=["token", "string", "length", "abort"])
def test_a_streams_detector_is_told_how_it_ended(reason: dict[str, Any], by_itself: bool) -> None:
    def process(self: Any, index: int, delta: str, parsers: Any, *rest: Any) -> tuple[str, str]:
        detector = parsers.setdefault(index, Glm53ReasoningDetector(force_reasoning=True))
        found = detector.parse_streaming_increment(delta)
        last = detector.finish() if rest[-1] else None
        return found.reasoning_text, last.normal_text if last else ""

    tell = serving.tell_how_streams_end(process)
    parsers: dict[int, Any] = {}
    running: dict[str, Any] = {"meta_info": {"finish_reason": None}}
    assert tell(chat(), 0, "4", parsers, running, request(), None) == ("4", "")
    ended = {"meta_info": {"finish_reason": reason}}
    content = tell(chat(), 0, "2", parsers, ended, request(), reason["type"])[1]
    assert content == ("42" if by_itself else "")


# --- the budget ---------------------------------------------------------------------------------


class Ids:
    """A tokenizer with GLM-5's ids."""

    def __init__(self, **ids: list[int]) -> None:
        self.ids = {"<think>": [154841], "</think>": [154842], "\n": [198], **ids}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return self.ids[text]


def test_sglangs_processor_ends_glm5s_thoughts(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from sglang.srt.sampling import custom_logit_processor as module

    base = module.ThinkingBudgetLogitProcessor
    serialised = module.Glm4MoeThinkingBudgetLogitProcessor.to_str()

    def allowed(output: list[int], tokenizer: Any) -> int | None:
        """The one token that the processor leaves, or None."""
        given = SimpleNamespace(
            origin_input_ids=[5, 154841], output_ids=output, tokenizer=tokenizer
        )
        processor = module.CustomLogitProcessor.from_str(serialised)
        logits = processor(torch.zeros(1, 154880), [{"thinking_budget": 3, "__req__": given}])
        left = (logits[0] > float("-inf")).nonzero().flatten().tolist()
        return left[0] if len(left) == 1 else None

    unwrapped = getattr(base.__call__, "__wrapped__", base.__call__)
    monkeypatch.setattr(base, "__call__", unwrapped)
    assert allowed([7, 7, 7, 7], Ids()) is None  # SGLang's own ids: nothing happens
    monkeypatch.setattr(base, "__call__", budget.with_ids_of_the_tokenizer(unwrapped))
    assert allowed([7, 7], Ids()) is None
    assert allowed([7, 7, 7], Ids()) == 198
    assert allowed([7, 7, 7, 198], Ids()) == 154842
    assert allowed([7, 7, 7, 154842], Ids()) is None
    assert allowed([7, 7, 7], Ids(**{"</think>": [1, 2]})) is None
    assert allowed([7, 7, 7], None) is None


def test_another_models_processor_keeps_its_ids() -> None:
    from sglang.srt.sampling import custom_logit_processor as module

    processor = module.Qwen3ThinkingBudgetLogitProcessor()
    given = SimpleNamespace(origin_input_ids=[], output_ids=[], tokenizer=Ids())
    called = budget.with_ids_of_the_tokenizer(lambda self, logits, parameters: logits)
    called(processor, None, [{"__req__": given}])
    assert processor.THINKING_START_TOKEN_ID == 151667


# --- who gets our parsers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "wish", "ours"),
    [("GlmMoeDsaForCausalLM", "", True), ("GlmMoeDsaForCausalLM", "stock", False),
     ("Glm4MoeForCausalLM", "", False)],
    ids=["glm5", "glm5-stock", "glm4"],
)  # fmt: skip
def test_other_models_keep_sglangs_parsers(
    architecture: str, wish: str, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM53_PARSERS", wish)
    registered: list[bool] = []
    monkeypatch.setattr(install, "register", lambda: registered.append(True))
    build = install._with_our_parsers(lambda self, manager, templates: None)
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    build(SimpleNamespace(), SimpleNamespace(model_config=config), None)
    assert bool(registered) is ours


def test_an_unknown_wish_for_parsers_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM53_PARSERS", "sotck")
    with pytest.raises(Glm53Error, match="GLM53_PARSERS=sotck is unknown; use .*stock"):
        install.install()
