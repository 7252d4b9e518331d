"""What a reader of tool calls gives, and what it asks of the request's tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Text:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; its arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of the open call's arguments, a JSON object in the end."""

    json: str


@dataclass(frozen=True)
class CallEnd:
    """The open call is complete."""


Event = Text | CallStart | Arguments | CallEnd


class Tools(Protocol):
    """What the reader asks of the request's tools."""

    names: frozenset[str]

    def is_known(self, name: str) -> bool:
        """Whether a call to `name` is one (names holds it, or unknown ones are forwarded)."""

    def parameters(self, name: str) -> frozenset[str]:
        """The names of the tool's parameters, as far as its schema lists them."""

    def is_text(self, name: str, key: str) -> bool:
        """Whether the value is a string in any case: it can be passed on while it grows."""

    def waits(self, name: str) -> bool:
        """Whether one argument's type may depend on another: all are read before any is given."""

    def read(self, name: str, pairs: list[tuple[str, str]]) -> Mapping[str, Any]:
        """The arguments of (key, text) pairs, in the types of the tool's schema."""


class Layout:
    """Leaves out white space that has only calls, the answer's start or its end on both sides."""

    def __init__(self) -> None:
        self._space: list[str] = []
        self._at_edge = True  # nothing but white space since the start or the last call
        self._calls = 0

    def text(self, text: str) -> list[Event]:
        """What of a text can be given."""
        if self._at_edge:
            self._space.append(text)
            if text.isspace():
                return []
            text, self._space, self._at_edge = "".join(self._space), [], False
        return [Text(text)]

    def call(self) -> None:
        """A call begins."""
        self._space, self._at_edge = [], True
        self._calls += 1

    def finish(self) -> list[Event]:
        """What is left at the end."""
        space, self._space = "".join(self._space), []
        return [Text(space)] if space and not self._calls else []
