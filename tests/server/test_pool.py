"""Page-major pages serve what layer-major pages serve: answers, caches, retraction, a soak; and the
hierarchical cache over them, with the MTP draft in the page. In float32, on one process."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from .comparing import Tally, largest_difference, random_prompt, settled_prompt
from .conftest import FLOAT32
from .harness import QUIET, Answer, Recording, Server
from .test_eagle import eagle_arguments
from .test_robust import settle, stream

pytestmark = pytest.mark.server

NEW = 24
CROWDED = 200
SAME = 1e-5  # nats, and of cached values
# Admits requests as if they would hardly grow, so that they outgrow the cache.
SMALL = (
    *("--max-total-tokens", "1536", "--max-running-requests", "8"),
    *("--schedule-conservativeness", "0.1"),
)
EAGLE = eagle_arguments(3, 4)
SOAK = int(os.environ.get("GLM53_SOAK", "500"))  # requests; 10,000 were run once
HOST_GIB = (
    13  # free host memory without which SGLang builds no hierarchical cache (its reserve: 10)
)


def serve(checkpoint: Path, folder: Path, pages: str, *arguments: str) -> Server:
    """A float32 server with the draft and a cache of 24 pages."""
    options = (*FLOAT32, *QUIET, *EAGLE, *SMALL, *arguments)
    environment = {"GLM53_POOL": pages, "GLM53_SERVE": "ours"}
    return Server(checkpoint, options, folder, environment=environment).start()


def crowd(server: Server, prompt: list[int]) -> dict[str, Any]:
    """A long answer that may end early: the reply."""
    body = server.request(prompt, CROWDED, logprob_start=len(prompt) - 1, ignore_eos=False)
    reply = requests.post(server.url + "/generate", json=body, timeout=600)
    reply.raise_for_status()
    return reply.json()


class Run:
    """What one server answered, before it was stopped."""

    def __init__(self, server: Server, prompts: list[list[int]]) -> None:
        self.status = server.get("/server_info")["internal_states"][0]["glm53"]
        self.free = server.flush()
        # Each from an empty cache, then two that share a prefix of two pages.
        self.answers: list[Answer] = []
        for prompt in prompts:
            server.flush()
            self.answers += server.generate([prompt], NEW)
        self.recordings = [server.recording(answer.rid) for answer in self.answers]
        shared = prompts[-1][:150]
        self.sharing = [
            server.generate([shared + random_prompt(500, 30, seed)], NEW, len(shared))[0]
            for seed in (1, 2)
        ]
        # The same two at once, and a third with their prefix that its client leaves.
        with ThreadPoolExecutor() as pool:
            leaving = pool.submit(stream, server, shared + [3] * 40, 1000, 3)
            both = [answer.prompt for answer in self.sharing]
            together = pool.submit(server.generate, both, NEW, len(shared))
            self.together = together.result()
            leaving.result()
        settle(server)
        # More than the cache holds: requests are retracted and come back. One after the other, and
        # free to end early: for what waits together, or must reach its full length, SGLang reserves
        # that length.
        with ThreadPoolExecutor(8) as pool:
            many = []
            for seed in range(8):
                many.append(pool.submit(crowd, server, random_prompt(500, 100, seed=seed)))
                time.sleep(0.2)
            self.crowded = [one.result() for one in many]
        settle(server)
        self.free_then = server.flush()
        self.log = server.log.read_text(errors="replace")


@pytest.fixture(scope="module")
def prompts(tiny_checkpoint: Callable[..., Path], reference: Callable) -> list[list[int]]:
    model = reference(tiny_checkpoint())
    return [settled_prompt(model, n, NEW, seed) for n, seed in ((63, 63), (65, 65), (200, 200))]


@pytest.fixture(scope="module")
def runs(
    tiny_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
) -> dict[str, Run]:
    """The same requests to both."""
    done = {}
    for pages in ("page", "layer"):
        server = serve(tiny_checkpoint(), tmp_path_factory.mktemp(pages), pages)
        try:
            done[pages] = Run(server, prompts)
        finally:
            server.kill()
    return done


def test_the_mode_is_told(runs: dict[str, Run]) -> None:
    assert "page-major" in runs["page"].status["pages"]
    assert "the draft's layer inside" in runs["page"].status["pages"]
    assert runs["layer"].status["pages"] == "layer-major"
    for run in runs.values():
        assert run.status["serving"] == "ours" and run.status["pages"] in run.log
    # Not a token less for the same memory.
    assert runs["page"].free == runs["layer"].free > 0


def test_both_answer_what_the_reference_does(
    runs: dict[str, Run], tiny_checkpoint: Callable[..., Path], reference: Callable
) -> None:
    model, tally = reference(tiny_checkpoint()), Tally()
    for pages, run in runs.items():
        for answer in run.answers:
            assert answer.tokens == model.generate(answer.prompt, NEW)
            trace = model.trace(answer.sequence)
            tally.logprobs(answer, trace, f"{pages}-major, {len(answer.prompt)} tokens")
    assert not tally.failures, tally.failures[:10]


def test_both_answer_the_same(runs: dict[str, Run]) -> None:
    for name in ("answers", "sharing", "together"):
        pairs = zip(getattr(runs["page"], name), getattr(runs["layer"], name), strict=True)
        worst = max(largest_difference(*pair) for pair in pairs)
        print(f"{name}: largest |delta log-probability| {worst:.1e}")
        assert worst <= SAME
    crowded = [[reply["output_ids"] for reply in run.crowded] for run in runs.values()]
    print(f"crowd: {[len(tokens) for tokens in crowded[0]]} tokens")
    # Requests come back in batches of other shapes; a random prompt may hold a tie.
    assert sum(a == b for a, b in zip(*crowded, strict=True)) >= 6
    assert all(answer.cached >= 128 for run in runs.values() for answer in run.sharing)


def caches_differ(one: Recording, other: Recording) -> float:
    """Largest difference of latents and index keys, target's and draft's, and of no set."""
    assert one.arrays.keys() == other.arrays.keys()
    worst = 0.0
    for name, values in one.arrays.items():
        kind = name.split(".")[1] if "." in name else name
        if kind in ("latent", "index"):
            worst = max(worst, float(np.abs(values - other.arrays[name]).max()))
        elif kind in ("select", "attend", "tokens"):
            assert np.array_equal(values, other.arrays[name]), name
    return worst


def test_both_keep_the_same(runs: dict[str, Run]) -> None:
    pairs = zip(runs["page"].recordings, runs["layer"].recordings, strict=True)
    assert max(caches_differ(*pair) for pair in pairs) <= SAME


def test_no_page_is_lost(runs: dict[str, Run]) -> None:
    for run in runs.values():
        assert "Retract requests" in run.log, "nothing was retracted: the crowd is too small"
        assert sum(reply["meta_info"]["num_retractions"] for reply in run.crowded) > 0
        assert run.free_then == run.free


# A soak, and the hierarchical cache


@pytest.fixture
def page_major(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> Iterator[Callable[..., Server]]:
    """A function of further arguments to a page-major server, stopped at the end."""
    started: list[Server] = []

    def start(*arguments: str) -> Server:
        started.append(serve(tiny_checkpoint(), tmp_path, "page", *arguments))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.mark.slow
def test_a_soak_loses_no_page(page_major: Callable[..., Server]) -> None:
    """Random requests of 8 tokens, shared prefixes, clients that leave: all pages come back, and
    the first answer is the last one too."""
    server, rng = page_major(), random.Random(53)
    stems = [random_prompt(500, 64 * rng.randint(1, 5), seed=seed) for seed in range(12)]
    free = server.flush()
    (first,) = server.generate([stems[0]], 8)

    def one(number: int) -> None:
        pick = random.Random(number)
        prompt = pick.choice(stems)[: pick.randint(1, 320)]
        prompt = prompt + random_prompt(500, pick.randint(1, 200), seed=number)
        if pick.random() < 0.1:
            stream(server, prompt, 200, leave_after=1)
            return
        body = {**server.request(prompt, 8), "return_logprob": False}
        reply = requests.post(server.url + "/generate", json=body, timeout=600)
        assert reply.status_code == 200 and len(reply.json()["output_ids"]) == 8

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(SOAK)))
    settle(server, seconds=120)
    assert server.flush() == free
    (last,) = server.generate([stems[0]], 8)
    assert largest_difference(first, last) <= SAME


@pytest.fixture(scope="module")
def hierarchical(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A page-major server with a host tier four times its cache."""
    server = serve(
        tiny_checkpoint(),
        tmp_path_factory.mktemp("host"),
        "page",
        *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-io-backend", "direct"),
        *("--hicache-write-policy", "write_through"),
    )
    yield server
    server.kill()


def evict(server: Server, count: int = 12) -> None:
    """Other prompts, by default three times what the device holds."""
    for seed in range(count):
        server.generate([random_prompt(500, 400, seed=100 + seed)], 4)


def test_pages_come_back_from_the_host(hierarchical: Server) -> None:
    """Write, evict, load back: the answer, the accept length and the caches stay as they were."""
    server = hierarchical
    assert "to the host and back are the same bytes (target, draft 0" in server.log.read_text()
    prompt = random_prompt(500, 400, seed=3)
    (first,) = server.generate([prompt], NEW, logprob_start=len(prompt) - 1)
    (resident,) = server.generate([prompt], NEW, logprob_start=len(prompt) - 1)
    evict(server)
    (loaded,) = server.generate([prompt], NEW, logprob_start=len(prompt) - 1)
    details = [answer.meta.get("cached_tokens_details") for answer in (resident, loaded)]
    print(f"cached: {first.cached}, {resident.cached}, {loaded.cached}; {details}")
    assert first.cached == 0 and loaded.cached == resident.cached >= 384
    assert details[1] and details[1].get("host", 0) >= 384, "nothing came from the host"
    assert largest_difference(resident, loaded) <= SAME
    steps = [answer.meta["spec_verify_ct"] for answer in (resident, loaded)]
    assert steps[0] == steps[1], f"verify steps {steps}: another accept length"
    before, after = (server.recording(answer.rid) for answer in (resident, loaded))
    kept = loaded.cached
    for name, values in before.arrays.items():
        if name.split(".")[1:2] in (["latent"], ["index"]):
            assert np.array_equal(values[:kept], after.arrays[name][:kept]), name


def test_clients_that_leave_while_pages_come_back(hierarchical: Server) -> None:
    """Aborted at once, in the load-back's prefill, or after it: all pages come back, and the answer
    from the host is the one from the device."""
    server, prompt = hierarchical, random_prompt(500, 400, seed=4)
    free = server.flush()
    (resident,) = server.generate([prompt], NEW, logprob_start=len(prompt) - 1)
    gave = []
    with ThreadPoolExecutor() as pool:
        for number, delay in enumerate((0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)):
            evict(server, 4)  # as much as the device holds
            rid = f"leaves-{number}"
            body = {**server.request(prompt, 200, rid), "return_logprob": False}
            reply = pool.submit(requests.post, server.url + "/generate", json=body, timeout=120)
            time.sleep(delay)
            requests.post(server.url + "/abort_request", json={"rid": rid}, timeout=30)
            answer = reply.result()
            gave.append(len(answer.json()["output_ids"]) if answer.status_code == 200 else 0)
    print(f"tokens of the aborted: {gave}")
    assert min(gave) < 200, "no abort came in time"
    evict(server, 4)
    (loaded,) = server.generate([prompt], NEW, logprob_start=len(prompt) - 1)
    assert (loaded.meta.get("cached_tokens_details") or {}).get("host", 0) > 0
    assert largest_difference(resident, loaded) <= SAME
    settle(server)
    assert server.flush() == free
