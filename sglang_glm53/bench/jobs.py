"""Measurements in child processes, one after another: started, watched, their results read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_glm53.bench.served import OURS, STOCK
from sglang_glm53.ending import end_with_parent
from sglang_glm53.errors import PREFIX, Glm53Error

CHILD = (sys.executable, "-m", "sglang_glm53.bench.child")
REPORT_EVERY = 10.0  # seconds between two lines of progress
SHOWN = "bench: "  # what a child's line to be shown begins with


@dataclass(frozen=True)
class Job:
    """One child process: its name (of the files too), what it measures, what its side is."""

    name: str
    side: str | None
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.spec["kind"]


@dataclass
class Outcome:
    """What a job left: its result so far, and one line if it failed."""

    job: Job
    result: dict[str, Any]
    error: str | None = None


def environment(side: str | None, base: Mapping[str, str], accept_length: float) -> dict[str, str]:
    """Variables of a child: the same on both sides but for the one that says which serves."""
    changed = dict(base)
    for name in ("SGLANG_SIMULATE_UNIFORM_EXPERTS", "GLM53_ON_ERROR"):
        changed.pop(name, None)
    if changed.get("GLM53_SERVE") == "stock":  # "ours", for untested options, stays
        del changed["GLM53_SERVE"]
    changed["SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS"] = "1"
    changed["SGLANG_SIMULATE_ACC_LEN"] = f"{accept_length:g}"
    changed["PYTHONUNBUFFERED"] = "1"
    if side == STOCK:
        changed["GLM53_SERVE"] = "stock"
        changed.pop("GLM53_STRICT", None)
    elif side == OURS:
        changed["GLM53_STRICT"] = "1"  # where ours would stand down, nothing is measured
    return changed


def run_job(
    job: Job,
    folder: Path,
    env: Mapping[str, str],
    *,
    timeout: float,
    say: Callable[[str], None],
    command: Sequence[str] = CHILD,
    resume: bool = False,
) -> Outcome:
    """Run one job; its files are NAME.job.json, NAME.json and NAME.log in `folder`.

    Nothing that a child does raises here: its failure is in the outcome.

    Args:
        timeout: seconds after which the child is ended.
        say: takes lines of progress.
        resume: take a whole result of the same job that is there already.
    """
    result_file, log = folder / f"{job.name}.json", folder / f"{job.name}.log"
    if resume:
        before = _read(result_file)
        if before.get("complete") and _asked(before.get("job")) == _asked(job.spec):
            say(f"{job.name}: taken from {result_file}")
            return Outcome(job, before)
    result_file.unlink(missing_ok=True)
    job_file = folder / f"{job.name}.job.json"
    job_file.write_text(json.dumps({**job.spec, "spawned": time.time()}, indent=1))
    say(f"{job.name}: started")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(job_file), str(result_file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
            env=dict(env),
        )
    try:
        error = _watch(process, log, timeout, lambda line: say(f"{job.name}: {line}"))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever the child left running
        process.wait()
    result = _read(result_file)
    if error is None and not result.get("complete"):
        error = "the measurement wrote no whole result"
    if error is not None:
        error = f"{job.name}: {error}; its log: {log}"
    return Outcome(job, result, error)


def _watch(
    process: subprocess.Popen[bytes], log: Path, timeout: float, say: Callable[[str], None]
) -> str | None:
    """Wait for a child; returns why it failed, or None."""
    began = told = time.monotonic()
    shown = 0
    while True:
        try:
            code: int | None = process.wait(0.2)
        except subprocess.TimeoutExpired:
            code = None
        lines = [line[len(SHOWN) :] for line in _lines(log) if line.startswith(SHOWN)]
        for line in lines[shown:]:
            say(line)
            told = time.monotonic()
        shown = len(lines)
        if code == 0:
            return None
        if code is not None:
            return f"{_ended(code)}: {last_words(_lines(log))}"
        now = time.monotonic()
        if now - began > timeout:
            return f"not done after {timeout:.0f} s (--timeout)"
        if now - told > REPORT_EVERY:
            told = now
            say(f"{now - began:.0f} s")


def last_words(lines: Sequence[str]) -> str:
    """The line of a log that says best why its process ended."""
    ours = [line for line in lines if line.startswith(PREFIX)]
    errors = [line for line in lines if re.match(r"\s*(\[.*\] )?[\w.]*(Error|Exception)\b", line)]
    why = (ours or errors or list(lines) or ["it wrote nothing"])[-1].strip()
    why = why.removeprefix(PREFIX)
    return why if len(why) <= 300 else why[:297] + "..."


def _lines(log: Path) -> list[str]:
    text = log.read_bytes().decode(errors="replace")
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _asked(spec: Any) -> dict[str, Any]:
    """What was asked for, without when."""
    spec = spec if isinstance(spec, dict) else {}
    return {name: value for name, value in spec.items() if name != "spawned"}


def _ended(code: int) -> str:
    if code < 0:
        return f"ended by signal {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def make_folder(folder: Path) -> Path:
    """`folder`, made and proven to be writable.

    Raises:
        Glm53Error: it is not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise Glm53Error(
            f"cannot write to {folder}: {error.strerror or error}; name another folder with --out"
        ) from error
    return folder


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, replacing an earlier one in one step."""
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(scratch, path)
