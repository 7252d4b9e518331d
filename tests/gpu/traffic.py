"""Bytes that a decode step reads from GPU memory, by Nsight Compute's counter, beside the ledger's.

A rank slice of few layers (dense, full and shared ones) decodes one step in a CUDA graph; ncu
counts what each of its kernels reads from DRAM and how many there are. L2 keeps small tensors
between kernels and is emptied of nothing, as in a real step, but ncu runs one kernel at a time.

usage: python -m gpu.traffic OUT [--layers 11] [--experts 32] [--batch 1 8] [--sides stock ours]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .children import Child, end_children_when_ended, run, side_environment
from .compare import Check, as_json, report

WITHIN = 0.03  # of the ledger's bytes
SIDES = ("stock", "ours")
CONTEXT, WARM_STEPS, CHUNK = 2304, 4, 8192
READ = "dram__bytes_read.sum"
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


@dataclass(frozen=True)
class Kernels:
    """What one kernel name did in the step. read: bytes; calls: launches."""

    name: str
    calls: int
    read: float


def kernels(lines: Iterable[str]) -> list[Kernels]:
    """ncu's CSV, one line a kernel and metric, summed by name, the largest first.

    Raises:
        ValueError: a unit that is not known, or no kernel at all.
    """
    rows = list(csv.DictReader(line for line in lines if line.startswith('"')))
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for row in rows:
        if row["Metric Name"] != READ:
            continue
        unit = row["Metric Unit"]
        if unit not in UNITS:
            raise ValueError(f"ncu counts in {unit!r}")
        entry = sums[row["Kernel Name"]]
        entry[0] += 1
        entry[1] += float(row["Metric Value"].replace(",", "")) * UNITS[unit]
    if not sums:
        raise ValueError("ncu saw no kernel")
    found = [Kernels(name, int(calls), read) for name, (calls, read) in sums.items()]
    return sorted(found, key=lambda each: -each.read)


# --- under ncu -------------------------------------------------------------------------------


def run_step(job: dict[str, Any]) -> None:
    """Prefill, a few steps, and one step between the profiler's start and stop."""
    import torch

    from sglang_glm53.bench.runner import Bench

    class Nowhere:
        def save(self, **values: Any) -> None:
            """Bench tells what it loaded; here only the step counts."""

    bench = Bench(job, Nowhere())
    tokens, state = bench.prefill(job["batch"], CONTEXT, CHUNK)
    for _ in range(WARM_STEPS):
        tokens = bench.decode(tokens, state)
    bench.synchronize()
    torch.cuda.profiler.start()
    bench.decode(tokens, state)
    bench.synchronize()
    torch.cuda.profiler.stop()
    assert bench.graph, "no CUDA graph was replayed"
    print("the step is done", flush=True)
    os._exit(0)


# --- the parent ------------------------------------------------------------------------------


def counted(model: Path, batch: int) -> dict[str, float]:
    """The ledger's bytes of the step, by part."""
    from sglang_glm53.bench.step_bytes import decode_step, weight_format
    from sglang_glm53.config import Glm53Config

    raw = json.loads((model / "config.json").read_text())
    config = Glm53Config.from_hf(raw)
    return decode_step(config, batch=batch, context=CONTEXT + WARM_STEPS, width=weight_format(raw))


def measure(model: Path, side: str, batch: int, out: Path, vocab: int) -> dict[str, Any]:
    """One step under ncu; `error` where it did not end well."""
    name = f"traffic-{side}-{batch}"
    arguments = [
        *("--model-path", str(model), "--load-format", "dummy", "--kv-cache-dtype", "fp8_e4m3"),
        *("--mem-fraction-static", "0.3", "--chunked-prefill-size", str(CHUNK)),
        *("--context-length", "8192", "--cuda-graph-bs-decode", str(batch)),
        *("--cuda-graph-backend-prefill", "disabled"),
    ]
    job = out / f"{name}-job.json"
    told = {"side": side, "batch": batch, "vocab": vocab, "arguments": arguments, "spawned": 0.0}
    job.write_text(json.dumps(told))
    table, log = out / f"{name}.csv", out / "logs" / f"{name}.log"
    table.unlink(missing_ok=True)
    command = ["--profile-from-start", "off", "--target-processes", "all", "--csv"]
    command += ["--graph-profiling", "node", "--clock-control", "none", "--cache-control", "none"]
    command += ["--metrics", READ, "--log-file", str(table), sys.executable, "-m", "gpu.traffic"]
    environment = {
        **side_environment(side),
        "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": "1",
    }
    told_ncu = json.dumps([*command, "--step", str(job)])
    ended = run(Child(name, "gpu.traffic", ["--ncu", told_ncu], log, environment, timeout=300))
    row: dict[str, Any] = {"side": side, "batch": batch, "context": CONTEXT + WARM_STEPS}
    try:
        found = kernels(table.read_text(errors="replace").splitlines())
    except (OSError, ValueError, KeyError) as error:
        return {**row, "error": ended.reason or repr(error)}
    row["launches"] = sum(each.calls for each in found)
    row["read"] = sum(each.read for each in found)
    row["kernels"] = [[each.name[:160], each.calls, each.read] for each in found]
    return row


def judge(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """Each row's bytes beside the ledger's."""
    checks = []
    for row in rows:
        name = f"traffic: {row['side']}, batch {row['batch']}"
        if "error" in row:
            checks.append(Check(name, False, row["error"]))
            continue
        ratio = row["read"] / row["counted_total"]
        detail = (
            f"{row['read'] / 1e9:.3f} GB read in {row['launches']} launches, "
            f"{row['counted_total'] / 1e9:.3f} counted ({ratio:.3f})"
        )
        checks.append(Check(name, abs(ratio - 1) <= WITHIN, detail))
    return checks


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge; exit code 1 if a count is further off than `WITHIN`."""
    parser = argparse.ArgumentParser(description="bytes of a decode step, counted by the GPU")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--step", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ncu", help=argparse.SUPPRESS)  # its arguments, as JSON
    args = parser.parse_args(arguments)
    if args.step:
        run_step(json.loads(args.step.read_text()))
    if args.ncu:
        os.execvp("ncu", ["ncu", *json.loads(args.ncu)])
    if args.out is None:
        parser.error("OUT is missing")
    if shutil.which("ncu") is None:
        print("traffic: not run, Nsight Compute (ncu) is not on the PATH", flush=True)
        return 0
    from sglang_glm53.bench.rank_slice import write_slice

    end_children_when_ended()
    out = args.out.resolve()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    model = out / f"model-{args.layers}-{args.experts}"
    write_slice(model, layers=args.layers, experts=args.experts)
    vocab = int(json.loads((model / "config.json").read_text())["vocab_size"])
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    for batch in args.batch:
        for side in args.sides:
            row = measure(model, side, batch, out, vocab)
            parts = counted(model, batch)
            row.update(counted=parts, counted_total=sum(parts.values()))
            rows.append(row)
            checks = judge(rows)
            written = {"rows": rows, "checks": as_json(checks)}
            (out / "traffic.json").write_text(json.dumps(written, indent=1) + "\n")
            print(checks[-1].name, checks[-1].detail, flush=True)
    print(report("traffic", checks), flush=True)
    return int(not all(check.passed for check in checks))


if __name__ == "__main__":
    sys.exit(main())
