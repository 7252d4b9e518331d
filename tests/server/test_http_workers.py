"""Several HTTP workers (`--tokenizer-worker-num`): SGLang loads no plugin in them, and what this
package does to requests and answers is there all the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from .harness import Server

pytestmark = pytest.mark.server
WORKERS = 2
TIMES = 4 * WORKERS  # each request goes to the worker that takes it


@pytest.fixture(scope="module")
def server(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    arguments = ("--tokenizer-worker-num", str(WORKERS), "--max-total-tokens", "2048")
    started = Server(tiny_checkpoint(), arguments, tmp_path_factory.mktemp("workers"), probe=False)
    started.start()
    yield started
    started.kill()


def test_an_id_that_the_model_does_not_have_is_refused(
    server: Server, tiny_checkpoint: Callable[..., Path]
) -> None:
    rows = json.loads((tiny_checkpoint() / "config.json").read_text())["vocab_size"]
    for _ in range(TIMES):
        body = {"input_ids": [1, rows], "sampling_params": {"max_new_tokens": 2}}
        reply = requests.post(server.url + "/generate", json=body, timeout=60)
        assert reply.status_code == 400 and f"0 to {rows - 1}" in reply.text, reply.text
    body["input_ids"] = [1, rows - 1]
    reply = requests.post(server.url + "/generate", json=body, timeout=60)
    assert reply.status_code == 200, reply.text  # the scheduler lives


def test_a_body_that_is_no_object_is_refused(server: Server) -> None:
    for _ in range(TIMES):
        reply = requests.post(
            server.url + "/v1/chat/completions",
            json=None,
            data="null",
            headers={"content-type": "application/json"},
            timeout=60,
        )
        assert reply.status_code == 400, reply.text


def test_answers_are_read_by_our_parsers(server: Server) -> None:
    body = {"text": "The answer is 42.", "reasoning_parser": "glm45"}
    for _ in range(TIMES):
        reply = requests.post(server.url + "/separate_reasoning", json=body, timeout=60).json()
        assert reply == {"reasoning_text": "", "text": "The answer is 42."}
