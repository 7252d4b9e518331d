"""Steps with MTP, and start-up, of one side, through sglang.Engine: the real scheduler."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

from sglang_glm53.bench.child import progress
from sglang_glm53.bench.served import check_side
from sglang_glm53.errors import Glm53Error

PROFILED_STEPS = 8


def startup(job: dict[str, Any], result: Any) -> None:
    """Job `startup`: `arguments`, `side`: from this process's start to an Engine that is ready."""
    start(job, result).shutdown()


def mtp(job: dict[str, Any], result: Any) -> None:
    """Job `mtp`: `arguments`, `side`, `batches`, `context`, `new_tokens`, `repeats`, `vocab`,
    `traces`.

    A step is the time that generating `new_tokens` more takes over the verifications it takes.

    Raises:
        Glm53Error: the other side's class serves, or SGLang counts no verifications.
    """
    engine = start(job, result)
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for batch in job["batches"]:
        runs = []
        for repeat in range(job["repeats"] + 1):  # the first warms up
            prompts = [
                [rng.randrange(1, job["vocab"]) for _ in range(job["context"])]
                for _ in range(batch)
            ]
            short, _, before = generate(engine, prompts, 1)
            long, tokens, after = generate(engine, prompts, 1 + job["new_tokens"])
            steps, tokens = after - before, tokens - 1
            if steps <= 0:
                raise Glm53Error("SGLang counted no verifications (meta_info: spec_verify_ct)")
            if repeat:
                seconds = long - short
                runs.append((seconds * 1e3 / steps, seconds * 1e3 / tokens, tokens / steps))
        step_ms, tpot_ms, accept = (list(column) for column in zip(*runs, strict=True))
        row = {
            "batch": batch,
            "context": job["context"],
            "ms": statistics.median(step_ms),
            "raw_ms": step_ms,
            "tpot_ms": statistics.median(tpot_ms),
            "accept_length": statistics.fmean(accept),
        }
        rows.append(row)
        result.save(rows=rows)
        progress(f"MTP, batch {batch}: {row['ms']:.2f} ms a step, {row['tpot_ms']:.2f} a token")
        if job["device"] == "cuda":
            folder = Path(job["traces"]) / f"mtp-{batch}"
            row.update(profile(engine, prompts, folder, job["new_tokens"]))
            result.save(rows=rows)
    result.save(memory=memory(job["device"]))
    engine.shutdown()


def start(job: dict[str, Any], result: Any) -> Any:
    """A ready Engine of the job's side; saves what serves, the capacity and the start's seconds."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    engine = Engine(server_args=prepare_server_args(list(job["arguments"])))
    seconds = time.time() - job["spawned"]
    info = engine.get_server_info()
    state = info["internal_states"][0]
    served = state.get("glm53")
    if served is None:
        raise Glm53Error("the engine runs without sglang-glm53: is it installed for this Python?")
    check_side(job["side"], served["model"])
    if served.get("draft"):
        check_side(job["side"], served["draft"])
    result.save(
        served={name: served.get(name) for name in ("model", "draft", "pool", "backend")},
        kv_tokens=info.get("max_total_num_tokens"),
        startup_seconds=seconds,
    )
    progress(f"ready after {seconds:.1f} s, {served['model']} serves")
    return engine


def generate(engine: Any, prompts: list[list[int]], tokens: int) -> tuple[float, int, int]:
    """Generate; returns seconds, tokens a request and verifications a request."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    start = time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    seconds = time.perf_counter() - start
    answers = answers if isinstance(answers, list) else [answers]
    metas = [answer["meta_info"] for answer in answers]
    return (
        seconds,
        max(meta["completion_tokens"] for meta in metas),
        max(meta.get("spec_verify_ct") or 0 for meta in metas),
    )


def profile(engine: Any, prompts: list[list[int]], folder: Path, tokens: int) -> dict[str, Any]:
    """Launches of a step, and its kernels, from the scheduler's own profiler."""
    from sglang_glm53.bench.trace import as_rows, kernels, launches_a_step, read_events

    try:
        folder.mkdir(parents=True, exist_ok=True)
        engine.start_profile(
            output_dir=str(folder),
            num_steps=PROFILED_STEPS,
            activities=["CPU", "GPU"],
            with_stack=False,
            record_shapes=False,
            profile_by_stage=True,
        )
        generate(engine, prompts, tokens)
        (path,) = folder.glob("*DECODE*.json.gz")
        events = read_events(path)
        launches = launches_a_step(events, PROFILED_STEPS)
        table = kernels(events, max(1, round(len(events) / launches)))
    except Exception as error:  # a profiler that this machine does not allow costs no times
        return {"launches": None, "trace_error": " ".join(f"{error!r}".split())}
    return {
        "launches": launches,
        "kernels": as_rows(table),
    }


def memory(device: str) -> dict[str, float]:
    """GiB of the device in use, this process's own context included."""
    if device != "cuda":
        return {}
    import torch

    free, total = torch.cuda.mem_get_info()
    return {"used_gib": (total - free) / 2**30}
