"""Cancelled clients, many streams, restarts and kills: no hang, no leaked page, no orphan."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from .comparing import random_prompt
from .conftest import FLOAT32
from .harness import Server, ServerPool
from .test_eagle import eagle_arguments

pytestmark = pytest.mark.server

SETTINGS = {"plain": (), "eagle": eagle_arguments(3, 4)}
SERVERS = {"plain": "plain", "eagle": "eagle 3-1-4-share1"}  # those of test_oracle and test_eagle
PARAMETERS = [
    pytest.param(name, marks=pytest.mark.server(server)) for name, server in SERVERS.items()
]


@pytest.fixture(scope="module", params=PARAMETERS)
def server(
    request: pytest.FixtureRequest, servers: ServerPool, tiny_checkpoint: Callable[..., Path]
) -> Server:
    """A float32 server, without and with speculation."""
    return servers.get(tiny_checkpoint(), *FLOAT32, *SETTINGS[request.param])


@pytest.fixture
def vocabulary(tiny_checkpoint: Callable[..., Path]) -> int:
    return json.loads((tiny_checkpoint() / "config.json").read_text())["vocab_size"]


def stream(
    server: Server, prompt: list[int], new: int, leave_after: int | None = None
) -> list[int]:
    """Tokens of a streamed answer; closes the connection after ``leave_after`` events."""
    body = {**server.request(prompt, new, stream=True), "return_logprob": False}
    tokens: list[int] = []
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=300) as reply:
        reply.raise_for_status()
        events = 0
        for line in reply.iter_lines():
            if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
                continue
            tokens = json.loads(line[5:])["output_ids"]
            events += 1
            if leave_after is not None and events >= leave_after:
                break
    return tokens


def settle(server: Server, seconds: float = 30) -> None:
    """Waits until no request runs and no token is in use."""
    until = time.monotonic() + seconds
    while True:
        loads = server.loads()
        idle = all(
            load["num_used_tokens"] == load["num_running_reqs"] == load["num_waiting_reqs"] == 0
            for load in loads
        )
        if idle:
            return
        assert time.monotonic() < until, f"still in use after {seconds} s: {loads}"
        time.sleep(0.25)


def test_cancelled_clients_leak_nothing(server: Server, vocabulary: int) -> None:
    """Clients that leave during decode, during prefill and while queued."""
    settle(server)
    free = server.flush()
    assert free > 0
    (before,) = server.generate([random_prompt(vocabulary, 100, seed=1)], 16)
    for events in (1, 3, 10):
        stream(server, random_prompt(vocabulary, 150, seed=events), 2000, leave_after=events)
    with pytest.raises(requests.RequestException):
        body = server.request(random_prompt(vocabulary, 3000, seed=4), 500)
        requests.post(server.url + "/generate", json=body, timeout=0.3)
    settle(server)
    (after,) = server.generate([before.prompt], 16)
    assert after.tokens == before.tokens
    settle(server)
    assert server.flush() == free


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"text": ""}, "no tokens"),
        ({"text": ["", "one"]}, "no tokens"),
        ({"input_ids": [1, 1 << 20]}, "token ids"),
        ({"input_ids": [-1]}, "token ids"),
    ],
)
def test_a_prompt_that_is_none_is_refused(
    server: Server, prompt: dict[str, object], says: str
) -> None:
    body = {**prompt, "sampling_params": {"max_new_tokens": 2}}
    reply = requests.post(server.url + "/generate", json=body, timeout=60)
    assert reply.status_code == 400 and says in reply.text
    assert requests.get(server.url + "/health", timeout=60).status_code == 200
    settle(server)


def test_a_failed_update_leaves_the_weights(
    server: Server, vocabulary: int, tiny_checkpoint: Callable[..., Path]
) -> None:
    """A checkpoint of another size, and a folder that is none."""
    prompt = random_prompt(vocabulary, 100, seed=11)
    (before,) = server.generate([prompt], 16)
    for folder in (tiny_checkpoint(layers=3, hidden=128), Path("/nowhere")):
        reply = requests.post(
            server.url + "/update_weights_from_disk", json={"model_path": str(folder)}, timeout=120
        )
        assert reply.status_code == 400 and not reply.json()["success"]
        server.flush()
        (after,) = server.generate([prompt], 16)
        assert after.tokens == before.tokens


def test_32_concurrent_streams(server: Server, vocabulary: int) -> None:
    """All streams end with what each prompt gives alone, and every page comes back."""
    settle(server)
    free = server.flush()
    prompts = [random_prompt(vocabulary, 10 + 7 * i, seed=100 + i) for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda prompt: stream(server, prompt, 24), prompts))
    assert [len(tokens) for tokens in answers] == [24] * 32
    for i in (0, 13, 31):
        (alone,) = server.generate([prompts[i]], 24)
        assert answers[i] == alone.tokens
    settle(server)
    assert server.flush() == free


@pytest.mark.server("alone")
def test_sigterm_and_kill_free_the_port(
    servers: ServerPool, tiny_checkpoint: Callable[..., Path], vocabulary: int, tmp_path: Path
) -> None:
    """Three servers one after the other on one port: SIGTERM during a stream, SIGKILL, SIGTERM.

    SIGTERM gives the stream its end and exit code 0; SIGKILL leaves no orphan; the answer is
    the same each time.
    """
    servers.close()
    prompt = random_prompt(vocabulary, 90, seed=7)
    first = Server(tiny_checkpoint(), FLOAT32, tmp_path / "first").start()
    second = Server(tiny_checkpoint(), FLOAT32, tmp_path / "second", port=first.port)
    third = Server(tiny_checkpoint(), FLOAT32, tmp_path / "third", port=first.port)
    try:
        (answer,) = first.generate([prompt], 16)
        family = first.family()
        with ThreadPoolExecutor(1) as pool:
            streaming = pool.submit(stream, first, prompt, 100)
            until = time.monotonic() + 30
            while not first.loads()[0]["num_running_reqs"] and time.monotonic() < until:
                time.sleep(0.02)
            assert first.stop() == 0
            tokens = streaming.result(30)
        assert len(tokens) == 100 and tokens[:16] == answer.tokens
        assert not alive(family)

        (again,) = second.start().generate([prompt], 16)
        assert again.tokens == answer.tokens
        kill_and_look(second)

        (again,) = third.start().generate([prompt], 16)
        assert again.tokens == answer.tokens
        assert third.stop() == 0
    finally:
        for server in (first, second, third):
            server.kill()


def kill_and_look(server: Server) -> None:
    """SIGKILL to the main process alone: its children must end by themselves."""
    family = server.family()
    assert len(family) > 2, "scheduler and detokenizer were expected"
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(30)
    until = time.monotonic() + 30
    while alive(family) and time.monotonic() < until:
        time.sleep(0.25)
    assert not alive(family), f"orphans: {alive(family)}"


def alive(family: list[psutil.Process]) -> list[psutil.Process]:
    """The processes of ``family`` that still run."""
    return [
        process
        for process in family
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
