"""How SGLang lays out a GPU's memory, for several shapes of the rank slice, beside the estimate.

Each shape is an Engine of its own with random weights; its log says what is free before and after
loading, how many tokens the cache holds, and what each CUDA graph takes. Half a minute a shape.
Nothing is generated. The rows of docs/benchmarks/memory.json were written by `parse` from logs of
`glm53 bench slice`; a sweep writes the same rows.

usage: python -m gpu.memory OUT [--shapes NAME ...] [--sides stock ours]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_glm53.bench.rank_slice import slice_config, write_slice
from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger import hardware
from sglang_glm53.ledger.account import Account
from sglang_glm53.ledger.topology import Topology, Workload

from .children import Child, end_children_when_ended, run, side_environment

GIB = 2**30
SIDES = ("stock", "ours")
POOL_SLACK = 0.7  # GiB, within which the estimate must have the cache
WEIGHT_SLACK = 0.01


@dataclass(frozen=True)
class Shape:
    """A slice and the options that decide its memory.

    Attributes:
        kv: the ledger's name of the cache's form. drafts: MTP 5-1-6. arguments: more of SGLang's.
    """

    layers: int
    fraction: float
    experts: int = 32
    kv: str = "fp8"
    drafts: bool = False
    context: int = 8192
    arguments: tuple[str, ...] = ()


BF16 = ("--kv-cache-dtype", "bfloat16", "--dsa-decode-backend", "flashmla_sparse")
SHAPES: dict[str, Shape] = {
    "78-fp8": Shape(78, 0.82),
    "78-fp8-mtp": Shape(78, 0.83, drafts=True),
    "78-bf16": Shape(78, 0.85, kv="bf16", arguments=BF16),
    "40-fp8": Shape(40, 0.6),
    "40-fp8-mtp": Shape(40, 0.6, drafts=True),
    "40-bf16": Shape(40, 0.6, kv="bf16", arguments=BF16),
    "10-fp8": Shape(10, 0.3, context=131072),
    "20-64-experts": Shape(20, 0.6, experts=64),
    "10-prefill-graph": Shape(
        10,
        0.3,
        arguments=(
            "--cuda-graph-bs-prefill",
            "8192",
        ),
    ),
}


@dataclass
class Layout:
    """What a log says of one rank, GiB; None where it does not say it.

    Attributes:
        free: before loading. target, draft: loaded weights. tokens: of the cache.
        pool: the cache's size, target's and draft's. after_pool: free beside the pools.
        graphs: what capturing each kind took. end: free when the server is ready.
    """

    free: float | None = None
    target: float | None = None
    draft: float | None = None
    tokens: int | None = None
    pool: float | None = None
    after_pool: float | None = None
    graphs: dict[str, float] = field(default_factory=dict)
    end: float | None = None


NUMBER = r"([\d.]+) GB"
BEGIN = re.compile(rf"Load weight begin\. avail mem={NUMBER}")
END = re.compile(rf"Load weight end\..*mem usage={NUMBER}")
CACHE = re.compile(rf"KV Cache is allocated\..*#tokens: (\d+), KV size: {NUMBER}")
POOL_END = re.compile(rf"Memory pool end\. avail mem={NUMBER}")
GRAPH = re.compile(rf"Capture (.+?) CUDA graph end\..*mem usage={NUMBER}")
READY = re.compile(rf"max_total_num_tokens=\d+,.*available_gpu_mem={NUMBER}")


def parse(log: str) -> Layout:
    """The first rank's layout.

    Args:
        log: what SGLang 0.5.22 or 0.5.23 wrote. With more ranks: lines of the first one only.
    """
    found = Layout()
    for line in log.splitlines():
        if match := BEGIN.search(line):
            found.free = found.free or float(match[1])
        elif match := END.search(line):
            if found.target is None:
                found.target = float(match[1])
            else:
                found.draft = float(match[1])
        elif match := CACHE.search(line):
            found.tokens = int(match[1])
            found.pool = round((found.pool or 0) + float(match[2]), 2)
        elif match := POOL_END.search(line):
            found.after_pool = float(match[1])
        elif match := GRAPH.search(line):
            found.graphs[match[1]] = float(match[2])
        elif match := READY.search(line):
            found.end = float(match[1])
    return found


def arguments(shape: Shape, model: Path) -> list[str]:
    """SGLang's arguments for a shape."""
    graph = () if any("prefill" in word for word in shape.arguments) else ("disabled",)
    words = [
        *("--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--mem-fraction-static", str(shape.fraction), "--context-length", str(shape.context)),
        *("--max-running-requests", "8", "--cuda-graph-bs-decode", "1", "8"),
        *("--chunked-prefill-size", "8192", "--disable-radix-cache"),
        *shape.arguments,
    ]
    if "--kv-cache-dtype" not in words:
        words += ["--kv-cache-dtype", "fp8_e4m3"]
    if graph:
        words += ["--cuda-graph-backend-prefill", *graph]
    if shape.drafts:
        words += ["--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-steps", "5", "--speculative-num-draft-tokens", "6"]
    return words


def estimate(shape: Shape, free: float | None = None) -> dict[str, float]:
    """What the ledger says of a shape: GiB, and `tokens`.

    Args:
        free: GiB that were free before loading, where other processes had some; else the ledger's.
    """
    account = Account(
        Glm53Config.from_hf(slice_config(layers=shape.layers, experts=shape.experts)),
        Topology(kv=shape.kv),
        Workload(steps=5, tokens=6) if shape.drafts else Workload(),
        hardware.load("h200"),
        shape.fraction,
        dummy=True,
        free_bytes=None if free is None else free * GIB,
    )
    sheet = account.capacity
    return {
        "target": account.loaded.target / GIB,
        "draft": account.loaded.draft / GIB,
        "tokens": sheet["pool_tokens"],
        "pool": sheet["pool_tokens"] * account.kv["kv_bytes_per_token"] / GIB,
    }


def judged(shape: Shape, seen: Layout) -> list[str]:
    """Where the estimate misses by more than it may, one line each."""
    counted, lines = estimate(shape, seen.free), []
    for name in ("target", "draft"):
        value = getattr(seen, name)
        if value and abs(counted[name] / value - 1) > WEIGHT_SLACK:
            lines.append(f"{name}: {value} GiB loaded, {counted[name]:.2f} estimated")
    if seen.pool is not None and abs(counted["pool"] - seen.pool) > POOL_SLACK:
        lines.append(f"cache: {seen.pool} GiB, {counted['pool']:.2f} estimated")
    return lines


def row(name: str, shape: Shape, side: str, log: str) -> dict[str, Any]:
    """What a sweep writes for one shape and side."""
    seen = parse(log)
    return {
        "name": name,
        "side": side,
        "shape": asdict(shape),
        "seen": asdict(seen),
        "estimate": {key: round(value, 3) for key, value in estimate(shape, seen.free).items()},
        "misses": judged(shape, seen),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu.memory", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["ours"])
    options = parser.parse_args(argv)
    end_children_when_ended()
    out = options.out.resolve()  # children run in another folder
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    bad = False
    for name in options.shapes:
        shape = SHAPES[name]
        model = out / f"model-{shape.layers}-{shape.experts}"
        write_slice(model, layers=shape.layers, experts=shape.experts)
        for side in options.sides:
            log = out / f"{name}-{side}.log"
            child = Child(
                f"{name}-{side}",
                "gpu.memory_child",
                arguments(shape, model),
                log,
                side_environment(side),
            )
            ended = run(child)
            found = row(name, shape, side, log.read_text(errors="replace"))
            found["error"] = ended.reason or None
            rows.append(found)
            bad = bad or bool(found["error"] or found["misses"])
            (out / "memory.json").write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{name}, {side}: {found['seen']} | {found['misses'] or found['error'] or 'ok'}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
