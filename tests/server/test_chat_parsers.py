"""Reasoning and the thinking budget in a running server, over HTTP.

The checkpoint says REASONING, `</think>` and ANSWER to any chat; its template has no header with an
effort, so SGLang alone would take enable_thinking for a switch of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_glm53.tiny.text import ANSWER, REASONING

from .conftest import FLOAT32
from .harness import Server, ServerPool

pytestmark = pytest.mark.server("alone")

PARSERS = ("--reasoning-parser", "glm45", "--tool-call-parser", "glm47")
BUDGET = ("--enable-strict-thinking", "--enable-custom-logit-processor")


@pytest.fixture(scope="module")
def server(servers: ServerPool, tiny_checkpoint: Callable[..., Path]) -> Server:
    return servers.get(tiny_checkpoint(), *FLOAT32, *PARSERS, *BUDGET)


def say(server: Server, **fields: Any) -> tuple[str, str, str]:
    """Reasoning, content and finish reason of a chat request, whole or put together."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    body = {**body, "max_tokens": 100, **fields}
    reply = requests.post(server.url + "/v1/chat/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    if not fields.get("stream"):
        (choice,) = reply.json()["choices"]
        message = choice["message"]
        return message["reasoning_content"] or "", message["content"] or "", choice["finish_reason"]
    parts, reason = ["", ""], ""
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[len("data: ") :])["choices"]:
                delta = choice["delta"]
                parts[0] += delta.get("reasoning_content") or ""
                parts[1] += delta.get("content") or ""
                reason = choice["finish_reason"] or reason
    return parts[0], parts[1], reason


def test_chat(server: Server) -> None:
    """One server, started once: what its parsers and its budget give."""
    whole = (REASONING, ANSWER, "stop")
    # No thinking is asked for in each way that clients know: it thinks, and no tag leaks.
    for asked in (
        {},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ):
        for stream in (False, True):
            assert say(server, stream=stream, **asked) == whole, asked
    assert "always opens <think>" in server.log.read_text()

    # An answer that a token ends before </think> is the answer; one that a limit ends is not.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(server.model)
    ids = tokenizer.encode(REASONING, add_special_tokens=False)
    begun = tokenizer.decode(ids[:4])
    ended: dict[str, Any] = {"stop_token_ids": [ids[4]]}
    assert say(server, **ended) == ("", begun, "stop")
    assert say(server, stream=True, **ended)[1:] == (begun, "stop")
    for stream in (False, True):
        assert say(server, stream=stream, max_tokens=4) == (begun, "", "length")

    # The budget, by SGLang's own way and by the processor whose ids were GLM-4's.
    from sglang.srt.sampling.custom_logit_processor import Glm4MoeThinkingBudgetLogitProcessor

    budget = {"custom_params": {"thinking_budget": 4}}
    reasoning, content, _ = say(server, **budget)
    assert reasoning.strip() == begun.strip() and content
    processor = Glm4MoeThinkingBudgetLogitProcessor.to_str()
    body = {
        "text": "[gMASK]<sop><|user|>Hello<|assistant|><think>",
        "sampling_params": {"temperature": 0, "max_new_tokens": 12, **budget},
        "custom_logit_processor": processor,
    }
    reply = requests.post(server.url + "/generate", json=body, timeout=300).json()
    assert reply["text"].startswith(begun + "\n</think>")
