"""A fault run: many mixed streams for a while, then SIGTERM, kill -9 and restarts.

    cd tests && python -m server.fault_run --out DIR [--minutes 10] [--streams 64] [--model DIR]

writes DIR/faults.json, prints what was asked and what is wrong, and ends with exit code 1 if
anything is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests

from .fault_kinds import KINDS, Outcome, Target, stream
from .harness import QUIET, Server

ARGUMENTS = (
    *("--tool-call-parser", "glm47", "--reasoning-parser", "glm45", "--enable-metrics"),
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    *("--max-running-requests", "24", "--max-total-tokens", "24576"),
    *QUIET,
)
THROUGHPUT = 0.05  # by which it may be lower afterwards
ROUNDS, TOGETHER, TOKENS = 9, 16, 64  # of a throughput measurement


@dataclass
class Report:
    """What a run found. wrong: what must not be; empty if all is well.

    throughput, cpu: tokens a second of the clock, and of the server's processor time, before and
    after. free: cache slots that are free when all is over, before and after. rss: bytes.
    """

    seconds: float = 0.0
    streams: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    throughput: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    alarms: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def target_of(server: Server) -> Target:
    config = json.loads((server.model / "config.json").read_text())
    limit = config["max_position_embeddings"]
    return Target(server.url, server.port, limit, config["vocab_size"])


def run(server: Server, report: Report, *, seconds: float, streams: int, seed: int = 1) -> None:
    """`streams` clients at a time, each asking one random kind after the other for `seconds`."""
    target, until = target_of(server), time.monotonic() + seconds
    lock = threading.Lock()

    def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        kinds, weights = zip(*KINDS, strict=True)
        while time.monotonic() < until:
            (kind,) = rng.choices(kinds, weights)
            try:
                outcome = kind(target, rng)
            except Exception as error:  # a hang, or a connection that the server closed
                said = " ".join(repr(error).split())[:300]
                outcome = Outcome(kind.__name__, -1, wrong=said)
            with lock:
                report.outcomes[f"{outcome.kind}: {outcome.status or 'left'}"] += 1
                report.tokens += outcome.tokens
                if outcome.wrong:
                    said = f"{outcome.kind}: HTTP {outcome.status}: {outcome.wrong}"
                    report.wrong.append(said)

    began = time.monotonic()
    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until + 400 - time.monotonic()))
    hung = sum(thread.is_alive() for thread in threads)
    if hung:
        report.wrong.append(f"{hung} of {streams} streams hang")
    report.seconds += time.monotonic() - began
    report.streams = streams


def measure(server: Server, report: Report, rounds: int = ROUNDS) -> None:
    """Append throughput (median of the rounds), free slots and memory of a server at rest."""
    settle(server)
    vocabulary = target_of(server).vocabulary
    rng = random.Random(5)
    prompts = [[rng.randrange(10, vocabulary - 10) for _ in range(64)] for _ in range(TOGETHER)]
    clock, cpu = [], []
    for _ in range(rounds):
        server.flush()
        before, began = cpu_seconds(server), time.monotonic()
        body = server.request(prompts, TOKENS, None) | {"return_logprob": False}
        requests.post(server.url + "/generate", json=body, timeout=600).raise_for_status()
        clock.append(TOGETHER * TOKENS / (time.monotonic() - began))
        cpu.append(TOGETHER * TOKENS / (cpu_seconds(server) - before))
    report.throughput.append(statistics.median(clock))
    report.cpu.append(statistics.median(cpu))
    settle(server)
    report.free.append(server.flush())
    report.rss.append(sum(process.memory_info().rss for process in server.family()))


def cpu_seconds(server: Server) -> float:
    times = [process.cpu_times() for process in server.family()]
    return sum(time.user + time.system for time in times)


def settle(server: Server, seconds: float = 120) -> None:
    """Wait until no request runs and no token is in use.

    Raises:
        AssertionError: what is still in use.
    """
    until = time.monotonic() + seconds
    while True:
        loads = server.loads()
        fields = ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")
        if not any(load[name] for load in loads for name in fields):
            return
        assert time.monotonic() < until, f"still in use after {seconds} s: {loads}"
        time.sleep(0.25)


def answer(server: Server) -> list[int]:
    """A fixed prompt's greedy answer."""
    prompt = [random.Random(9).randrange(10, 500) for _ in range(90)]
    (given,) = server.generate([prompt], 32)
    return given.tokens


def end_under_load(server: Server, how: signal.Signals, streams: int) -> str:
    """Send a signal to the main process while streams run; what is wrong with the end, or ""."""
    assert server.process is not None
    family, target = server.family(), target_of(server)

    def ask(number: int) -> str:
        try:
            return stream(target, random.Random(number)).wrong
        except requests.RequestException:
            return "cut"

    with ThreadPoolExecutor(streams) as pool:
        running = [pool.submit(ask, number) for number in range(streams)]
        until = time.monotonic() + 60
        while not server.loads()[0]["num_running_reqs"] and time.monotonic() < until:
            time.sleep(0.02)
        if how == signal.SIGTERM:
            code = server.stop()
            problem = f"exit code {code} after SIGTERM" if code else ""
        else:
            os.kill(server.process.pid, how)
            server.process.wait(30)
            problem = ""
        replies = [one.result(120) for one in running]
    if how == signal.SIGTERM and not problem:
        cut = [reply for reply in replies if reply and reply != "cut" and "refused" not in reply]
        problem = f"a stream was cut by SIGTERM: {cut[0]}" if cut else ""
    until = time.monotonic() + 30
    while (left := _alive(family)) and time.monotonic() < until:
        time.sleep(0.25)
    return problem or (f"orphans after {how.name}: {left}" if left else "")


def _alive(family: Sequence[psutil.Process]) -> list[int]:
    return [
        process.pid
        for process in family
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def judge(report: Report, *, throughput: bool) -> None:
    """Add what the measurements say is wrong.

    Args:
        throughput: whether it is judged. Where others use the machine too, the clock alone says
            nothing: tokens a second of the server's own processor time must have fallen as well.
    """
    if report.free[0] != report.free[-1] or report.free[0] <= 0:
        report.wrong.append(f"free slots: {report.free[0]} before, {report.free[-1]} after")
    both = (report.throughput, report.cpu)
    if throughput and all(after < (1 - THROUGHPUT) * before for before, after in both):
        report.wrong.append("tokens a second: {:.1f} before, {:.1f} after".format(*both[0]))


def whole(model: Path, out: Path, *, minutes: float, streams: int) -> Report:
    """The run, and then SIGTERM, a restart, kill -9 and a restart, on the same port."""
    report = Report()
    arguments = ("--dtype", "float32", *ARGUMENTS)
    server = Server(model, arguments, out / "first").start()
    servers = [server]
    try:
        said = answer(server)
        measure(server, report, rounds=2)  # what is slow once
        report = Report()
        measure(server, report)
        run(server, report, seconds=60 * minutes, streams=streams)
        measure(server, report)
        judge(report, throughput=True)
        report.alarms = server.get("/server_info")["internal_states"][0]["glm53"]["alarms"]
        if answer(server) != said:
            report.wrong.append("the fixed prompt's answer changed")
        for number, how in enumerate((signal.SIGTERM, signal.SIGKILL)):
            report.wrong += filter(None, [end_under_load(server, how, streams)])
            server.kill()
            folder = out / f"after-{how.name}"
            server = Server(model, arguments, folder, port=server.port)
            servers.append(server.start())
            report.outcomes[f"restart after {how.name}: ready"] += 1
            if answer(server) != said:
                report.wrong.append(f"restart {number + 1}: the fixed prompt's answer changed")
        code = server.stop()
        report.wrong += [f"exit code {code} at the end"] if code else []
    finally:
        for one in servers:
            one.kill()
    return report


def show(report: Report) -> str:
    lines = [f"{report.seconds:.0f} s, {report.streams} streams, {report.tokens} tokens"]
    lines += [f"  {count:6}  {name}" for name, count in sorted(report.outcomes.items())]
    lines += [
        "tokens a second:           {:.1f} before, {:.1f} after".format(*report.throughput),
        "tokens a second of CPU:    {:.1f} before, {:.1f} after".format(*report.cpu),
        "free slots:                {} before, {} after".format(*report.free),
        "memory (MB):               {} before, {} after".format(*(b >> 20 for b in report.rss)),
        f"watchdog alarms:           {report.alarms or 'none'}",
        f"wrong:                     {len(report.wrong) or 'nothing'}",
    ]
    return "\n".join([*lines, *(f"  {line}" for line in report.wrong[:20])])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="server.fault_run", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--model", type=Path, help="a checkpoint; a tiny one is made otherwise")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.model
    if model is None:
        from sglang_glm53.tiny import make_checkpoint

        model = args.out / "tiny"
        if not model.exists():
            make_checkpoint(model)
    report = whole(model, args.out, minutes=args.minutes, streams=args.streams)
    written: dict[str, Any] = dict(vars(report))
    (args.out / "faults.json").write_text(json.dumps(written, indent=2))
    print(show(report))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
