"""200,000 tokens of context: what the indexer selects there, and the peak of GPU memory.

Both sides prefill one long prompt in chunks of 8,192 over FP8 KV and decode a few tokens beside a
short request: two rows, while graphs are captured for one, so that the decode rows run eagerly and
`recorder.py` sees them. Held against a recomputation of the scores in FP32 from the cached keys:

* the needles, the 64 positions with the largest scores: all must be selected by ours;
* recall of the true 2,048: ours not below stock's by more than a thousandth;
* our logits against the recomputed scores.

usage: python -m gpu.long_context OUT [--tokens 200000] [--checkpoint FOLDER] [--at-once 2]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from .children import (
    Child,
    end_children_when_ended,
    ensure_checkpoint,
    run,
    side_environment,
)
from .compare import Check, as_json, greedy, report
from .prompts import Group, write_requests
from .real_dims import prompt
from .recorder import NEEDLES, put_on_path

SIDES = ("stock", "ours")
CHUNK = 8192
NEW_TOKENS = 8
RECALL_SLACK = 1e-3
LOGIT_ERROR = 1e-2  # of the scores' standard deviation: FP32 sums in another order
MEMORY_SLACK = 1.02


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The recorder's lines."""
    return [
        json.loads(line)
        for file in sorted(folder.glob("rows.*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def memory_of(folder: Path) -> dict[str, float]:
    """GiB: allocated at the first pass, the peak, the peak reserved by the allocator."""
    for file in folder.glob("memory.*.json"):
        return {k: round(v / 2**30, 3) for k, v in json.loads(file.read_text()).items()}
    return {}


def judge(
    rows: dict[str, list[dict[str, Any]]],
    memory: dict[str, dict[str, float]],
    full_layers: Sequence[int],
) -> list[Check]:
    """The rules over both sides' recordings: `rows` and `memory` by side."""
    checks = []
    for side in SIDES:
        errors = [row["error"] for row in rows[side] if "error" in row]
        if errors:
            return [Check(f"{side}: recording", False, errors[0])]
    for mode in ("EXTEND", "DECODE"):
        some = {side: [row for row in rows[side] if row["mode"] == mode] for side in SIDES}
        name = f"{mode.lower()} rows"
        layers = {side: sorted({row["layer"] for row in some[side]}) for side in SIDES}
        if layers["ours"] != list(full_layers) or layers["stock"] != list(full_layers):
            checks.append(Check(name, False, f"layers {layers}, expected {list(full_layers)}"))
            continue
        mine, theirs = some["ours"], some["stock"]
        found = min(row["needles"] for row in mine)
        least = min(row["needles"] for row in theirs)
        checks.append(
            Check(
                f"{name}: needles selected",
                found == NEEDLES,
                f"ours at least {found} of {NEEDLES}, stock {least} ({len(mine)} rows)",
            )
        )
        recall = {side: fmean(row["recall"] for row in some[side]) for side in SIDES}
        worst = {side: min(row["recall"] for row in some[side]) for side in SIDES}
        checks.append(
            Check(
                f"{name}: recall of the true top-k",
                recall["ours"] >= recall["stock"] - RECALL_SLACK,
                f"ours {recall['ours']:.5f} (worst {worst['ours']:.5f}), "
                f"stock {recall['stock']:.5f} (worst {worst['stock']:.5f})",
            )
        )
        off = {side: max(row["logit_error"] for row in some[side]) for side in SIDES}
        checks.append(
            Check(
                f"{name}: logits against FP32 scores",
                off["ours"] <= LOGIT_ERROR,
                f"largest error ours {off['ours']:.1e}, stock {off['stock']:.1e} deviations",
            )
        )
    if all(memory[side] for side in SIDES):
        peaks = {side: memory[side]["peak"] for side in SIDES}
        detail = ", ".join(f"{side} {memory[side]}" for side in SIDES)
        passed = peaks["ours"] <= MEMORY_SLACK * peaks["stock"]
        checks.append(Check("peak memory, GiB", passed, detail))
    else:
        checks.append(Check("peak memory, GiB", False, f"not recorded: {memory}"))
    return checks


class UsedMemory(threading.Thread):
    """The largest memory use that the driver reports while this runs, in MiB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest: int | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self.ended.wait(0.5):
            try:
                answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
                used = int(answer.stdout.split()[0])
            except (OSError, ValueError, IndexError, subprocess.SubprocessError):
                return
            self.largest = max(self.largest or 0, used)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both sides one after the other and judge them; exit code 1 if a rule fails."""
    parser = argparse.ArgumentParser(description="a long context, ours beside stock")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--checkpoint", type=Path, default=Path("/tmp/glm53-real-dims"))
    args = parser.parse_args(arguments)
    end_children_when_ended()
    args.out.mkdir(parents=True, exist_ok=True)
    vocab = ensure_checkpoint(args.checkpoint, args.out)
    config = json.loads((args.checkpoint / "config.json").read_text())
    full = [i for i, kind in enumerate(config["indexer_types"]) if kind == "full"]
    prompts = [prompt(vocab, args.tokens, 11), prompt(vocab, 100, 12)]
    # No prompt log-probabilities: stock's memory peak would be theirs, not the indexer's.
    group = Group("long", prompts, NEW_TOKENS)
    requests = write_requests([group], args.out / "logs" / "long-requests.json")
    rows, memory, answers = {}, {}, {}
    checks: list[Check] = []
    for side in SIDES:
        began = time.monotonic()
        folder = args.out / "logs" / f"long-{side}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (args.out / f"long-{side}.json").unlink(missing_ok=True)
        watch = UsedMemory()
        watch.start()
        result = run(_child(side, args, requests, folder))
        watch.ended.set()
        rows[side], memory[side] = rows_of(folder), memory_of(folder)
        if watch.largest is not None and memory[side]:
            memory[side]["driver"] = round(watch.largest / 1024, 3)
        took = time.monotonic() - began
        print(
            f"long-{side}: {'ok' if result.ok else 'FAILED: ' + result.reason}, {len(rows[side])} "
            f"rows, memory {memory[side]} ({took:.0f} s)",
            flush=True,
        )
        if not result.ok:
            checks.append(Check(f"long-{side} finishes", False, result.reason))
            continue
        record = json.loads((args.out / f"long-{side}.json").read_text())
        answers[side] = record["groups"]["long"]
    checks += judge(rows, memory, full)
    if len(answers) == len(SIDES):
        checks.append(greedy("greedy tokens: ours, stock", answers["ours"], answers["stock"]))
    print(report("long context", checks), flush=True)
    for side in SIDES:
        for row in rows[side]:
            row.pop("needle_positions", None)
    written = {"tokens": args.tokens, "checks": as_json(checks), "memory": memory, "rows": rows}
    (args.out / "long.json").write_text(json.dumps(written, indent=1) + "\n")
    return int(not all(check.passed for check in checks))


def _child(side: str, args: argparse.Namespace, requests: Path, folder: Path) -> Child:
    tokens = -(-(args.tokens + 16384) // 4096) * 4096
    options = {
        "kv_cache_dtype": "fp8_e4m3",
        "mem_fraction_static": 0.8,
        "max_total_tokens": tokens,
        "context_length": tokens,
        "max_running_requests": 2,
        "chunked_prefill_size": CHUNK,
        "cuda_graph_bs_decode": [1],
        "cuda_graph_backend_prefill": "disabled",
    }
    environment = {
        **side_environment(side),
        "GLM53_RECORD_DIR": str(folder),
        "GLM53_RECORD_FROM": str(args.tokens - 1),
        "PYTHONPATH": str(put_on_path(folder)),
    }
    out = args.out / f"long-{side}.json"
    return Child(
        f"long-{side}",
        "gpu.generate",
        [side, str(args.checkpoint), str(requests), str(out), json.dumps(options)],
        folder / "engine.log",
        environment,
        timeout=300,
    )


if __name__ == "__main__":
    sys.exit(main())
