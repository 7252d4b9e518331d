"""Starts the real ``sglang serve``, asks it, and stops it without leaving a process behind."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import requests
import torch

from sglang_glm53.commands.stacks import append_stacks

READY_SECONDS = 420
# SGLang's first request to itself takes some seconds. In one of some thousand starts it never came
# back (cause unknown; no other request is let in before): such a start is told, and made again.
STALLED_SECONDS = 150
STOP_SECONDS = 60

# Ports of the servers: a range for each of the test processes that run at the same time.
FIRST_PORT, PORTS, WORKERS = 20_000, 3_000, 4
PORTS_ABOVE = 600  # that a server opens above the one that it is given

START = Path(__file__).parent / "start"  # what Python reads first in a server's processes

# A scheduler that waits otherwise asks for work in a loop, which takes a core from the others.
QUIET = ("--sleep-on-idle",)


class ServerFailed(AssertionError):
    """The server ended or did not get ready; the message carries the end of its log."""


class Stalled(ServerFailed):
    """The server listens, and its first request to itself does not come back."""


@dataclass
class Answer:
    """One request's result.

    tokens: the generated ids; prompt: the ids sent.
    logprobs: position in prompt + tokens -> log-probability (nats) of the token there.
    cached: prompt tokens taken from the prefix cache; meta: SGLang's meta_info.
    """

    rid: str
    prompt: list[int]
    tokens: list[int]
    logprobs: dict[int, float]
    cached: int
    meta: dict[str, Any]

    @property
    def sequence(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.tokens


def free_port() -> int:
    """A TCP port nobody listens on, from a range that this test process has for itself.

    SGLang takes seconds to open it, and opens others at a fixed distance from it; a server that
    another test process starts in the meantime must not get any of them. The ranges lie below
    what the system gives to outgoing connections.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST_PORT + PORTS * (worker % WORKERS)
    while True:
        port = random.randrange(first, first + PORTS - PORTS_ABOVE)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@dataclass
class Server:
    """A ``sglang serve`` process on its own port.

    folder: where log and recordings go; probe: record with the plugin in probe.py.
    """

    model: Path
    arguments: Sequence[str]
    folder: Path
    probe: bool = True
    port: int = field(default_factory=free_port)
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    ready_after: float = 0.0
    _count: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def start(self) -> Server:
        """Starts the server and waits until it answers; raises ServerFailed with the log's end."""
        try:
            return self._start()
        except Stalled as stalled:
            warnings.warn(f"started again: {stalled}", stacklevel=2)
            self.port = free_port()
            return self._start()

    def _start(self) -> Server:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [str(Path(sys.executable).parent / "sglang"), "serve"]
        command += ["--model-path", str(self.model), "--port", str(self.port), *self.arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": _threads(), **self.environment}
        environment = on_path(environment, START)
        if self.probe:
            environment["GLM53_PROBE_DIR"] = str(self.folder)
            environment = on_path(environment, _probe_on_path(self.folder))
        began = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            self._wait_ready(began)
        except BaseException:
            self.kill()
            raise
        self.ready_after = time.monotonic() - began
        return self

    def _wait_ready(self, began: float) -> None:
        assert self.process is not None
        told = began
        listens = None
        while True:
            if self.process.poll() is not None:
                raise ServerFailed(f"exit code {self.process.returncode}\n{self.tail()}")
            waited = time.monotonic() - began
            if listens is None and "Application startup complete" in self.tail():
                listens = waited
            stalled = listens is not None and waited > listens + STALLED_SECONDS
            if stalled or waited > READY_SECONDS:
                append_stacks(self.process.pid, self.log)
                failed = Stalled if stalled else ServerFailed
                raise failed(f"not ready after {waited:.0f} s\n{self.tail(200)}")
            try:
                if requests.get(self.url + "/health_generate", timeout=10).status_code == 200:
                    return
            except requests.RequestException:
                pass
            if time.monotonic() - told > 15:
                told = time.monotonic()
                print(f"waiting for {self.url}: {waited:.0f} s, log {self.log}", flush=True)
            time.sleep(0.5)

    def tail(self, lines: int = 60) -> str:
        """The end of the log."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(line[:400] for line in text)

    def stop(self) -> int:
        """SIGTERM, wait, exit code; whatever is left of the process group is killed."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(f"alive {STOP_SECONDS} s after SIGTERM\n{self.tail()}") from None
        self.kill()
        return code

    def kill(self) -> None:
        """SIGKILL to the whole process group."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(STOP_SECONDS)

    def family(self) -> list[psutil.Process]:
        """The server's process and all its descendants."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def get(self, path: str) -> Any:
        """GET, as JSON."""
        response = requests.get(self.url + path, timeout=60)
        response.raise_for_status()
        return response.json()

    def loads(self) -> list[dict[str, Any]]:
        """/v1/loads, one entry a data-parallel rank."""
        return self.get("/v1/loads")["loads"]

    def flush(self) -> int:
        """Empties the prefix cache and returns the slots that are free then (needs the probe)."""
        for _ in range(40):
            response = requests.post(self.url + "/flush_cache", timeout=60)
            if response.status_code == 200:
                break
            time.sleep(0.25)
        else:
            raise ServerFailed(f"flush refused: {response.text}\n{self.tail()}")
        lines = [
            json.loads(line)
            for file in self.folder.glob("free.*.jsonl")
            for line in file.read_text().splitlines()[-1:]
        ]
        return min((line["free"] for line in lines if line["flushed"]), default=-1)

    def request(
        self,
        prompt: list[int] | list[list[int]],
        new_tokens: int,
        rid: str | list[str] | None = None,
        logprob_start: int = 0,
        stream: bool = False,
        **parameters: Any,
    ) -> dict[str, Any]:
        """The JSON body of a greedy /generate request."""
        return {
            "input_ids": prompt,
            "rid": rid,
            "stream": stream,
            "return_logprob": True,
            "logprob_start_len": logprob_start,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
                **parameters,
            },
        }

    def generate(
        self, prompts: list[list[int]], new_tokens: int, logprob_start: int = 0
    ) -> list[Answer]:
        """Greedy answers to all ``prompts``, sent as one batch, with log-probabilities."""
        rids = []
        for _ in prompts:
            self._count += 1
            rids.append(f"t{self.port}-{self._count}")
        single = len(prompts) == 1
        body = self.request(
            prompts[0] if single else prompts,
            new_tokens,
            rids[0] if single else rids,
            logprob_start,
        )
        try:
            response = requests.post(self.url + "/generate", json=body, timeout=600)
        except requests.RequestException as error:
            raise ServerFailed(f"{error}\n{self.tail()}") from error
        if response.status_code != 200:
            raise ServerFailed(f"{response.status_code} {response.text}\n{self.tail()}")
        replies = [response.json()] if single else response.json()
        return [
            _answer(rid, prompt, reply)
            for rid, prompt, reply in zip(rids, prompts, replies, strict=True)
        ]

    def recording(self, rid: str, seconds: float = 20) -> Recording:
        """What the probe wrote for a finished request."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = sorted(self.folder.glob(f"{rid}.*.npz"))
            if found:
                return Recording(dict(np.load(found[0])))
            failed = self.folder / f"{rid}.error"
            if failed.exists():
                raise ServerFailed(f"the recording of {rid} failed: {failed.read_text()}")
            time.sleep(0.1)
        raise ServerFailed(f"no recording of {rid} in {self.folder}\n{self.tail()}")

    def proposals(self, rid: str) -> list[dict[str, Any]]:
        """The drafts of a request in order: cached length, last token, drafted tokens."""
        for file in sorted(self.folder.glob("proposals.*.jsonl")):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            mine = [line for line in lines if line["rid"] == rid]
            if mine:
                return mine
        return []


class Recording:
    """One request's slots in the pools, and the sets its layers used; see probe.py."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.length = len(arrays["slots"])

    def layers(self, kind: str, who: str = "target") -> list[int]:
        """Layers that have a recording of ``kind``: latent, index, select or attend."""
        prefix = f"{who}.{kind}."
        return sorted(int(k[len(prefix) :]) for k in self.arrays if k.startswith(prefix))

    def tensor(self, kind: str, layer: int, who: str = "target") -> torch.Tensor:
        """[committed, width] of ``kind``."""
        return torch.from_numpy(self.arrays[f"{who}.{kind}.{layer}"])

    def mask(self, kind: str, layer: int, who: str = "target") -> torch.Tensor:
        """bool [committed, committed]: the positions each row selected or attended.

        A row of dense attention (see probe.py) is everything up to its position. Raises
        AssertionError for rows that no forward wrote or that look ahead.
        """
        from .probe import DENSE, NOT_SEEN

        rows, n = self.tensor(kind, layer, who).long(), self.length
        assert not (rows == NOT_SEEN).any(), f"{kind} of layer {layer}: rows never computed"
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        # one spare column takes the padding
        columns = torch.where(rows < 0, n, rows)
        assert int(columns.max()) <= n, f"{kind} of layer {layer}: a position past the end"
        mask = torch.zeros(n, n + 1, dtype=torch.bool).scatter_(1, columns, True)[:, :n]
        assert not (mask & ~causal).any(), f"{kind} of layer {layer}: looks ahead"
        dense = rows[:, 0] == DENSE
        return torch.where(dense[:, None], causal, mask)

    def dense_rows(self, layer: int, who: str = "target") -> torch.Tensor:
        """bool [committed]: rows whose attention ran dense."""
        from .probe import DENSE

        return self.tensor("attend", layer, who)[:, 0] == DENSE


def on_path(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """The environment with a folder in front of PYTHONPATH."""
    path = os.pathsep.join(filter(None, (str(folder), environment.get("PYTHONPATH", ""))))
    return {**environment, "PYTHONPATH": path}


def _threads() -> str:
    """Threads of a server: its share of the cores, where several test processes start one."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return str(max(1, len(os.sched_getaffinity(0)) // processes))


def _answer(rid: str, prompt: list[int], reply: dict[str, Any]) -> Answer:
    meta = reply["meta_info"]
    tokens = reply["output_ids"]
    logprobs: dict[int, float] = {}
    given = meta["input_token_logprobs"]
    first = len(prompt) - len(given)
    for offset, (value, token, *_) in enumerate(given):
        assert token == prompt[first + offset], "the prompt's log-probabilities are misaligned"
        if value is not None:
            logprobs[first + offset] = value
    for offset, (value, token, *_) in enumerate(meta["output_token_logprobs"]):
        assert token == tokens[offset], "the output's log-probabilities are misaligned"
        logprobs[len(prompt) + offset] = value
    return Answer(rid, prompt, tokens, logprobs, meta.get("cached_tokens", 0), meta)


def _probe_on_path(folder: Path) -> Path:
    """A folder for PYTHONPATH that makes probe.py an installed SGLang plugin."""
    place = folder / "plugin"
    metadata = place / "glm53_probe-1.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (place / "glm53_probe.py").write_text((Path(__file__).parent / "probe.py").read_text())
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: glm53-probe\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nglm53_probe = glm53_probe:install\n"
    )
    return place


class ServerPool:
    """At most one server alive: asking for another one stops the one before."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.current: tuple[Any, Server] | None = None
        self.ending: Server | None = None
        self._started = 0

    def running(self, model: Path, *arguments: str, **environment: str) -> Server | None:
        """The running server if it is this one."""
        key = (model, arguments, tuple(sorted(environment.items())))
        if self.current is None or self.current[0] != key:
            return None
        return self.current[1] if self.current[1].process.poll() is None else None

    def get(self, model: Path, *arguments: str, **environment: str) -> Server:
        """The running server if it is the same, else a new one."""
        running = self.running(model, *arguments, **environment)
        if running is not None:
            return running
        self.dismiss()
        self._started += 1
        server = Server(
            model,
            (*arguments, *QUIET),
            self.root / f"server{self._started}",
            environment=environment,
        )
        server.start()
        self.current = ((model, arguments, tuple(sorted(environment.items()))), server)
        self.see_off()
        return server

    def dismiss(self) -> None:
        """Ask the server that runs to end, without waiting: the next one starts meanwhile."""
        self.see_off()
        if self.current is None:
            return
        server, self.current = self.current[1], None
        assert server.process.poll() is None, f"the server died\n{server.tail()}"
        server.process.send_signal(signal.SIGTERM)
        self.ending = server

    def see_off(self) -> None:
        """Wait for the server that was asked to end; its exit code must be 0."""
        if self.ending is None:
            return
        server, self.ending = self.ending, None
        code = server.stop()
        assert code == 0, f"the server ended with {code}\n{server.tail()}"

    def close(self) -> None:
        """Stop what runs; its exit code must be 0."""
        self.dismiss()
        self.see_off()
