"""SGLang's detector of GLM's reasoning, with our reader of the text (think.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sglang.srt.parser.reasoning_parser import Glm45Detector, StreamingParseResult

from sglang_glm53.chat.think import ThinkReader

_ended_by_itself: ContextVar[bool] = ContextVar("glm53_ended_by_itself", default=False)


@contextmanager
def ended_by_itself(ended: bool) -> Iterator[None]:
    """Tell the detectors that are asked inside whether their answer ended by itself."""
    token = _ended_by_itself.set(ended)
    try:
        yield
    finally:
        _ended_by_itself.reset(token)


class Glm53ReasoningDetector(Glm45Detector):
    """Reasoning of GLM-4.5 to GLM-5.3: streams as whole answers.

    The tags that open and close the think block are in neither part; any other is text.
    """

    # SGLang reads the constructor's parameter names; they are its own.
    def __init__(
        self,
        stream_reasoning: bool = True,
        force_reasoning: bool = False,
        force_nonempty_content: bool = False,
        continue_final_message: bool = False,
        previous_content: str = "",
        **more: Any,
    ) -> None:
        super().__init__(
            stream_reasoning=stream_reasoning,
            force_reasoning=force_reasoning,
            force_nonempty_content=force_nonempty_content,
            continue_final_message=continue_final_message,
            previous_content=previous_content,
            **more,
        )
        self._reader = ThinkReader(thinks=self._in_reasoning, streams=stream_reasoning)

    def detect_and_parse(self, text: str) -> StreamingParseResult:
        """A whole answer."""
        reader = ThinkReader(thinks=self._in_reasoning, streams=False)
        first, answer = reader.feed(text)
        last, rest = reader.finish(by_itself=self._to_content())
        return StreamingParseResult(reasoning_text=first + last, normal_text=answer + rest)

    def parse_streaming_increment(self, new_text: str) -> StreamingParseResult:
        """Another piece of a stream."""
        reasoning, answer = self._reader.feed(new_text)
        return StreamingParseResult(reasoning_text=reasoning, normal_text=answer)

    def finish(self) -> StreamingParseResult:
        """The end of a stream."""
        reasoning, answer = self._reader.finish(by_itself=self._to_content())
        return StreamingParseResult(reasoning_text=reasoning, normal_text=answer)

    def _to_content(self) -> bool:
        return self._force_nonempty_content or _ended_by_itself.get()
