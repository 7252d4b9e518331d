"""The watchdog in a server: planted faults of the cache, an end with a reason, metrics, the probe.

The weights are random: what they show of a fault is what the cache shows (debug mode). What a
trained model shows is in tests/regression/test_watch.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from regression import faults
from regression.switch import Switch

from .conftest import FLOAT32
from .harness import QUIET, Server, ServerPool
from .test_eagle import eagle_arguments

pytestmark = pytest.mark.server

WITHIN = 256  # tokens, of the prompt and of the answer


@dataclass(frozen=True)
class Watched:
    server: Server
    switch: Switch

    def alarms(self) -> dict[str, int]:
        return self.server.get("/server_info")["internal_states"][0]["glm53"]["alarms"]

    def ask(self, rid: str, new: int, seed: int) -> requests.Response:
        rng = random.Random(seed)
        prompt = [rng.randrange(10, 500) for _ in range(120)]
        body = self.server.request(prompt, new, rid, temperature=1.0) | {"return_logprob": False}
        return requests.post(self.server.url + "/generate", json=body, timeout=300)


@pytest.fixture(scope="module")
def watched(
    servers: ServerPool,
    tiny_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    """A server in debug mode that ends what it alarms for, with the faults installed and off."""
    servers.close()
    folder = tmp_path_factory.mktemp("watched")
    switch = Switch(folder / "faults")
    server = Server(
        tiny_checkpoint(),
        (*FLOAT32, "--enable-metrics", *eagle_arguments(3, 4), *QUIET),
        folder,
        probe=False,
        environment=switch.environment() | {"GLM53_WATCH": "debug,abort,accept=0"},
    )
    server.start()
    yield Watched(server, switch)
    code = server.stop()
    assert code == 0, f"the server ended with {code}\n{server.tail()}"


def metric(server: Server, kind: str) -> float:
    from sglang_glm53.watch.alarms import METRIC

    text = requests.get(server.url + "/metrics", timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith(METRIC + "{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if f'kind="{kind}"' in line)


@pytest.mark.parametrize("fault", [faults.STALE_DRAFT, faults.STALE_INDEX])
def test_a_planted_fault_is_found_and_its_request_ended(watched: Watched, fault: str) -> None:
    """What others left in a slot is not taken for a request's own; healthy ones are let through."""
    server = watched.server
    healthy = watched.ask(f"before-{fault}", 60, seed=1)
    assert healthy.status_code == 200 and len(healthy.json()["output_ids"]) == 60
    before, counted = watched.alarms().get("not_written", 0), metric(server, "not_written")
    server.flush()
    with watched.switch.fault(fault):
        # The first request finds slots that nobody had since the fault is on.
        replies = []
        for turn in range(3):
            replies.append(watched.ask(f"{fault}-{turn}", WITHIN - 120, seed=turn))
            server.flush()
    ended: list[Any] = [reply for reply in replies if reply.status_code == 500]
    assert ended and "not_written" in ended[0].text and "watchdog" in ended[0].text
    found = watched.alarms()["not_written"] - before
    assert found == len(ended) == metric(server, "not_written") - counted
    lines = [line for line in server.log.read_text().splitlines() if "watch: request" in line]
    assert len([line for line in lines if f"request {fault}-" in line]) == found
    after = watched.ask(f"after-{fault}", 60, seed=1)
    assert after.status_code == 200 and watched.alarms()["not_written"] - before == found


def test_the_probe_asked_before_the_server_was_ready(watched: Watched) -> None:
    log = watched.server.log.read_text()
    assert log.index("start-up probe: ") < log.index("The server is fired up")
    assert "could not ask" not in log
