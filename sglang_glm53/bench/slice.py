"""`glm53 bench slice`: checks, runs the jobs, keeps what was measured, prints the table."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_glm53.bench import jobs as running
from sglang_glm53.bench import plan, report
from sglang_glm53.bench.jobs import Job, Outcome
from sglang_glm53.bench.plan import Options
from sglang_glm53.bench.rank_slice import slice_config, write_slice
from sglang_glm53.bench.served import SIDES
from sglang_glm53.bench.step_bytes import weight_format
from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error

Models = dict[str, tuple[Path, Glm53Config, float]]


def run(
    options: Options,
    *,
    out: Path,
    json_file: Path | None,
    profile: bool,
    resume: bool,
    timeout: float,
    command_line: str,
    say: Callable[[str], None],
    model: Path | None = None,
    command: Sequence[str] = running.CHILD,
) -> int:
    """Measure; returns the exit code, 1 if anything failed.

    Raises:
        Glm53Error: something that shows before a measurement starts.
    """
    options.check()
    if command is running.CHILD and importlib.util.find_spec("sglang") is None:
        raise Glm53Error("SGLang is not installed for this Python; nothing can be measured")
    if json_file is not None:
        check_writable(json_file)
    out = running.make_folder(out)
    models = make_models(options, out, model)
    env = {
        side: running.environment(side, os.environ, options.accept_length)
        for side in (None, *SIDES)
    }
    if options.device == "cpu":
        for each in env.values():  # the simulated routing is a GPU kernel
            each["SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS"] = "0"
            each["SGLANG_USE_CPU_ENGINE"] = "1"

    def run_job(job: Job) -> Outcome:
        return running.run_job(
            job, out, env[job.side], timeout=timeout, say=say, command=command, resume=resume
        )

    say(f"results and logs: {out}")
    probe = run_job(Job("machine", None, {"kind": "machine", "device": options.device}))
    if probe.error:
        raise Glm53Error(probe.error)
    machine = probe.result["machine"]
    if options.device == "cuda":
        check_fits(options, models, machine)
    todo = plan.jobs(
        options,
        models=models,
        gpu_bytes=machine["gpu_memory_gib"] * plan.GIB,
        folder=out,
        load_format="dummy" if model is None else "auto",
    )
    done: list[Outcome] = []
    found: dict[str, Any] = {}
    for number, job in enumerate(todo, 1):
        outcome = run_job(job)
        done.append(outcome)
        if outcome.error:
            say(f"failed: {outcome.error}")
        say(f"{number} of {len(todo)} measurements done")
        found = make_report(options, models, probe.result, done, command_line)
        running.write_json(out / "slice.json", found)
        if json_file is not None:
            running.write_json(json_file, found)
    say("")
    say(report.render(found))
    if profile:
        say(report.render_kernels(found))
    return 1 if found["errors"] else 0


def make_models(options: Options, out: Path, model: Path | None) -> Models:
    """The model folders that the works need: written slices, or the one that was given."""
    models: Models = {}
    layers = {"slice": options.layers, "prefill": options.prefill_layers}
    if set(options.work) <= {"prefill"}:
        del layers["slice"]
    if "prefill" not in options.work:
        del layers["prefill"]
    for name, count in layers.items():
        if model is None:
            content = slice_config(layers=count, experts=options.experts)
            folder = write_slice(
                out / f"model-{count}-{options.experts}", layers=count, experts=options.experts
            )
        else:
            folder = model
            try:
                content = json.loads((model / "config.json").read_text())
            except (OSError, ValueError) as error:
                raise Glm53Error(f"{model} holds no config.json that can be read") from error
        models[name] = (folder, Glm53Config.from_hf(content), weight_format(content))
    return models


def check_fits(options: Options, models: Models, machine: dict[str, Any]) -> None:
    """Raise Glm53Error if a work cannot fit into the GPU, or the GPU is in use."""
    total, free = machine["gpu_memory_gib"], machine["gpu_memory_free_gib"]
    if free < 0.9 * total:
        raise Glm53Error(
            f"only {free:.1f} of the GPU's {total:.1f} GiB are free: another process uses it, so "
            "times would mean nothing; end it, or choose a free GPU with CUDA_VISIBLE_DEVICES"
        )
    for work in (*options.work, *(["startup"] if options.starts else [])):
        _, config, width = models["prefill" if work == "prefill" else "slice"]
        plan.check_memory(options, work, config, width, total)


def make_report(
    options: Options,
    models: Models,
    probe: dict[str, Any],
    outcomes: Sequence[Outcome],
    command_line: str,
) -> dict[str, Any]:
    """What --json writes; see docs/benchmarks.md."""
    speed = probe["bandwidth"]["bytes_per_second"]
    _, config, width = models.get("slice") or models["prefill"]
    rows, errors = report.build_rows(outcomes, options, config, width, speed)
    starts = report.startup_seconds(outcomes)
    startup: dict[str, Any] = {"method": "process start to an Engine that is ready, median"}
    for side in SIDES:
        startup[f"{side}_raw_s"] = starts[side]
        startup[f"{side}_s"] = statistics.median(starts[side]) if starts[side] else None
    return {
        "machine": probe["machine"],
        "versions": probe["versions"],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command_line,
        "options": dataclasses.asdict(options),
        "bandwidth": probe["bandwidth"],
        "startup": startup,
        "rows": rows,
        "errors": [outcome.error for outcome in outcomes if outcome.error] + errors,
    }


def check_writable(path: Path) -> None:
    """Raise Glm53Error unless a file can be written at `path`, which stays as it is."""
    there = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise Glm53Error(
            f"cannot write {path}: {error.strerror or error}; name another file with --json"
        ) from error
    if not there:
        with contextlib.suppress(OSError):
            path.unlink()


def load_report(path: Path) -> dict[str, Any]:
    """A report that `glm53 bench slice --json` wrote.

    Raises:
        Glm53Error: the file cannot be read, or is none.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise Glm53Error(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise Glm53Error(f"{path} is no JSON: {error}") from error
    rows = found.get("rows") if isinstance(found, dict) else None
    needed = {"work", "batch", "context", "stock_ms", "ours_ms"}
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and needed <= set(row) for row in rows
    ):
        raise Glm53Error(f"{path} is no report of `glm53 bench slice --json`")
    return found
