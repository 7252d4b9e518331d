"""What `glm53 demo` asks, how it prints the answers, and which of them make sense."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_glm53.commands import chat
from sglang_glm53.commands.chat import Message, Reply
from sglang_glm53.errors import Glm53Error

SUM = "What is 17+25?"
WEATHER = "What is the weather in Paris?"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
OBSERVATION = {"temperature": 21, "condition": "sunny"}

LABEL, WIDTH = 18, 78


def say(line: str = "") -> None:
    print(line, flush=True)


def row(label: str, text: str) -> None:
    """A label and a text beside it; "(none)" where there is no text."""
    lines = textwrap.wrap(text.strip(), WIDTH) or ["(none)"]
    say(f"{label:<{LABEL}}" + f"\n{'':<{LABEL}}".join(lines))


@dataclass(frozen=True)
class Talk:
    """A conversation with the server at `url`, printed as it goes.

    Attributes:
        max_tokens: of one reply.
        timeout: seconds that the server may be silent.
    """

    url: str
    max_tokens: int
    timeout: float

    def question(self, text: str) -> list[Reply]:
        """One question without tools."""
        say()
        row("question", text)
        return [self._ask([{"role": "user", "content": text}])]

    def with_a_tool(self) -> list[Reply]:
        """A question that needs the tool, and, where it is called, the answer to its result."""
        say()
        row("question", f"{WEATHER} (with the tool {TOOL['function']['name']})")
        messages: list[Message] = [{"role": "user", "content": WEATHER}]
        replies = [self._ask(messages, tools=[TOOL])]
        row("tool call", ", ".join(map(str, replies[0].tool_calls)))
        if replies[0].tool_calls:
            result = json.dumps(OBSERVATION)
            messages.append(replies[0].message())
            for call in replies[0].tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            row("tool's result", result)
            replies.append(self._ask(messages, tools=[TOOL]))
        return replies

    def _ask(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Reply:
        reply = chat.ask(
            self.url, messages, tools=tools, max_tokens=self.max_tokens, timeout=self.timeout
        )
        row("reasoning", reply.reasoning)
        if reply.content.strip() or not reply.tool_calls:
            row("answer", reply.content)
        if reply.finish_reason == "length":
            row("", f"(cut at --max-tokens {self.max_tokens})")
        return reply


def speed(replies: Sequence[Reply]) -> str:
    """Tokens, the longest wait for a first one, and the rate after it, over all replies."""
    tokens, rest = sum(r.tokens for r in replies), sum(r.rest for r in replies)
    of = "" if len(replies) == 1 else f" in {len(replies)} answers"
    first = max(r.first for r in replies)
    rate = f", then {(tokens - len(replies)) / rest:.1f} tokens a second" if rest > 0 else ""
    return f"{tokens} tokens{of}, first after {first:.2f} s{rate}"


def check(replies: Sequence[Reply]) -> None:
    """Hold the shipped miniature's three replies against what it has learned.

    Args:
        replies: to `SUM`, to `WEATHER`, and to the tool's result.

    Raises:
        Glm53Error: one makes no sense; one line with what was expected and what came.
    """
    expected: list[tuple[str, Callable[[Reply], bool]]] = [
        (f'"42" as the answer to "{SUM}"', lambda r: "42" in r.content),
        (f'a call of get_weather for Paris to "{WEATHER}"', _calls_the_tool),
        (f"the tool's {OBSERVATION['temperature']} degrees", _tells_the_result),
    ]
    for number, (what, holds) in enumerate(expected):
        reply = replies[number] if number < len(replies) else None
        if reply is None or not holds(reply):
            raise Glm53Error(_nonsense(what, _shown(reply)))
        if not reply.reasoning.strip():
            raise Glm53Error(_nonsense("its reasoning apart from the answer", _shown(reply)))


def _calls_the_tool(reply: Reply) -> bool:
    name = TOOL["function"]["name"]
    return [(c.name, c.values()) for c in reply.tool_calls] == [(name, {"city": "Paris"})]


def _tells_the_result(reply: Reply) -> bool:
    return all(str(value) in reply.content for value in OBSERVATION.values())


def _nonsense(expected: str, came: str) -> str:
    return (
        f"the miniature does not answer as it was trained to: expected {expected}, got {came}; "
        "report this with what served above"
    )


def _shown(reply: Reply | None) -> str:
    if reply is None:
        return "nothing"
    calls = [str(call) for call in reply.tool_calls]
    parts = [f'"{" ".join(reply.content.split())}"', *calls]
    return textwrap.shorten(", ".join(parts), 160)
