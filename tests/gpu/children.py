"""Child processes of the GPU tests: started with a log, killed as a group, several at a time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Child:
    """One Python module to run, `python -m module arguments`, from the tests folder."""

    name: str
    module: str
    arguments: Sequence[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    timeout: float = 240


@dataclass(frozen=True)
class Ended:
    """How a child ended. code: its exit code, None if it was stopped after `timeout`."""

    child: Child
    code: int | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def reason(self) -> str:
        """The line of the log that says why it failed; empty if it did not."""
        if self.ok:
            return ""
        text = self.child.log.read_text(errors="replace") if self.child.log.exists() else ""
        return failure_line(text) or f"exit code {self.code}"


def side_environment(side: str) -> dict[str, str]:
    """What makes SGLang's own class serve, or ours."""
    return {"GLM53_SERVE": "stock"} if side == "stock" else {}


def failure_line(log: str) -> str:
    """The first error line of a log: a raised exception, or this package's one line."""
    pattern = re.compile(
        r"^\s*(?:\[[^\]]*\]\s*)?((?:[\w.]+(?:Error|Exception|Interrupt))(?::|$).*"
        r"|sglang-glm53: .*)$"
    )
    lines = [match.group(1).strip() for line in log.splitlines() if (match := pattern.match(line))]
    return lines[0][:300] if lines else ""


_running: set[int] = set()  # process groups


def end_children_when_ended() -> None:
    """On SIGTERM end all running children at once: each has a session of its own, and one that
    is left behind keeps its GPU memory."""

    def end(signum: int, frame: object) -> None:
        for group in list(_running):
            _kill(group)
        os._exit(128 + signum)

    signal.signal(signal.SIGTERM, end)


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run(child: Child) -> Ended:
    """Run one child to its end; its process group is killed when it ends or takes too long."""
    child.log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **child.environment}
    if "GLM53_SERVE" not in child.environment:
        environment.pop("GLM53_SERVE", None)
    if extra := child.environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join([extra, path])
    began = time.monotonic()
    with child.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", child.module, *child.arguments],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=TESTS,
            start_new_session=True,
        )
    _running.add(process.pid)
    try:
        code: int | None = process.wait(child.timeout)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _kill(process.pid)
        process.wait()
        _running.discard(process.pid)
    return Ended(child, code, round(time.monotonic() - began, 1))


def run_all(
    children: Sequence[Child], at_once: int, told: Callable[[Ended], None] | None = None
) -> list[Ended]:
    """Run the children, `at_once` at a time in their order; prints a line as each ends."""
    ended: dict[str, Ended] = {}
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        for future in as_completed([pool.submit(run, child) for child in children]):
            result = future.result()
            ended[result.child.name] = result
            how = "ok" if result.ok else f"FAILED: {result.reason}"
            print(f"{result.child.name}: {how} ({result.seconds} s)", flush=True)
            if told is not None:
                told(result)
    return [ended[child.name] for child in children]


def ensure_checkpoint(folder: Path, out: Path, **sizes: int) -> int:
    """Write a real-dimension checkpoint unless it is there, in a process of its own.

    Args:
        sizes: `layers`, `experts`, `vocab`, where they differ from real_dims' defaults.

    Returns:
        Rows of its vocabulary.

    Raises:
        RuntimeError: the process failed; the message says why.
    """
    if not (folder / "real_dims.json").exists():
        options = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
        log = out / "logs" / f"{folder.name}.log"
        ended = run(Child(folder.name, "gpu.real_dims", [str(folder), *options], log))
        if not ended.ok:
            raise RuntimeError(f"{folder} was not written: {ended.reason} (log {log})")
        print(log.read_text().strip(), flush=True)
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])
