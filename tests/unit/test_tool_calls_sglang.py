"""What SGLang's own tests of GLM's tool calls show, read by its detector and by ours.

Each case stands for a test in SGLang (test/registered/unit/function_call: test_glm47_moe_detector,
test_glm47_schema_types, test_glm47_stream_chunks), by its name, with an answer of our own that has
the same form. Both detectors give the same, whole and in the test's chunks, or the case is
in DIFFERENCES with the reason; docs/chat.md lists those.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_parse import Parsed, streamed, strict
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.glm4_moe_detector import Glm4MoeDetector
from sglang.srt.function_call.glm47_moe_detector import Glm47MoeDetector

from sglang_glm53.chat.glm47 import Glm53ToolDetector

# Case: why ours gives something else.
DIFFERENCES = {
    "invalid_tool_call": "the text of a call to an unknown tool is content; SGLang drops it, and "
    "streams it as a call",
    "error_undefined_tool": "as invalid_tool_call",
    "error_incomplete_buffer_at_end": "a stream that ends in a call gets valid JSON, without the "
    "value that was cut off, whose text is content",
    "incomplete_final_call_preserves_state": "as error_incomplete_buffer_at_end",
    "boundary_normal_text_mixed_with_tool": "white space beside text is kept, as in SGLang's "
    "streams; its whole answers lose it at both ends",
    "complete_calls_are_drained_before_finish": "SGLang 0.5.23 loses the second call of one chunk",
    "partition_invariance_with_normal_text_and_no_args": "SGLang 0.5.23 loses text after a call in "
    "the same chunk",
}


def tools(**schemas: dict[str, Any]) -> list[Tool]:
    return [
        Tool(function=Function(name=name, parameters={"type": "object", "properties": properties}))
        for name, properties in schemas.items()
    ]


STRING, NUMBER, ARRAY, OBJECT = ({"type": t} for t in ("string", "number", "array", "object"))
TRAVEL = tools(
    book={"city": STRING, "day": STRING},
    ping={},
    tasks={"items": ARRAY, "count": {"type": "integer"}, "weight": NUMBER, "data": OBJECT},
)


def arg(key: str, value: str, gap: str = "") -> str:
    return f"<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>{gap}"


def book(city: str, day: str) -> str:
    return f"<tool_call>book{arg('city', city)}{arg('day', day)}</tool_call>"


TASK = '[{"id": "1", "task": "Read C:\\\\data\\\\new.txt, then print \\\\n", "done": false}]'

NESTED = '{"a": {"b": {"c": 1}}}'

CASES: dict[str, list[str]] = {
    "single_tool_call": [book("Oslo", "2031-01-02")],
    "multiple_tool_calls": [book("Oslo", "1"), book("Rome", "2")],
    "no_arg_function_non_streaming": ["<tool_call>ping</tool_call>"],
    "invalid_tool_call": ["<tool_call>fly", arg("city", "Oslo"), "</tool_call>"],
    "error_undefined_tool": ["<tool_call>no_such_tool", arg("x", "1"), "</tool_call>"],
    "array_argument_with_escaped_json": [f"<tool_call>tasks{arg('items', TASK)}\n</tool_call>"],
    "mtp_func_and_string_split": [
        *("I will book.", "<tool_call>bo", "ok<arg_key>city</arg_key><arg_value>New Yo"),
        *("rk</arg_value>", "<arg_key>day</arg_key><arg_value>to", "day</arg_value></tool_call>"),
    ],
    "mtp_noarg_and_multiple_calls": ["<tool_call>ping</tool_call>", book("Rome", "2")],
    "mtp_number_and_complex_json": [
        *("<tool_call>tasks", arg("weight", "2.5"), arg("count", "12")),
        *(
            '<arg_key>items</arg_key><arg_value>[{"na',
            'me": "a',
            'b"}, {}]</arg_value></tool_call>',
        ),
    ],
    "streaming_tool_call": [
        "<tool_call>book",
        arg("city", "Oslo"),
        arg("day", "1"),
        "</tool_call>",
    ],
    "streaming_multiple_tool_calls": [
        *("<tool_call>book", arg("city", "Oslo"), "</tool_call><tool_call>book"),
        *(arg("city", "Rome"), "</tool_call>"),
    ],
    "normal_text_before_tool_call": ["结构：<tool_call>ping", "</tool_call>"],
    "boundary_empty_param_value": [book("Oslo", "")],
    "boundary_param_value_extreme_split": list(book("New York", "x")),
    "boundary_param_value_with_special_chars": [book("it's 'here' & <there>", 'a "b" \\ c')],
    "boundary_json_deeply_nested": ["<tool_call>tasks", arg("data", NESTED), "</tool_call>"],
    "boundary_json_empty_structures": [
        f"<tool_call>tasks{arg('items', '[]')}{arg('data', '{}')}</tool_call>"
    ],
    "boundary_multi_tags_one_chunk": [book("1", "2")],
    "boundary_normal_text_mixed_with_tool": [
        "First this. ",
        "<tool_call>ping</tool_call>",
        " Then that. ",
    ],
    "boundary_number_edge_values": [
        f"<tool_call>tasks{arg('weight', value)}</tool_call>" for value in ("0", "-4.5", "1e10")
    ],
    "boundary_type_string_with_numeric_content": [book("12345", "67.8")],
    "error_incomplete_buffer_at_end": ["<tool_call>book<arg_key>city</arg_key><arg_value>Os"],
    "streamed_raw_length_incomplete_xml_tag": [
        *(
            "<tool_call>book",
            "<arg_key>city</arg_key><arg_value>Os",
            "lo</arg_value>",
            "</tool_call>",
        )
    ],
    "streamed_raw_length_tag_split_across_chunks": [
        *("<tool_call>book<arg_", "key>city</arg_key><arg_value>Os", "lo</arg_value><arg_"),
        *("key>day</arg_key><arg_value>1</arg_value></tool_call>",),
    ],
    "streamed_raw_length_multiple_empty_returns": [
        *(
            "<tool_call>book<arg_key>ci",
            "ty</arg_key><arg_val",
            "ue>a",
            "b",
            "</arg_value></tool_call>",
        )
    ],
    "whitespace_preserved_in_string_args_glm47": [book("    def a():", "\tx ")],
    "whitespace_preserved_streaming_glm47": list(book("  a", "b  ")),
    "whitespace_trailing_preserved": [book("x   ", "y\n\n")],
    "plain_strings_still_stream_before_value_completes": [
        *("<tool_call>book<arg_key>city</arg_key><arg_value>Ne", "w</arg_value></tool_call>")
    ],
    "numeric_prefix_does_not_commit_to_invalid_json": [
        *("<tool_call>tasks<arg_key>weight</arg_key><arg_value>12", "ab</arg_value></tool_call>")
    ],
    "complete_calls_are_drained_before_finish": [book("a", "b") + book("c", "d")],
    "partition_invariance_with_normal_text_and_no_args": ["A: " + book("a", "b") + " B: C."],
    "single_call_arguments_are_not_repeated": list(book("Doc/library", "names that begin")),
    "incomplete_final_call_preserves_state": [book("a", "b"), "<tool_call>book<arg_key>ci"],
}


def answer(detector: Any, pieces: list[str], given: list[Tool]) -> Parsed:
    found = detector.detect_and_parse("".join(pieces), given)
    return found.normal_text, [(call.name, strict(call.parameters)) for call in found.calls]


def as_a_client(detector: Any, pieces: list[str], given: list[Tool]) -> tuple[str, Any]:
    """A stream's content, and its calls with the JSON as it came where that is not whole."""
    try:
        return streamed(detector, pieces, given)
    except (ValueError, AssertionError) as error:
        return type(error).__name__, None


@pytest.mark.parametrize("name", CASES)
def test_as_sglang_reads_it(name: str) -> None:
    pieces = CASES[name]
    ours = (
        answer(Glm53ToolDetector(), pieces, TRAVEL),
        as_a_client(Glm53ToolDetector(), pieces, TRAVEL),
    )
    stock = (
        answer(Glm47MoeDetector(), pieces, TRAVEL),
        as_a_client(Glm47MoeDetector(), pieces, TRAVEL),
    )
    assert ours[0] == ours[1]
    assert (ours != stock) is (name in DIFFERENCES)


def test_the_list_of_differences_names_cases() -> None:
    assert set(DIFFERENCES) <= set(CASES)


GLM4 = {
    "whitespace_preserved_in_string_args_glm4": ["  def a():", "  b"],
    "whitespace_preserved_streaming_glm4": ["x ", "\ty"],
    "glm4_detector_with_complex_schema_anyof": ["Hello", "medium"],
    "glm4_detector_with_enum_values": ["test", "high"],
    "glm4_detector_streaming_with_complex_schema": ["nested", "low"],
}


@pytest.mark.parametrize("name", GLM4)
def test_the_older_format_with_line_ends(name: str) -> None:
    """GLM-4.5's, as SGLang's detector for it reads it."""
    city, day = GLM4[name]
    pieces = ["<tool_call>book\n", arg("city", city, "\n"), arg("day", day, "\n"), "</tool_call>"]
    expected = answer(Glm4MoeDetector(), pieces, TRAVEL)
    assert expected[1] == [("book", {"city": city, "day": day})]
    assert answer(Glm53ToolDetector(), pieces, TRAVEL) == expected
    assert streamed(Glm53ToolDetector(), pieces, TRAVEL) == expected


def variants(*types: str) -> dict[str, Any]:
    return {"anyOf": [{"type": type_} for type_ in types]}


# A field's schema, and what a model writes for it.
TYPES: list[tuple[dict[str, Any], str]] = [
    *(({"type": ["integer", "string"]}, text) for text in ("auto", "7", "true", "null", '"7"')),
    *(({"type": ["number", "string"]}, text) for text in ("auto", "7", "1.5", "1e2")),
    *(({"type": ["object", "string"]}, text) for text in ("auto", '{"ok": false}', "7")),
    *(({"type": ["boolean", "string"]}, text) for text in ("auto", "false")),
    *(({"type": ["string", "null"]}, text) for text in ("null", '"null"', "x")),
    *((variants("string", "object"), text) for text in ("x", '{"a": 1}', "7")),
    *((variants("null", "array"), text) for text in ("null", "[1, 2]")),
    *(({"enum": ["7", 8]}, text) for text in ("7", "8")),
    *(({"enum": ["ok", None]}, text) for text in ("ok", "null")),
    *(({"const": value}, json.dumps(value)) for value in (7, {"ok": False}, "null")),
    *(({"type": "number"}, text) for text in ("-12", "1.25e2", "12ab", '"12"', r"\"12\"", "")),
    *(({"type": "integer"}, text) for text in ("7", "12ab", '"7"', '"1.5"')),
    ({"type": "number", "enum": [1, 2]}, '"1"'),
    ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, "7"),
    ({"allOf": [{"type": "object"}, {"properties": {"t": {}}}]}, '{"t": 5}'),
    *(({}, text) for text in ("123_456", '{"ok": false}', "7", "text", "(1, 2)", "{'a': None}")),
    *(({"type": "string"}, text) for text in ("null", "true", "1e2", "\\d+", '{"a":1}', "[1]")),
    ({"$ref": "#/$defs/a~1b"}, "7"),
]


@pytest.mark.parametrize(("field", "text"), TYPES, ids=[f"{n:02}" for n in range(len(TYPES))])
def test_types_are_sglangs(field: dict[str, Any], text: str) -> None:
    schema = {"$defs": {"a/b": {"type": "integer"}}, "properties": {"v": field}}
    given = [Tool(function=Function(name="put", parameters=schema))]
    pieces = [f"<tool_call>put{arg('v', text)}</tool_call>"]
    expected = answer(Glm47MoeDetector(), pieces, given)
    if field == {"const": "null"}:  # text in any case: what stands between the tags, with quotes
        expected = ("", [("put", {"v": text})])
    found = answer(Glm53ToolDetector(), pieces, given)
    assert found == expected
    assert type(found[1][0][1]["v"]) is type(expected[1][0][1]["v"])
    assert streamed(Glm53ToolDetector(), list(pieces[0]), given) == expected


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
@pytest.mark.parametrize("reference", [False, True], ids=["inline", "referenced"])
def test_siblings_decide_a_unions_types(keyword: str, reference: bool) -> None:
    shapes = [
        {"properties": {"kind": {"const": kind}, "value": {"type": type_}}}
        for kind, type_ in (("text", "string"), ("count", "integer"))
    ]
    schema: dict[str, Any] = {keyword: shapes}
    if reference:
        schema = {
            "$defs": {str(n): shape for n, shape in enumerate(shapes)},
            keyword: [{"$ref": f"#/$defs/{n}"} for n in range(2)],
        }
    given = [Tool(function=Function(name="put", parameters=schema))]
    for kind in ("text", "count"):
        for pair in (("kind", kind), ("value", "7")), (("value", "7"), ("kind", kind)):
            pieces = ["<tool_call>put", *(arg(*each) for each in pair), "</tool_call>"]
            expected = answer(Glm47MoeDetector(), pieces, given)
            assert answer(Glm53ToolDetector(), pieces, given) == expected
            assert streamed(Glm53ToolDetector(), list("".join(pieces)), given) == expected
