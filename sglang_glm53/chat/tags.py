"""The six tags of GLM's tool calls, and how to look for them in a text that is still growing."""

from __future__ import annotations

import re
from collections.abc import Iterator

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
ALL = (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)

_SLICE = 4096  # characters
_ANY = re.compile("|".join(ALL))
_SPACE = re.compile(r"\s*")
# SGLang's parser takes a written-out \n between a key and its value for white space too.
_SPACE_OR_WRITTEN = re.compile(r"(?:\s+|\\n)*")


class Growing:
    """A reader's text that is not read yet."""

    def __init__(self) -> None:
        self._buffer = ""

    def _lengthen(self, piece: str) -> None:
        # CPython lengthens a string in place where one local name alone refers to it.
        buffer, self._buffer = self._buffer, ""
        buffer += piece
        self._buffer = buffer


def slices(text: str) -> Iterator[str]:
    """`text` in short pieces. A reader drops what it has read from the front of its buffer, which
    copies the rest: short buffers keep the time for a long answer linear in its length."""
    return (text[start : start + _SLICE] for start in range(0, len(text), _SLICE))


def adds_space(text: str, piece: str) -> bool:
    """Whether `piece` adds white space to white space at the end of `text`. Between tags it settles
    nothing that `text` did not, so a reader need not look at the whole again."""
    return text[-1:].isspace() and piece.isspace()


def first(text: str, start: int = 0) -> re.Match[str] | None:
    """The first whole tag in `text` from `start` on."""
    return _ANY.search(text, start)


def begun(text: str, among: tuple[str, ...] = ALL) -> int:
    """How many characters at the end of `text` may be the beginning of one of the tags."""
    start = text.rfind("<", max(0, len(text) - max(map(len, among)) + 1))
    if start < 0:
        return 0
    end = text[start:]
    return len(end) if any(tag.startswith(end) and tag != end for tag in among) else 0


def may_become(text: str, among: tuple[str, ...]) -> bool:
    """Whether `text` is the beginning of one of the tags, and not yet one."""
    return any(tag.startswith(text) and tag != text for tag in among)


def after_space(text: str, start: int = 0, *, written: bool = False) -> int:
    """The position after white space (`written`: also after a backslash and an n)."""
    match = (_SPACE_OR_WRITTEN if written else _SPACE).match(text, start)
    assert match is not None
    return match.end()
