"""Reasoning apart from the answer: one reader for whole answers and for streams.

GLM-5.3's prompt opens `<think>`, so an answer begins with reasoning and `</think>` ends it. Where
models leave that:

- An answer that ends by itself without `</think>` has no think block: its text is the answer. (One
  that ran out of tokens was still thinking.) A stream has passed it on as reasoning by then; it
  comes again, as the answer.
- A tool call in reasoning, name and first tag, may be one that the model forgot to end its thoughts
  for, or one that it thinks about. What comes after decides: with `</think>` it was a thought, and
  without one a call. Until then the stream waits. `<tool_call>` alone is a word like any other.
"""

from __future__ import annotations

import re

from sglang_glm53.chat import tags

THINK, THINK_END = "<think>", "</think>"
# The beginning of a call, whole or still growing, at the place of its first character.
_NAME = re.compile(re.escape(tags.CALL) + r"\s*[\w.:/-]{0,128}\s*", re.ASCII)
_SPACE = re.compile(r"\s+", re.ASCII)  # what that takes for white space


class ThinkReader(tags.Growing):
    """Splits the pieces of one answer into (reasoning, answer).

    Args:
        thinks: whether the prompt left a think block open.
        streams: whether reasoning is given while it grows, or in one piece.
    """

    def __init__(self, *, thinks: bool, streams: bool = True) -> None:
        super().__init__()
        self._thinks = thinks
        self._streams = streams
        self._at_start = True
        self._answered = False
        self._holds = False  # the buffer begins with what looks like a call
        self._seen = 0  # of a held buffer, characters known to hold no </think>
        self._thought: list[str] = []  # all reasoning so far
        self._given = 0  # of those pieces, given

    def feed(self, text: str) -> tuple[str, str]:
        """What another piece of the answer settles."""
        answer = "".join([self._read(piece) for piece in tags.slices(text)])
        return self._reasoning() if self._streams or not self._thinks else "", answer

    def finish(self, *, by_itself: bool) -> tuple[str, str]:
        """What is left at the end.

        Args:
            by_itself: whether a token that ends answers came, and the limit of tokens did not.
        """
        rest, self._buffer = self._buffer, ""
        if not self._thinks or self._holds:
            self._thinks = False
            return self._reasoning(), rest
        self._thought.append(rest)
        self._thinks = False
        if by_itself and not self._answered:
            return "", "".join(self._thought)
        return self._reasoning(), ""

    def _read(self, piece: str) -> str:
        """Take a piece in; the answer's text that it settles."""
        settles = not self._waits(piece)
        self._lengthen(piece)
        if not settles:
            return ""
        if self._at_start and not self._start():
            return ""
        if self._thinks:
            return self._think()
        answer, self._buffer = self._buffer, ""
        self._answered |= bool(answer)
        return answer

    def _waits(self, piece: str) -> bool:
        """Whether a piece is white space where more of it settles nothing: at the start, or behind
        what may be a call's name."""
        if self._holds or not tags.adds_space(self._buffer, piece):
            return False
        return self._at_start or _SPACE.fullmatch(piece) is not None

    def _start(self) -> bool:
        """Take a tag at the answer's very beginning; False: it is not settled whether one is."""
        start = tags.after_space(self._buffer)
        rest = self._buffer[start:]
        if not rest or tags.may_become(rest, (THINK, THINK_END)):
            return False
        if rest.startswith(THINK):
            self._buffer, self._thinks = rest[len(THINK) :], True
        elif rest.startswith(THINK_END) and not self._thinks:
            self._buffer = rest[len(THINK_END) :]
        self._at_start = False
        return True

    def _think(self) -> str:
        """Move what is settled into `_thought`; the answer's text, once reasoning has ended."""
        while True:
            end = self._buffer.find(THINK_END, self._seen)
            if not self._holds:
                call = self._buffer.find(tags.CALL)
                if 0 <= call and (end < 0 or call < end):
                    self._move(call)
                    looks = self._looks_like_call()
                    if looks is None:
                        return ""
                    if looks:
                        self._holds = True
                    else:
                        self._move(len(tags.CALL))
                    continue
            if end >= 0:
                self._move(end)
                answer, self._buffer = self._buffer[len(THINK_END) :], ""
                self._thinks = self._holds = False
                self._answered = True
                return answer
            kept = tags.begun(self._buffer, (THINK_END, tags.CALL))
            if self._holds:
                self._seen = len(self._buffer) - kept
            else:
                self._move(len(self._buffer) - kept)
            return ""

    def _looks_like_call(self) -> bool | None:
        """Whether the buffer, which begins with <tool_call>, is a call's beginning."""
        name = _NAME.match(self._buffer)
        assert name is not None
        rest = self._buffer[name.end() :]
        if not rest or tags.may_become(rest, (tags.KEY, tags.CALL_END)):
            return None
        named = len(name.group().strip()) > len(tags.CALL)
        return named and rest.startswith((tags.KEY, tags.CALL_END))

    def _move(self, length: int) -> None:
        self._thought.append(self._buffer[:length])
        self._buffer = self._buffer[length:]
        self._seen = 0

    def _reasoning(self) -> str:
        new = "".join(self._thought[self._given :])
        self._given = len(self._thought)
        return new
