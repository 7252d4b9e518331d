"""Page-major pages on a GPU: kernels and host copies, the decode step of a rank slice, and the
hierarchical cache with MTP, each beside layer-major pages and SGLang's own class.

usage: python -m gpu.pool OUT [--only kernels slice hicache] [--checkpoint DIR] [--judge]

Parts, in this order; each leaves OUT/pool-<part>*.json and is judged by itself (OUT/pool.json):

  kernels   what FlashMLA, DeepGEMM and the writers make of both; 1,000 random pages to pinned host
            memory and back, ours and SGLang's host pools (see pool_kernels.py)
  slice     `glm53 bench slice --work decode` with GLM53_POOL=page and =layer, ours alone
  hicache   real dimensions, few layers, FP8 cache, MTP 5-1-6: a prompt answered from the device's
            cache, evicted, and answered again from the host's
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .children import Child, end_children_when_ended, ensure_checkpoint, run_all
from .compare import TIE, Check, as_json, first_divergence, report
from .real_dims import prompt

PARTS = ("kernels", "slice", "hicache")

# The limits of issue "the interleaved pool".
STEP_AT_MOST = 1.02  # page-major decode step over layer-major's
OF_PINNED = 0.85  # of the machine's pinned bandwidth, each way
CPU_AT_MOST = 0.1  # CPU time a page over SGLang's where it issues one copy a piece
LOGPROB = 1e-3  # nats, beside what two runs from the device's cache differ by
ACCEPT = 0.02  # relative difference of the accept length

ENGINE: dict[str, Any] = {
    "kv_cache_dtype": "fp8_e4m3",
    "mem_fraction_static": 0.7,
    "max_total_tokens": 16384,
    "context_length": 8192,
    "max_running_requests": 4,
    "chunked_prefill_size": 4096,
    "cuda_graph_bs_decode": [1, 2, 4],
    "cuda_graph_backend_prefill": "disabled",
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 6,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4.0,
    "hicache_write_policy": "write_through",
}
LENGTH, NEW, OTHERS, REPEATS = 6000, 96, 4, 3
IDLE_S = 2.0  # without a request, before pages are counted
# Milliseconds after which a client leaves: before, during and after its pages come back.
LEAVES_AFTER = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 40.0)


@dataclass(frozen=True)
class Run:
    """One engine with a hierarchical cache."""

    name: str
    environment: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)


OURS = {"GLM53_SERVE": "ours"}
RUNS = (
    Run("page-kernel", {**OURS, "GLM53_POOL": "page"}, {"hicache_io_backend": "kernel"}),
    Run("page-direct", {**OURS, "GLM53_POOL": "page"}, {"hicache_io_backend": "direct"}),
    Run(
        "page-one-copy",
        {**OURS, "GLM53_POOL": "page", "GLM53_LOAD_GROUPS": "1"},
        {"hicache_io_backend": "direct"},
    ),
    Run("layer", {**OURS, "GLM53_POOL": "layer"}, {"hicache_io_backend": "kernel"}),
    Run("stock", {"GLM53_SERVE": "stock"}, {"hicache_io_backend": "kernel"}),
)


# --- in the engine's process -----------------------------------------------------------------


def ask(engine: Any, tokens: Sequence[int], new: int) -> dict[str, Any]:
    """One greedy answer: tokens, logprobs, top, cached, host, verifies, seconds."""
    began = time.perf_counter()
    reply = engine.generate(
        input_ids=list(tokens),
        sampling_params={"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=-1,
        top_logprobs_num=2,
    )
    seconds, meta = time.perf_counter() - began, reply["meta_info"]
    return {
        "tokens": list(reply["output_ids"]),
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
        "top": [[[v, t] for v, t, *_ in best] for best in meta["output_top_logprobs"]],
        "cached": meta.get("cached_tokens", 0),
        "host": (meta.get("cached_tokens_details") or {}).get("host", 0),
        "verifies": meta.get("spec_verify_ct") or 0,
        "seconds": seconds,
    }


def fill_and_come_back(engine: Any, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The first prompt cold, twice from the device, and after the others had the cache; then the
    time to the first token of each, several times."""
    first, others = prompts[0], prompts[1:]
    record: dict[str, Any] = {"cold": ask(engine, first, NEW)}
    record["resident"], record["again"] = (ask(engine, first, NEW) for _ in range(2))
    for other in others:
        ask(engine, other, 4)
    record["loaded"] = ask(engine, first, NEW)
    times: dict[str, list[float]] = {"resident": [], "loaded": []}
    for _ in range(REPEATS):
        times["resident"].append(ask(engine, first, 1)["seconds"])
        for other in others:
            ask(engine, other, 4)
        last = ask(engine, first, 1)
        times["loaded"].append(last["seconds"])
        record.setdefault("hosts", []).append(last["host"])
    record["left"] = []
    for delay in LEAVES_AFTER:
        for other in others:
            ask(engine, other, 4)
        record["left"].append(engine.loop.run_until_complete(leave(engine, first, delay)))
    record["afterwards"] = ask(engine, first, NEW)
    # SGLang's idle check ends the engine at a leaked page, before it can be emptied.
    time.sleep(IDLE_S)
    record["emptied"] = bool(engine.flush_cache().success)
    record["anew"] = ask(engine, first, NEW)
    record["first_token_s"] = {name: sorted(values) for name, values in times.items()}
    return record


async def leave(engine: Any, tokens: Sequence[int], delay: float) -> dict[str, Any]:
    """A request that is aborted `delay` ms after it was sent: tokens it still gave, host hits."""
    rid = f"leaves-{delay}"
    sampling = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
    answer = asyncio.ensure_future(
        engine.async_generate(input_ids=list(tokens), sampling_params=sampling, rid=rid)
    )
    await asyncio.sleep(delay / 1e3)
    engine.tokenizer_manager.abort_request(rid=rid)
    try:
        reply = await asyncio.wait_for(answer, 60)
    except ValueError:  # aborted before it was scheduled
        return {"ms": delay, "tokens": 0, "host": 0}
    host = (reply["meta_info"].get("cached_tokens_details") or {}).get("host", 0)
    return {"ms": delay, "tokens": len(reply["output_ids"]), "host": host}


def run_one(run: Run, out: Path, args: Mapping[str, Any]) -> None:
    """Start the engine of a run, ask, write."""
    import sglang

    options = {**ENGINE, **run.options, **args["engine"]}
    engine = sglang.Engine(
        model_path=args["checkpoint"], skip_tokenizer_init=True, log_level="info", **options
    )
    try:
        status = engine.get_server_info()["internal_states"][0]["glm53"]
        print(f"{run.name}: {status['model']}, {status['pages']}", flush=True)
        record = fill_and_come_back(engine, args["prompts"])
        (out / f"pool-hicache-{run.name}.json").write_text(json.dumps({"status": status, **record}))
    finally:
        engine.shutdown()


# --- judging ---------------------------------------------------------------------------------


def judge_kernels(record: Mapping[str, Any]) -> list[Check]:
    """The same bytes and results, and what copies reach."""
    checks = []
    different = [name for name, same in record["same"].items() if not same]
    detail = f"{len(record['same'])} compared" + (f"; differ: {different}" if different else "")
    checks.append(Check("kernels: the same from both", not different, detail))
    for name, times in record["microseconds"].items():
        detail = f"{times['layer']:.1f} us layer-major, {times['page']:.1f} us page-major"
        checks.append(Check(f"kernels: {name}", True, detail))
    copies = [row for row in record["copies"] if "failed" not in row]
    for row in record["copies"]:
        if "failed" in row:
            told = f"{row['layout']}, {row['backend']}: {row['failed']}"
            checks.append(Check("copies: does not run", "pages" not in row, told))
    pinned = record["pinned_gb_s"]
    for way in ("to the host", "to the device"):
        rows = [row for row in copies if row["way"] == way]
        mine = [row for row in rows if row["pages"] == "page-major"]
        theirs = [row for row in rows if row["pages"] == "layer-major"]
        for row in rows:
            name = f"copies {way}: {row['pages']}, {row['layout']}, {row['backend']}"
            detail = (
                f"{row['gb_s']:.1f} GB/s, {row['cpu_us_a_page']:.1f} us of CPU and "
                f"{row['copies_a_page']} copies a page"
            )
            checks.append(Check(name, row["same"], detail))
        if not mine or not theirs:
            checks.append(Check(f"copies {way}: both measured", False, f"{len(rows)} rows"))
            continue
        best = max(mine, key=lambda row: row["gb_s"])
        stock = max(theirs, key=lambda row: row["gb_s"])
        slowest = max(theirs, key=lambda row: row["cpu_us_a_page"])
        detail = f"{best['gb_s']:.1f} of {pinned:.1f} GB/s pinned ({best['backend']})"
        checks.append(
            Check(f"copies {way}: near pinned", best["gb_s"] >= OF_PINNED * pinned, detail)
        )
        detail = f"{best['gb_s']:.1f} GB/s, SGLang's best {stock['gb_s']:.1f}"
        faster = best["gb_s"] >= stock["gb_s"]
        checks.append(Check(f"copies {way}: no slower than SGLang's", faster, detail))
        share = best["cpu_us_a_page"] / slowest["cpu_us_a_page"]
        detail = f"{share:.3f} of {slowest['cpu_us_a_page']:.0f} us ({slowest['backend']})"
        checks.append(Check(f"copies {way}: CPU time", share <= CPU_AT_MOST, detail))
    return checks


def judge_slice(steps: Mapping[str, Mapping[str, float]]) -> list[Check]:
    """Decode steps in ms: {"page" or "layer": {batch: ms}}."""
    checks = []
    for batch in sorted(steps.get("layer", {}), key=int):
        layer, page = steps["layer"][batch], steps.get("page", {}).get(batch, float("inf"))
        ratio = page / layer
        detail = f"{page:.2f} ms page-major, {layer:.2f} layer-major ({ratio:.3f})"
        checks.append(Check(f"slice: decode, batch {batch}", ratio <= STEP_AT_MOST, detail))
    return checks or [Check("slice: measured", False, "no decode step")]


def accept(answer: Mapping[str, Any]) -> float:
    """Tokens a verification gave."""
    return len(answer["tokens"]) / max(1, answer["verifies"])


def apart(left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """Largest difference of log-probabilities, up to the first other token."""
    worst = 0.0
    pairs = zip(left["tokens"], right["tokens"], left["logprobs"], right["logprobs"], strict=True)
    for a, b, x, y in pairs:
        if a != b:
            break
        worst = max(worst, abs(x - y))
    return worst


def judge_leaving(name: str, record: Mapping[str, Any], promised: bool) -> Check:
    """Requests that were aborted around their load-back: no page lost, answers as before."""
    left, noise = record["left"], apart(record["resident"], record["again"])
    early = [row for row in left if row["tokens"] < NEW]
    worst = max(apart(record["cold"], record[when]) for when in ("afterwards", "anew"))
    good = record["emptied"] and early and worst <= max(LOGPROB, noise)
    detail = (
        f"{len(early)} of {len(left)} ended early, {sum(row['host'] > 0 for row in left)} with "
        f"pages from the host; cache emptied: {record['emptied']}; afterwards {worst:.1e}"
    )
    return Check(f"hicache {name}: clients that leave", bool(good) or not promised, detail)


def judge_hicache(records: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Each run by itself, and the time to the first token beside stock's."""
    checks = []
    for run in RUNS:
        record = records.get(run.name)
        if record is None:
            checks.append(Check(f"hicache {run.name}: finishes", False, "no result"))
            continue
        resident, again, loaded = (record[k] for k in ("resident", "again", "loaded"))
        promised = run.name != "stock"  # stock's are told, and judge nothing
        came = loaded["cached"] >= LENGTH - 64 and loaded["host"] > 0
        detail = f"{loaded['cached']} cached, {loaded['host']} from the host"
        checks.append(
            Check(f"hicache {run.name}: comes from the host", came or not promised, detail)
        )
        parted = first_divergence(resident, loaded)
        noise, worst = apart(resident, again), apart(resident, loaded)
        good = worst <= max(LOGPROB, noise) and (parted is None or parted.gap <= TIE)
        detail = f"{worst:.1e} (two from the device: {noise:.1e})"
        detail += "" if parted is None else f"; parted @{parted.position}, gap {parted.gap:.1e}"
        checks.append(Check(f"hicache {run.name}: log-probabilities", good or not promised, detail))
        lengths = accept(resident), accept(loaded)
        # One verification more or less is what the last, cut-off step may cost.
        near = abs(lengths[1] / lengths[0] - 1) <= ACCEPT
        near = near or abs(resident["verifies"] - loaded["verifies"]) <= 1
        detail = f"{lengths[0]:.2f} from the device, {lengths[1]:.2f} from the host"
        checks.append(Check(f"hicache {run.name}: accept length", near or not promised, detail))
        checks.append(judge_leaving(run.name, record, promised))
    middle = {
        name: record["first_token_s"]["loaded"][REPEATS // 2]
        for name, record in records.items()
        if "first_token_s" in record
    }
    mine = {name: value for name, value in middle.items() if name.startswith("page")}
    if mine and "stock" in middle:
        best = min(mine, key=mine.__getitem__)
        told = ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in middle.items())
        checks.append(
            Check("hicache: time to the first token", mine[best] <= middle["stock"], told)
        )
    return checks


# --- the parent ------------------------------------------------------------------------------


def measure_kernels(out: Path) -> None:
    """In a process of its own."""
    child = Child("pool-kernels", "gpu.pool_kernels", [str(out)], out / "logs" / "pool-kernels.log")
    run_all([child], 1)


def measure_slice(out: Path, arguments: Sequence[str]) -> None:
    """`glm53 bench slice`, ours alone, once for each way that pages lie."""
    for pages in ("page", "layer"):
        file = out / f"pool-slice-{pages}.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "sglang_glm53.cli", "bench", "slice", "--only", "ours"]
        command += ["--work", "decode", "--startup", "0", "--rounds", "1", "--json", str(file)]
        environment = {**os.environ, "GLM53_POOL": pages}
        subprocess.run([*command, *arguments], env=environment, check=False)


def steps_of(report_file: Path) -> dict[str, float]:
    """Decode steps of a bench report, ms a batch."""
    if not report_file.exists():
        return {}
    rows = json.loads(report_file.read_text())["rows"]
    return {str(row["batch"]): row["ours_ms"] for row in rows if row.get("work") == "decode"}


def measure_hicache(out: Path, args: argparse.Namespace) -> None:
    """All engines, one after the other: they time."""
    vocab = ensure_checkpoint(args.checkpoint, out, layers=6, experts=8)
    file = out / "logs" / "pool-arguments.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    prompts = [prompt(vocab, LENGTH, seed=seed) for seed in range(1 + OTHERS)]
    told = {"checkpoint": str(args.checkpoint), "engine": args.engine, "prompts": prompts}
    file.write_text(json.dumps(told))
    children = [
        Child(
            run.name,
            "gpu.pool",
            [str(out), "--child", run.name, "--arguments", str(file)],
            out / "logs" / f"pool-hicache-{run.name}.log",
            run.environment,
            timeout=300,
        )
        for run in RUNS
    ]
    for run in RUNS:
        (out / f"pool-hicache-{run.name}.json").unlink(missing_ok=True)
    run_all(children, 1)


def judge(out: Path, parts: Sequence[str]) -> list[Check]:
    """Checks over what OUT holds."""
    checks: list[Check] = []
    if "kernels" in parts:
        file = out / "pool-kernels.json"
        record = json.loads(file.read_text()) if file.exists() else {}
        whole = "pinned_gb_s" in record
        checks += judge_kernels(record) if whole else [Check("kernels: finish", False, "no result")]
    if "slice" in parts:
        checks += judge_slice(
            {p: steps_of(out / f"pool-slice-{p}.json") for p in ("page", "layer")}
        )
    if "hicache" in parts:
        files = {run.name: out / f"pool-hicache-{run.name}.json" for run in RUNS}
        checks += judge_hicache(
            {name: json.loads(f.read_text()) for name, f in files.items() if f.exists()}
        )
    return checks


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge; the exit code is 1 if anything fails."""
    parser = argparse.ArgumentParser(description="page-major pages on a GPU")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--checkpoint", type=Path, default=Path("/tmp/glm53-pool"))
    parser.add_argument("--engine", type=json.loads, default={}, help="engine options, as JSON")
    parser.add_argument("--slice", nargs="+", default=[], help="further options of the bench")
    parser.add_argument("--judge", action="store_true", help="only judge what OUT holds")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        (run,) = [run for run in RUNS if run.name == args.child]
        run_one(run, args.out, json.loads(args.arguments.read_text()))
        return 0
    end_children_when_ended()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.judge:
        for part in args.only:
            began = time.monotonic()
            if part == "kernels":
                measure_kernels(args.out)
            elif part == "slice":
                measure_slice(args.out, args.slice)
            else:
                measure_hicache(args.out, args)
            print(f"pool: {part} measured in {time.monotonic() - began:.0f} s", flush=True)
    checks = judge(args.out, args.only)
    print(report("pool", checks), flush=True)
    (args.out / "pool.json").write_text(json.dumps({"checks": as_json(checks)}, indent=1))
    return int(not checks or not all(check.passed for check in checks))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
