"""One question over /v1/chat/completions, streamed, with its timing."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_glm53.errors import Glm53Error


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        reasoning, content: text of the think block, and of the answer.
        tokens: generated, reasoning included.
        first: seconds until the first token.
        rest: seconds from the first token to the last.
        finish_reason: "stop" or "length".
    """

    reasoning: str
    content: str
    tokens: int
    first: float
    rest: float
    finish_reason: str

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first; None if there is only one."""
        return (self.tokens - 1) / self.rest if self.tokens > 1 and self.rest > 0 else None


def ask(url: str, question: str, *, max_tokens: int, timeout: float) -> Reply:
    """Ask greedily (temperature 0).

    Raises:
        Glm53Error: the server refuses or breaks off; one line with its message.
    """
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    reasoning, content, finish_reason, tokens = "", "", "", 0
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
                    finish_reason = choice.get("finish_reason") or finish_reason
                    if delta.get("reasoning_content") or delta.get("content"):
                        last = time.monotonic()
                        first = first or last
    except urllib.error.HTTPError as error:
        text = " ".join(error.read().decode(errors="replace").split())[:300]
        raise Glm53Error(f"the server answers with HTTP {error.code}: {text}") from error
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise Glm53Error(f"the connection to {url} broke: {error!r}") from error
    if first is None or last is None:
        raise Glm53Error(f"the server at {url} sent no text (finish reason: {finish_reason!r})")
    return Reply(reasoning, content, tokens, first - began, last - first, finish_reason)


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event."""
    for line in response:
        data = line.decode().strip().removeprefix("data:").strip()
        if data and data != "[DONE]":
            yield json.loads(data)
