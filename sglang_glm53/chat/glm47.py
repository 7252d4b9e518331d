"""SGLang's detector of GLM's tool calls, with our reader of the text (stream.py).

SGLang keeps what it does around it: the grammar that constrains a call, the types of a tool's
schema, how answers and streams are put together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.environ import envs
from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem
from sglang.srt.function_call.glm47_moe_detector import Glm47MoeDetector, get_argument_type
from sglang.srt.function_call.utils import get_schema_properties

from sglang_glm53.chat.events import Arguments, CallStart, Event, Text
from sglang_glm53.chat.stream import CallReader
from sglang_glm53.chat.values import to_json

_UNIONS = ("anyOf", "oneOf", "allOf", "$ref")
_MOST_STEPS = 10_000  # of SGLang's walk through a schema, which it takes again for each argument
_MOST_TOGETHER = 128  # arguments of which one may decide the type of another


class RequestTools:
    """The request's tools, as the reader asks for them (events.Tools), in SGLang's types."""

    def __init__(self, tools: list[Tool], detector: Glm47MoeDetector) -> None:
        self._tools = tools
        self._detector = detector
        self._typed: dict[str, list[Tool]] = {}
        self._schemas: dict[str, dict[str, Any]] = {}
        for tool in tools or []:
            schema = tool.function.parameters  # the client's: anything
            self._schemas[tool.function.name] = schema if isinstance(schema, dict) else {}
        self.names = frozenset(name for name in self._schemas if name)

    def is_known(self, name: str) -> bool:
        return name in self.names or bool(name and envs.SGLANG_FORWARD_UNKNOWN_TOOLS.get())

    def parameters(self, name: str) -> frozenset[str]:
        return frozenset(get_schema_properties(self._schemas.get(name, {})))

    def is_text(self, name: str, key: str) -> bool:
        return self._type(name, key) == "string"

    def waits(self, name: str) -> bool:
        schema = self._schemas.get(name, {})
        return any(schema.get(keyword) for keyword in _UNIONS)

    def read(self, name: str, pairs: list[tuple[str, str]]) -> Mapping[str, Any]:
        """Types of SGLang's choice; a value that is a string in any case is left as it stands."""
        written = dict(pairs)
        try:
            read = {}
            # SGLang holds each argument against each other one: 2,000 of them take half a minute.
            groups = [pairs] if len(pairs) <= _MOST_TOGETHER else [[pair] for pair in pairs]
            for group in groups:
                read |= self._detector._parse_argument_pairs(group, name, self._with_types(name))
        except Exception:  # a value that no parser of SGLang's takes, nested too deeply for one
            return written
        if self.waits(name):
            for key, value in read.items():
                if isinstance(value, str) and self._type(name, key, read) == "string":
                    read[key] = written[key]
        return read

    def _type(self, name: str, key: str, arguments: dict[str, Any] | None = None) -> str | None:
        try:
            return get_argument_type(name, key, self._with_types(name), arguments)
        except Exception:  # a schema that is none, such as "properties": null
            return None

    def _with_types(self, name: str) -> list[Tool]:
        """The tool of a name, if its schema gives types in a time that others can wait."""
        if name not in self._typed:
            found = [tool for tool in self._tools or [] if tool.function.name == name][:1]
            self._typed[name] = found if found and _is_short(found[0].function.parameters) else []
        return self._typed[name]


class Glm53ToolDetector(Glm47MoeDetector):
    """Tool calls of GLM-4.7 to GLM-5.3: no text lost, no broken JSON, streams as whole answers."""

    def __init__(self) -> None:
        super().__init__()
        self._reader: CallReader | None = None

    def detect_and_parse(self, text: str, tools: list[Tool]) -> StreamingParseResult:
        """A whole answer: its text, and its calls with the index of their tool (-1: unknown)."""
        reader = CallReader(RequestTools(tools, self))
        said: list[str] = []
        calls: list[ToolCallItem] = []
        arguments: list[list[str]] = []  # pieces of each call's
        indices = self._get_tool_indices(tools)
        for event in reader.feed(text) + reader.finish():
            if isinstance(event, Text):
                said.append(event.text)
            elif isinstance(event, CallStart):
                calls.append(
                    ToolCallItem(
                        tool_index=indices.get(event.name, -1), name=event.name, parameters=""
                    )
                )
                arguments.append([])
            elif isinstance(event, Arguments):
                arguments[-1].append(event.json)
        for call, pieces in zip(calls, arguments, strict=True):
            call.parameters = _without_repeats("".join(pieces))
        return StreamingParseResult(normal_text="".join(said), calls=calls)

    def parse_streaming_increment(self, new_text: str, tools: list[Tool]) -> StreamingParseResult:
        """Another piece of a stream: the text and the pieces of calls that it settles."""
        if self._reader is None:
            self._reader = CallReader(RequestTools(tools, self))
        return self._streamed(self._reader.feed(new_text))

    def finish(self, tools: list[Tool]) -> StreamingParseResult:
        """The end of a stream: what was held back; an open call's arguments become valid JSON."""
        if self._reader is None:
            return StreamingParseResult()
        return self._streamed(self._reader.finish())

    def _streamed(self, events: list[Event]) -> StreamingParseResult:
        """Events as SGLang's items, and the record that its server keeps of them."""
        said: list[str] = []
        calls: list[ToolCallItem] = []
        for event in events:
            if isinstance(event, Text):
                said.append(event.text)
            elif isinstance(event, CallStart):
                self.current_tool_id += 1
                # SGLang completes a call's arguments from these two at a stream's end. The reader
                # completes them itself, so they stay empty: kept, they cost a copy of all
                # arguments so far with each token.
                self.prev_tool_call_arr.append({"name": event.name, "arguments": ""})
                self.streamed_args_for_tool.append("")
                calls.append(
                    ToolCallItem(tool_index=self.current_tool_id, name=event.name, parameters="")
                )
            elif isinstance(event, Arguments):
                last = calls[-1] if calls else None
                if last is not None and last.name is None:
                    last.parameters += event.json
                else:
                    calls.append(
                        ToolCallItem(tool_index=self.current_tool_id, parameters=event.json)
                    )
        return StreamingParseResult(normal_text="".join(said), calls=calls)


def _is_short(schema: Any) -> bool:
    """Whether SGLang's walk through a schema ends soon: it goes every way through unions and
    references, of which a client can make 2^n with n lines, while all other requests wait."""
    left = _MOST_STEPS

    def walk(node: Any, seen: frozenset[int], *, in_argument: bool = False) -> bool:
        nonlocal left
        left -= 1
        if left < 0:
            return False
        if not isinstance(node, dict) or id(node) in seen:
            return True
        seen |= {id(node)}
        following = [_target(schema, node["$ref"])] if "$ref" in node else []
        for keyword in ("anyOf", "oneOf", "allOf"):
            branches = node.get(keyword)
            following += branches if isinstance(branches, list) else []
        arguments = node.get("properties") if not in_argument else None
        arguments = list(arguments.values()) if isinstance(arguments, dict) else []
        return all(walk(each, seen, in_argument=in_argument) for each in following) and all(
            walk(each, seen, in_argument=True) for each in arguments
        )

    try:
        return walk(schema, frozenset())
    except RecursionError:
        return False


def _target(schema: Any, reference: Any) -> Any:
    """What a reference inside a schema means, as SGLang looks it up; None: nothing."""
    if reference == "#":
        return schema
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    try:
        for part in reference[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema[int(part)] if isinstance(schema, list) else schema[part]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return schema


def _without_repeats(arguments: str) -> str:
    """Each key once, with its last value, as every reader of a stream's JSON takes it."""
    repeated = False

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeated
        found = dict(pairs)
        repeated |= len(found) < len(pairs)
        return found

    read = json.loads(arguments, object_pairs_hook=once)
    return to_json(read, arguments) if repeated else arguments
