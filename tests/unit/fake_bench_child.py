"""Stands in for `python -m sglang_glm53.bench.child`: results without SGLang or a GPU.

    python fake_bench_child.py BEHAVIOUR JOB RESULT

BEHAVIOUR: comma-separated. `fails:NAME` (a line of ours, exit code 1), `dies:NAME` (killed),
`hangs:NAME`, `partial:NAME` (exit code 0, but its result is not whole), where NAME is the start of
a job's name; `experts` (ours reads other experts than stock); `small` (a GPU of 40 GiB), `busy`
(a GPU in use), `no-gpu`. A job that starts adds its name to `started` beside its result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

MS = {"stock": 20.0, "ours": 19.0}


def main() -> int:
    behaviour, job_file, result_file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    job = json.loads(job_file.read_text())
    name = job_file.name.removesuffix(".job.json")
    with (result_file.parent / "started").open("a") as started:
        started.write(f"{name} {os.environ.get('GLM53_SERVE', '-')}\n")
    with (result_file.parent / "pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    print("some noise\nbench: half way", flush=True)
    result: dict[str, Any] = {"job": job, "complete": True, **values(job, behaviour)}
    for each in behaviour.split(","):
        what, _, whose = each.partition(":")
        if not whose or not name.startswith(whose):
            continue
        if what == "fails":
            print("sglang-glm53: the answer is wrong; ask another", file=sys.stderr)
            print("noise after it", file=sys.stderr)
            return 1
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hangs":
            time.sleep(600)
        if what == "partial":
            result["complete"] = False
    if job["kind"] == "machine" and "no-gpu" in behaviour:
        print("sglang-glm53: torch finds no GPU", file=sys.stderr)
        return 1
    result_file.write_text(json.dumps(result))
    return 0


def values(job: dict[str, Any], behaviour: str) -> dict[str, Any]:
    if job["kind"] == "machine":
        total = 40.0 if "small" in behaviour else 139.8
        return {
            "machine": {
                "gpu": "NVIDIA Fake",
                "gpu_memory_gib": total,
                "gpu_memory_free_gib": 10.0 if "busy" in behaviour else total,
                "driver": "1.2",
                "host_cpus": 4,
            },
            "versions": {"sglang_glm53": "0.1.0", "sglang": "0.5.23"},
            "bandwidth": {"bytes_per_second": 4.3e12, "raw_seconds": [0.002]},
        }
    side = job["side"]
    common = {
        "served": {"model": "sglang_glm53.models.A" if side == "ours" else "sglang.srt.A"},
        "kv_tokens": 150000,
        "memory": {"used_gib": 120.0},
    }
    if job["kind"] in ("mtp", "startup"):
        common["startup_seconds"] = 50.0 if side == "stock" else 51.0
    if job["kind"] == "startup":
        return common
    rows = []
    for batch in job.get("batches", [1]):
        ms = MS[side] + batch
        experts = min(32, 8 * batch) - (side == "ours" and "experts" in behaviour)
        row = {"batch": batch, "ms": ms, "raw_ms": [ms - 1, ms, ms + 1], "launches": 2813.0}
        row["context"] = job.get("context", job.get("tokens"))
        if job["kind"] == "decode":
            row["distinct_experts"] = [experts] * 75
            row["pipelined_ms"] = ms - 0.5
            row["kernels"] = [
                ["gemm<fp8>", 150.0, 45.5, 40.0],
                [f"{side}_only", 78.0, 2.0, 1.5],
                ["(idle)", 10.0, 2.0, 2.0],
            ]
        if job["kind"] == "mtp":
            row.update(tpot_ms=ms / 3.5, accept_length=3.5)
        rows.append(row)
    return {**common, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
