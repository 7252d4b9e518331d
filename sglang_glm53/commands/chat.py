"""One turn over /v1/chat/completions, streamed, with its timing."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_glm53.errors import Glm53Error

Message = dict[str, Any]


@dataclass
class ToolCall:
    """One call that the model asks for; `arguments` is JSON text, as it came."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def values(self) -> dict[str, Any]:
        """The arguments; empty where they are no JSON object."""
        try:
            read = json.loads(self.arguments)
        except ValueError:
            return {}
        return read if isinstance(read, dict) else {}

    def __str__(self) -> str:
        shown = (f"{key}={json.dumps(value)}" for key, value in self.values().items())
        return f"{self.name}({', '.join(shown)})"


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        reasoning, content: text of the think block, and of the answer.
        tokens: generated, reasoning included.
        first: seconds until the first token.
        rest: seconds from the first token to the last.
        finish_reason: "stop", "tool_calls" or "length".
        tool_calls: in the order in which they were asked for.
    """

    reasoning: str
    content: str
    tokens: int
    first: float
    rest: float
    finish_reason: str
    tool_calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        """The reply as a message of the conversation that goes on."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.tool_calls
        ]
        text = {"content": self.content, "reasoning_content": self.reasoning}
        return {"role": "assistant", **text, **({"tool_calls": calls} if calls else {})}


def ask(
    url: str,
    messages: Sequence[Message],
    *,
    max_tokens: int,
    timeout: float,
    tools: Sequence[dict[str, Any]] = (),
) -> Reply:
    """Ask greedily (temperature 0).

    Args:
        url: the server's address.
        messages, tools: in OpenAI's form.
        max_tokens: of the reply, reasoning included.
        timeout: seconds without a word from the server.

    Raises:
        Glm53Error: the server refuses or breaks off; one line with its message.
    """
    body = {
        "model": "default",
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if tools:
        body["tools"] = list(tools)
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    reasoning, content, finish_reason, tokens = "", "", "", 0
    calls: dict[int, ToolCall] = {}
    began = time.monotonic()
    first = last = None
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            for event in _events(response):
                if "error" in event:
                    raise Glm53Error(f"the server answers with an error: {event['error']}")
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    reasoning += delta.get("reasoning_content") or ""
                    content += delta.get("content") or ""
                    _add_calls(calls, delta.get("tool_calls") or ())
                    finish_reason = choice.get("finish_reason") or finish_reason
                    if any(map(delta.get, ("reasoning_content", "content", "tool_calls"))):
                        last = time.monotonic()
                        first = first or last
    except urllib.error.HTTPError as error:
        text = " ".join(error.read().decode(errors="replace").split())[:300]
        raise Glm53Error(f"the server answers with HTTP {error.code}: {text}") from error
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise Glm53Error(f"the connection to {url} broke: {error!r}") from error
    if first is None or last is None:
        raise Glm53Error(f"the server at {url} sent no text (finish reason: {finish_reason!r})")
    in_order = [calls[index] for index in sorted(calls)]
    return Reply(reasoning, content, tokens, first - began, last - first, finish_reason, in_order)


def _add_calls(calls: dict[int, ToolCall], pieces: Sequence[dict[str, Any]]) -> None:
    """Calls come in pieces: id and name with the first, text of the arguments with any."""
    for piece in pieces:
        call = calls.setdefault(piece.get("index") or 0, ToolCall())
        function = piece.get("function") or {}
        call.id = piece.get("id") or call.id
        call.name = function.get("name") or call.name
        call.arguments += function.get("arguments") or ""


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event."""
    for line in response:
        data = line.decode().strip().removeprefix("data:").strip()
        if data and data != "[DONE]":
            yield json.loads(data)
