"""Tool calls: what is read, and that it is the same for every way to cut the answer."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from chat_messages import TOOLS
from chat_parse import chunks, streamed, strict, whole
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.environ import envs
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.glm47_moe_detector import Glm47MoeDetector
from tool_call_run import check_chunkings, check_cuts

from sglang_glm53.chat import install
from sglang_glm53.chat.glm47 import Glm53ToolDetector
from sglang_glm53.chat.names import LONGEST_KEY, LONGEST_NAME
from sglang_glm53.chat.think import ThinkReader

EACH = 250
# The parser runs in the process that serves every request. What follows is done in about a second;
# where time is quadratic in the text it takes minutes.
STALLS = pytest.mark.timeout(60)


@pytest.mark.parametrize("batch", range(8))
def test_any_answer_in_any_chunks(batch: int) -> None:
    calls = sum(check_chunkings(seed) for seed in range(batch * EACH, (batch + 1) * EACH))
    assert calls > EACH // 2  # the answers do hold calls


@pytest.mark.parametrize("batch", range(4))
def test_any_answer_at_every_cut(batch: int) -> None:
    assert sum(check_cuts(10**6 + seed) for seed in range(batch * 10, batch * 10 + 10)) > 500


def arg(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"


def call(name: str, *arguments: str) -> str:
    return f"<tool_call>{name}{''.join(arguments)}</tool_call>"


# What it shows, the answer, its content, its calls.
EXAMPLES: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("text-after", "A" + call("now") + " B", "A B", [("now", {})]),
    ("two-at-once", call("now") * 2, "", [("now", {}), ("now", {})]),
    ("prose", "Write <tool_call> and a name.", "Write <tool_call> and a name.", []),
    ("prose-chinese", "用<tool_call>标签。", "用<tool_call>标签。", []),
    (
        "newline",
        "<tool_call>search\n" + arg("q", "x") + "\n</tool_call>",
        "",
        [("search", {"q": "x"})],
    ),
    ("no-value", call("search", "<arg_key>q</arg_key>"), "<arg_key>q</arg_key>", [("search", {})]),
    (
        "no-value-then-one",
        call("search", "<arg_key>q</arg_key>", arg("limit", "3")),
        "<arg_key>q</arg_key>",
        [("search", {"limit": 3})],
    ),
    (
        "tags-in-value",
        call("search", arg("q", "a <tool_call>now</tool_call> b")),
        "",
        [("search", {"q": "a <tool_call>now</tool_call> b"})],
    ),
    (
        "no-arg-key",
        "<tool_call>searchq</arg_key><arg_value>x</arg_value></tool_call>",
        "",
        [("search", {"q": "x"})],
    ),
    (
        "no-second-arg-key",
        call("search", arg("q", "x"), "limit</arg_key><arg_value>3</arg_value>"),
        "",
        [("search", {"q": "x", "limit": 3})],
    ),
    (
        "no-key-end",
        call("search", "<arg_key>q<arg_value>x</arg_value>"),
        "",
        [("search", {"q": "x"})],
    ),
    ("unknown", call("rm", arg("q", "x")) + "!", call("rm", arg("q", "x")) + "!", []),
    (
        "unknown-holds-a-call",
        call("rm", arg("q", call("now"))),
        call("rm", arg("q", call("now"))),
        [],
    ),
    ("unknown-between", call("now") + call("rm") + call("now"), call("rm"), [("now", {})] * 2),
    (
        "json-inside",
        '<tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"name": "now"}</tool_call>',
        [],
    ),
    (
        "call-not-ended",
        "<tool_call>search" + arg("q", "x") + call("now"),
        "",
        [("search", {"q": "x"}), ("now", {})],
    ),
    ("answer-ends-in-call", "<tool_call>search" + arg("q", "x"), "", [("search", {"q": "x"})]),
    ("answer-ends-in-name", "Hm <tool_call>sear", "Hm <tool_call>sear", []),
    (
        "answer-ends-in-value",
        "<tool_call>search" + arg("limit", "3") + "<arg_key>q</arg_key><arg_value>rm -rf /",
        "<arg_key>q</arg_key><arg_value>rm -rf /",
        [("search", {"limit": 3, "q": None})],
    ),
    (
        "answer-ends-in-number",
        "<tool_call>search<arg_key>limit</arg_key><arg_value>1",
        "<arg_key>limit</arg_key><arg_value>1",
        [("search", {})],
    ),
    (
        "text-between-arguments",
        call("search", arg("q", "x"), " oops ", arg("limit", "3")),
        " oops ",
        [("search", {"q": "x", "limit": 3})],
    ),
    (
        "quotes-stay",
        call("search", arg("q", '"exact phrase"')),
        "",
        [("search", {"q": '"exact phrase"'})],
    ),
    ("not-a-number", call("search", arg("limit", "NaN")), "", [("search", {"limit": "NaN"})]),
    ("infinite", call("plan", arg("weight", "1e999")), "", [("plan", {"weight": "1e999"})]),
    ("python-set", call("plan", arg("options", "{1, 2}")), "", [("plan", {"options": "{1, 2}"})]),
    (
        "python-dict",
        call("plan", arg("options", "{'a': True}")),
        "",
        [("plan", {"options": {"a": True}})],
    ),
    ("deep", call("plan", arg("steps", "[" * 5000)), "", [("plan", {"steps": "[" * 5000})]),
    ("repeated-key", call("search", arg("q", "x"), arg("q", "y")), "", [("search", {"q": "y"})]),
    ("only-layout", "\n" + call("now") + "\n" + call("now") + "\n", "", [("now", {})] * 2),
    ("space-without-calls", " \n", " \n", []),
    ("stray-end", "a</tool_call>b", "a</tool_call>b", []),
]


@pytest.mark.parametrize(
    ("text", "content", "calls"), [e[1:] for e in EXAMPLES], ids=[e[0] for e in EXAMPLES]
)
def test_example(text: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert whole(Glm53ToolDetector(), text) == (content, calls)
    cuts = [[text[:at], text[at:]] for at in range(0, len(text), max(1, len(text) // 200))]
    for pieces in ([text], list(text), *cuts):
        assert streamed(Glm53ToolDetector(), pieces) == (content, calls)


@pytest.mark.parametrize(
    "name",
    ["text-after", "two-at-once", "prose", "newline", "no-value", "tags-in-value", "infinite"],
)
def test_sglangs_detector_gets_these_wrong(name: str) -> None:
    """When one of these fails, SGLang has mended it, and the docs can say so."""
    text, content, calls = next(example[1:] for example in EXAMPLES if example[0] == name)
    wrong = 0
    for read in (
        lambda: whole(Glm47MoeDetector(), text),
        lambda: streamed(Glm47MoeDetector(), [text]),
        lambda: streamed(Glm47MoeDetector(), list(text)),
    ):
        try:
            wrong += read() != (content, calls)
        except (ValueError, AssertionError):
            wrong += 1
    assert wrong


def test_a_string_streams_while_it_grows() -> None:
    detector = Glm53ToolDetector()
    first = detector.parse_streaming_increment(
        "<tool_call>search<arg_key>q</arg_key><arg_value>he", TOOLS
    )
    assert [(item.name, item.parameters) for item in first.calls] == [
        ("search", ""),
        (None, '{"q": "he'),
    ]
    second = detector.parse_streaming_increment('llo "', TOOLS)
    assert [item.parameters for item in second.calls] == ['llo \\"']


def test_other_types_come_when_they_are_whole() -> None:
    detector = Glm53ToolDetector()
    begun = detector.parse_streaming_increment(
        "<tool_call>search<arg_key>limit</arg_key><arg_value>12", TOOLS
    )
    assert [item.parameters for item in begun.calls] == [""]
    ended = detector.parse_streaming_increment("3</arg_value>", TOOLS)
    assert [item.parameters for item in ended.calls] == ['{"limit": 123']


def test_prose_is_not_held_back() -> None:
    detector = Glm53ToolDetector()
    said = detector.parse_streaming_increment("The <tool_call> tag is", TOOLS).normal_text
    assert said == "The <tool_call> tag is"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" + "a" * (LONGEST_NAME + 1),
        "<tool_call>search<arg_key>" + "k" * (LONGEST_KEY + 1),
    ],
    ids=["name", "key"],
)
def test_what_cannot_become_a_call_is_not_held_for_ever(text: str) -> None:
    found = Glm53ToolDetector().parse_streaming_increment(text, TOOLS)
    assert found.normal_text == text.removeprefix("<tool_call>search")


def test_a_call_to_an_unknown_tool_can_be_forwarded() -> None:
    text = call("rm", arg("q", "7"))
    with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
        assert whole(Glm53ToolDetector(), text) == ("", [("rm", {"q": 7})])
        assert streamed(Glm53ToolDetector(), list(text)) == ("", [("rm", {"q": 7})])
        assert Glm53ToolDetector().detect_and_parse(text, TOOLS).calls[0].tool_index == -1


def test_a_whole_answers_calls_have_their_tools_index() -> None:
    found = Glm53ToolDetector().detect_and_parse(call("plan") + call("search"), TOOLS)
    assert [item.tool_index for item in found.calls] == [3, 1]


def test_types_that_depend_on_another_argument() -> None:
    """A union of two shapes, told apart by `kind`: the number is text in one, also as a stream."""
    shapes = [
        {"properties": {"kind": {"const": kind}, "value": {"type": type_}}}
        for kind, type_ in (("text", "string"), ("count", "integer"))
    ]
    tools = [Tool(function=Function(name="put", parameters={"oneOf": shapes}))]
    for kind, value in (("text", "7"), ("count", 7)):
        text = call("put", arg("value", "7"), arg("kind", kind))
        assert whole(Glm53ToolDetector(), text, tools) == (
            "",
            [("put", {"value": value, "kind": kind})],
        )
        assert streamed(Glm53ToolDetector(), list(text), tools) == whole(
            Glm53ToolDetector(), text, tools
        )


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {},
        True,
        [],
        {"properties": None},
        {"properties": []},
        {"properties": {"v": 7}},
        {"anyOf": None},
        {"oneOf": [3]},
        {"$ref": "#/none"},
        {"$ref": "#"},
        {"type": 5},
    ],
    ids=str,
)
def test_a_clients_schema_may_be_anything(schema: Any) -> None:
    tools = [Tool(function=Function(name="put", parameters=schema))]
    text = "A" + call("put", arg("v", "word")) + "B"
    expected = ("AB", [("put", {"v": "word"})])
    assert whole(Glm53ToolDetector(), text, tools) == expected
    assert streamed(Glm53ToolDetector(), list(text), tools) == expected


def test_long_values_take_time_in_proportion() -> None:
    """Each token is looked at once: what is known to be the value leaves the buffer."""
    detector = Glm53ToolDetector()
    detector.parse_streaming_increment("<tool_call>plan<arg_key>steps</arg_key><arg_value>[", TOOLS)
    for _ in range(2000):
        detector.parse_streaming_increment("12345, ", TOOLS)
        assert len(detector._reader._buffer) < len("</arg_value>")


def test_sglangs_parser_takes_ours_under_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FunctionCallParser, "ToolCallParserEnum", dict(FunctionCallParser.ToolCallParserEnum)
    )
    install._register_tools(FunctionCallParser.ToolCallParserEnum)
    parser = FunctionCallParser(TOOLS, "glm47")
    assert type(parser.detector) is Glm53ToolDetector
    content, calls = parser.parse_non_stream("A" + call("search", arg("q", "x")) + "B")
    assert (content, [c.parameters for c in calls]) == ("AB", ['{"q": "x"}'])
    # What SGLang does for its own class it does for ours: the grammar that constrains a call.
    assert parser.detector.use_full_assistant_constraint
    assert parser.parse_stream_chunk("A" + call("now") + "B")[0] == "AB"
    assert parser.parse_stream_end() == ("", [])


def test_the_reader_of_random_chunks_gives_text_and_json() -> None:
    """Noise of all characters: nothing is lost, and no exception leaves."""
    rng = random.Random(5)
    for _ in range(200):
        text = "".join(
            chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD7FF)))) for _ in range(50)
        )
        assert streamed(Glm53ToolDetector(), chunks(rng, text)) == (text, [])


def test_strict_is_strict() -> None:
    with pytest.raises(ValueError):
        strict('{"a": NaN}')
    assert json.loads('{"a": NaN}')


@STALLS
@pytest.mark.parametrize(
    "answer",
    [
        "<tool_call>" + "\n" * 400_000 + "!",  # a regex that went back for each: minutes
        "<tool_call>" * 200_000,  # a copy of the rest for each: minutes
    ],
    ids=["space", "tags"],
)
def test_long_answers_stall_nobody(answer: str) -> None:
    """The parser runs in the process that serves every request."""
    Glm53ToolDetector().detect_and_parse(answer, TOOLS)
    ThinkReader(thinks=True).feed(answer)


@STALLS
@pytest.mark.parametrize(
    "begun",
    [
        "",
        "<tool_call>search",
        "<tool_call>search<arg_key>q</arg_key>",
        "<tool_call>search<arg_key>q</arg_key><arg_value>x</arg_value>",
    ],
    ids=["text", "name", "key", "value"],
)
@pytest.mark.parametrize("space", ["\n\n", "\\n"], ids=["white", "written"])
def test_a_stream_of_white_space_stalls_nobody(begun: str, space: str) -> None:
    """A model that writes line ends for ever. To look at all of them with each token took 2 ms a
    token behind 100,000 characters, of the process that serves every request."""
    detector, thoughts = Glm53ToolDetector(), ThinkReader(thinks=True)
    detector.parse_streaming_increment(begun, TOOLS)
    thoughts.feed(begun)
    for _ in range(50_000):
        detector.parse_streaming_increment(space, TOOLS)
        thoughts.feed(space)


@STALLS
def test_a_schema_with_many_ways_through_it_stalls_nobody() -> None:
    """Each of these lines doubles the time of SGLang's search for a type: 40 lines, hours."""
    lines = {
        f"A{n}": {"anyOf": [{"$ref": f"#/$defs/A{n + 1}"}, {"$ref": f"#/$defs/A{n + 1}"}]}
        for n in range(40)
    }
    schema = {
        "properties": {"q": {"$ref": "#/$defs/A0"}, "n": {"$ref": "#/$defs/A40"}},
        "$defs": {**lines, "A40": {"type": "string"}},
    }
    tools = [Tool(type="function", function=Function(name="search", parameters=schema))]
    answer = call("search", arg("n", "8"))
    assert whole(Glm53ToolDetector(), answer, tools)[1] == [("search", {"n": 8})]  # as if untyped
    tools[0].function.parameters = {**schema, "properties": {"n": {"$ref": "#/$defs/A39"}}}
    assert whole(Glm53ToolDetector(), answer, tools)[1] == [("search", {"n": "8"})]


@STALLS
def test_a_call_with_thousands_of_arguments_stalls_nobody() -> None:
    kinds = [{"properties": {"s": {"type": kind}}} for kind in ("string", "integer")]
    tools = [Tool(type="function", function=Function(name="search", parameters={"anyOf": kinds}))]
    answer = call("search", *(arg(f"k{n}", "1") for n in range(8000)))
    assert len(whole(Glm53ToolDetector(), answer, tools)[1][0][1]) == 8000


def test_objects_in_objects_keep_the_types_of_arguments() -> None:
    """What an argument holds is not looked through, so it may refer to itself as it likes."""
    names = [f"B{n}" for n in range(12)]
    fields = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    schema = {
        "properties": {"n": {"type": "string"}, "tree": fields["B0"]},
        "$defs": {name: {"type": "object", "properties": fields} for name in names},
    }
    tools = [Tool(type="function", function=Function(name="search", parameters=schema))]
    answer = call("search", arg("n", "8"))
    assert whole(Glm53ToolDetector(), answer, tools)[1] == [("search", {"n": "8"})]


def test_a_stream_keeps_no_copy_of_what_it_gave() -> None:
    """A copy of all arguments so far with each token is quadratic: 20 s for a megabyte."""
    detector = Glm53ToolDetector()
    detector.parse_streaming_increment("<tool_call>search<arg_key>q</arg_key><arg_value>", TOOLS)
    for _ in range(3):
        detector.parse_streaming_increment("word", TOOLS)
    detector.parse_streaming_increment("</arg_value></tool_call>", TOOLS)
    assert detector.prev_tool_call_arr[-1]["arguments"] == detector.streamed_args_for_tool[-1] == ""
