"""Runs detectors of SGLang's interface over whole answers and over pieces of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

from chat_messages import TOOLS

Parsed = tuple[str, list[tuple[str, dict[str, Any]]]]


def strict(arguments: str) -> dict[str, Any]:
    """JSON as RFC 8259 has it: no NaN, no infinity, and text that UTF-8 can carry."""
    arguments.encode()

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    read = json.loads(arguments, parse_constant=refuse)
    assert isinstance(read, dict)
    return read


def whole(detector: Any, text: str, tools: list[Any] = TOOLS) -> Parsed:
    """Content and calls of a whole answer."""
    parsed = detector.detect_and_parse(text, tools)
    return parsed.normal_text, [(call.name, strict(call.parameters)) for call in parsed.calls]


def streamed(detector: Any, pieces: Iterable[str], tools: list[Any] = TOOLS) -> Parsed:
    """Content and calls as a client puts a stream's pieces together."""
    content, calls = "", []
    for result in _results(detector, pieces, tools):
        content += result.normal_text
        for item in result.calls:
            if item.name is not None:
                assert item.tool_index == len(calls) and item.parameters == ""
                calls.append([item.name, ""])
            else:
                assert item.tool_index == len(calls) - 1  # no call goes on after the next began
                calls[-1][1] += item.parameters
    # Nothing is left for SGLang to complete: ours keeps no copy, its own keeps what it gave.
    kept = detector.streamed_args_for_tool
    assert kept in ([""] * len(calls), [call[1] for call in calls])
    return content, [(name, strict(arguments)) for name, arguments in calls]


def _results(detector: Any, pieces: Iterable[str], tools: list[Any]) -> Iterator[Any]:
    for piece in pieces:
        yield detector.parse_streaming_increment(piece, tools)
    yield detector.finish(tools)


def chunks(rng: random.Random, text: str) -> list[str]:
    """The text in pieces of random sizes; small ones often, and empty ones."""
    pieces, at = [], 0
    most = rng.choice((2, 6, 20, 100))
    while at < len(text):
        size = int(rng.random() * (most + 1))
        pieces.append(text[at : at + size])
        at += size
    return pieces
