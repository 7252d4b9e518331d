"""Parity of our classes with SGLang's own and with transformers, at GLM-5.3's dimensions.

One checkpoint, one reference process, and for each of {bf16, FP8} KV x {plain, MTP 5-1-6} an engine
of either side that answers the same requests (`prompts.parity_requests`). Results go into OUT as
they come: `parity-*.json` for every engine, `reference.npz`, and the judged table `parity.json`.

usage: python -m gpu.parity OUT [--checkpoint FOLDER] [--only bf16 fp8 ...] [--at-once 2]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .children import (
    Child,
    end_children_when_ended,
    ensure_checkpoint,
    run_all,
    side_environment,
)
from .compare import (
    Check,
    Noise,
    accept_length,
    against_reference,
    as_json,
    error,
    greedy,
    noise,
    prefix_hit,
    report,
    same_accept_length,
    widest,
)
from .prompts import AGAIN, Group, parity_requests, read_requests, write_requests

SIDES = ("stock", "ours")
PAGE = 64  # tokens
SECONDS = 400  # a process at most: kernels may have to be compiled first
MTP = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 6,
}
COMMON: dict[str, Any] = {
    "mem_fraction_static": 0.8,
    "max_total_tokens": 65536,
    "context_length": 32768,
    "max_running_requests": 8,
    "chunked_prefill_size": 8192,
    "cuda_graph_bs_decode": [1, 2, 4, 8],
    "cuda_graph_backend_prefill": "disabled",
}
# FlashAttention 3, stock's default decode backend for bf16 KV on Hopper, may be missing.
BF16 = {"kv_cache_dtype": "bfloat16", "dsa_decode_backend": "flashmla_sparse"}
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
FA3 = {"kv_cache_dtype": "bfloat16", "dsa_decode_backend": "fa3"}
DENSE = {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "2048"}
GRAPH: dict[str, Any] = {
    **{name: value for name, value in COMMON.items() if name != "cuda_graph_backend_prefill"},
    "cuda_graph_bs_prefill": [512, 3072, 8192],
}


@dataclass(frozen=True)
class Variant:
    """One setting that both sides are started with."""

    name: str
    options: dict[str, Any]
    plain: str | None = None  # the variant without speculation that this one must agree with
    environment: dict[str, str] = field(default_factory=dict)
    needs: str | None = None  # a file of a package, without which it cannot run


VARIANTS = (
    Variant("fp8", {**COMMON, **FP8}),
    Variant("bf16", {**COMMON, **BF16}),
    Variant("fp8-mtp", {**COMMON, **FP8, **MTP}, plain="fp8"),
    Variant("bf16-mtp", {**COMMON, **BF16, **MTP}, plain="bf16"),
    # SGLang's default: prefill inside breakable CUDA graphs (here of few sizes, to start sooner).
    Variant("fp8-prefill-graph", {**GRAPH, **FP8}),
    # SGLang's default on Hopper: short prefills attend densely, through FlashAttention 3.
    Variant("fp8-dense", {**COMMON, **FP8}, environment=DENSE, needs="flash_ops"),
    Variant("bf16-fa3", {**COMMON, **FA3}, environment=DENSE, needs="flash_ops"),
    Variant("fp8-dense-mtp", {**COMMON, **FP8, **MTP}, "fp8-dense", DENSE, needs="flash_ops"),
)

Results = dict[tuple[str, str], dict[str, Any]]


def can_run(variant: Variant) -> bool:
    """Whether the kernels that a variant needs are installed; says so where they are not."""
    if variant.needs is None:
        return True
    spec = importlib.util.find_spec("sgl_kernel")
    folder = Path(next(iter(spec.submodule_search_locations or ["."]))) if spec else Path(".")
    if any(folder.glob(f"{variant.needs}*.so")):
        return True
    print(f"not run  {variant.name}: sgl_kernel has no {variant.needs}", flush=True)
    return False


def measure(
    out: Path, checkpoint: Path, requests: Path, variants: Sequence[Variant], at_once: int
) -> list[Check]:
    """Run the reference and every engine; a check for each that did not finish."""
    children = [
        Child(
            f"{variant.name}-{side}",
            "gpu.generate",
            [
                side,
                str(checkpoint),
                str(requests),
                str(out / f"parity-{variant.name}-{side}.json"),
                json.dumps(variant.options),
            ],
            out / "logs" / f"parity-{variant.name}-{side}.log",
            {**variant.environment, **side_environment(side)},
            timeout=SECONDS,
        )
        for variant in variants
        for side in SIDES
    ]
    reference = Child(
        "transformers",
        "gpu.reference",
        [str(checkpoint), str(requests), str(out / "reference.npz")],
        out / "logs" / "reference.log",
        timeout=SECONDS,
    )
    for child in children:  # what an earlier run left is not this one's
        Path(child.arguments[3]).unlink(missing_ok=True)
    if not has_reference(out / "reference.npz", checkpoint, read_requests(requests)):
        children.insert(min(2, len(children)), reference)
    ended = run_all(children, at_once)
    return [Check(f"{e.child.name} finishes", False, e.reason) for e in ended if not e.ok]


def has_reference(file: Path, checkpoint: Path, groups: Sequence[Group]) -> bool:
    """Whether `file` holds this checkpoint's values for every prompt that is asked for."""
    config = checkpoint / "config.json"
    if not file.exists() or file.stat().st_mtime < config.stat().st_mtime:
        return False
    lengths = {name: len(values) for name, values in np.load(file).items()}
    return all(
        lengths.get(f"{group.name}.{number}") == len(tokens) - 1
        for group in groups
        if group.prompt_logprobs
        for number, tokens in enumerate(group.prompts)
    )


def judge(out: Path, groups: Sequence[Group], variants: Sequence[Variant]) -> list[Check]:
    """Every rule over what `measure` left in `out`."""
    results = read_results(out, variants)
    file = out / "reference.npz"
    reference = dict(np.load(file)) if file.exists() else {}
    checks: list[Check] = []
    for variant in variants:
        stock, ours = results.get((variant.name, "stock")), results.get((variant.name, "ours"))
        if stock is None or ours is None:
            missing = "stock's" if stock is None else "our"
            checks.append(Check(variant.name, False, f"{missing} run is not there or not complete"))
            continue
        mine, theirs = ours["groups"], stock["groups"]
        own = own_noise(groups, theirs)
        for group in groups:
            name = f"{variant.name} {group.name}: ours, stock"
            tie = own[group.name].tie
            checks.append(greedy(name, mine[group.name], theirs[group.name], tie))
        checks += _hits(variant, groups, results, own)
        checks += _against_reference(variant, groups, mine, theirs, reference)
        if variant.plain is not None:
            checks += _against_plain(variant, groups, results, own)
    return checks


def own_noise(groups: Sequence[Group], theirs: dict[str, list]) -> dict[str, Noise]:
    """For each group what stock's two runs of its prompts differ by; nothing where it was asked
    once (its prompts are shorter than index_topk)."""
    found = {group.name: Noise() for group in groups}
    for group in groups:
        if group.name.endswith(AGAIN):
            base = group.name.removesuffix(AGAIN)
            between = noise(theirs[base], theirs[group.name])
            found.update({g.name: between for g in groups if g.prompts == group.prompts})
    return found


def repeatability(
    groups: Sequence[Group], results: Results, variants: Sequence[Variant]
) -> dict[str, dict[str, float]]:
    """Mean |difference| of prompt log-probabilities: ours from stock, and each side from itself."""
    found: dict[str, dict[str, float]] = {}
    for variant in variants:
        runs = {side: results.get((variant.name, side)) for side in SIDES}
        if None in runs.values():
            continue
        for group in groups:
            if not group.prompt_logprobs or group.name.endswith(AGAIN):
                continue
            mine, theirs = (runs[side]["groups"] for side in ("ours", "stock"))
            row = {"ours, stock": noise(mine[group.name], theirs[group.name]).mean}
            if (again := f"{group.name}{AGAIN}") in theirs:
                row["stock, stock"] = noise(theirs[group.name], theirs[again]).mean
                row["ours, ours"] = noise(mine[group.name], mine[again]).mean
            found[f"{variant.name} {group.name}"] = row
    return found


def read_results(out: Path, variants: Sequence[Variant]) -> Results:
    """What the engines wrote, of those that answered everything."""
    results: Results = {}
    for variant in variants:
        for side in SIDES:
            file = out / f"parity-{variant.name}-{side}.json"
            record = json.loads(file.read_text()) if file.exists() else {}
            if record.get("complete"):
                results[variant.name, side] = record
    return results


def _hits(
    variant: Variant, groups: Sequence[Group], results: Results, own: dict[str, Noise]
) -> list[Check]:
    """A prefix hit may change an answer no more than it changes stock's (in brackets).

    With a cached prefix the rest of a short prompt takes another kernel, where short prefills
    attend densely.
    """
    checks = []
    for group in groups:
        if group.repeats is None:
            continue
        pairs = {
            side: tuple(
                results[variant.name, side]["groups"][name] for name in (group.repeats, group.name)
            )
            for side in ("ours", "stock")
        }
        tie = max(own[group.name].tie, widest(*pairs["stock"]))
        name = f"{variant.name} {group.name}: ours, its first run"
        ours, stock = (prefix_hit(name, *pairs[side], PAGE, tie) for side in ("ours", "stock"))
        checks.append(_beside(ours, stock))
    return checks


def _beside(ours: Check, stock: Check) -> Check:
    return Check(ours.name, ours.passed, f"{ours.detail} [stock: {stock.detail}]")


def _against_reference(
    variant: Variant,
    groups: Sequence[Group],
    mine: dict[str, list],
    theirs: dict[str, list],
    reference: dict[str, np.ndarray],
) -> list[Check]:
    if not reference:
        return [Check(f"{variant.name}: transformers", False, "there is no reference.npz")]
    asked = [g for g in groups if g.prompt_logprobs and not g.name.endswith(AGAIN)]
    rows: list[tuple[str, list[Group]]] = [(group.name, [group]) for group in asked]
    try:
        for name, some in [*rows, ("all prompts", asked)]:
            wanted = [reference[f"{g.name}.{i}"] for g in some for i in range(len(g.prompts))]
            ours = error([a for g in some for a in mine[g.name]], wanted)
            stock = error([a for g in some for a in theirs[g.name]], wanted)
            if name != "all prompts":
                row = against_reference(name, ours, stock)
                print(f"      {variant.name} {name}, against FP32: {row.detail}", flush=True)
        return [against_reference(f"{variant.name}: ours / stock against FP32", ours, stock)]
    except (KeyError, ValueError) as problem:
        return [Check(f"{variant.name}: transformers", False, f"{problem}")]


def _against_plain(
    variant: Variant, groups: Sequence[Group], results: Results, own: dict[str, Noise]
) -> list[Check]:
    """Speculation may change an answer no more than it changes stock's; and the accept lengths.

    Verification computes several rows a request where a decode step computes one: other kernels'
    shapes, other roundings, on both sides.
    """
    plain = {side: results.get((variant.plain or "", side)) for side in SIDES}
    if None in plain.values():
        name = f"{variant.name}: no speculation"
        return [Check(name, False, f"a run of {variant.plain} is not there")]
    checks = []
    for group in groups:
        name = f"{variant.name} {group.name}: ours, no MTP"
        pairs = {
            side: (
                results[variant.name, side]["groups"][group.name],
                plain[side]["groups"][group.name],
            )
            for side in SIDES
        }
        tie = max(own[group.name].tie, widest(*pairs["stock"]))
        ours, stock = (greedy(name, *pairs[side], tie) for side in ("ours", "stock"))
        checks.append(_beside(ours, stock))
    mine, theirs = (results[variant.name, side]["groups"] for side in ("ours", "stock"))
    checks.append(same_accept_length(f"{variant.name}: accept length", mine, theirs))
    return checks


def summary(out: Path, variants: Sequence[Variant]) -> dict[str, Any]:
    """Start-up seconds and accept length of every run, beside the checks."""
    return {
        f"{name}-{side}": {
            "started_seconds": record["started_seconds"],
            "model": record["status"]["model"],
            "pool": record["status"]["pool"],
            "accept_length": round(accept_length(record["groups"]), 3),
        }
        for (name, side), record in read_results(out, variants).items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge; the exit code is 1 if anything fails."""
    parser = argparse.ArgumentParser(description="ours against stock and transformers")
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", type=Path, default=Path("/tmp/glm53-real-dims"))
    parser.add_argument("--only", nargs="+", choices=[v.name for v in VARIANTS])
    parser.add_argument("--at-once", type=int, default=2, help="engines at the same time")
    parser.add_argument("--judge", action="store_true", help="only judge what OUT holds")
    args = parser.parse_args(arguments)
    end_children_when_ended()
    names = args.only or [variant.name for variant in VARIANTS]
    variants = [variant for variant in VARIANTS if variant.name in names and can_run(variant)]
    args.out.mkdir(parents=True, exist_ok=True)
    requests = args.out / "logs" / "parity-requests.json"
    checks: list[Check] = []
    if not args.judge:
        began = time.monotonic()
        vocab = ensure_checkpoint(args.checkpoint, args.out)
        write_requests(parity_requests(vocab), requests)
        checks += measure(args.out, args.checkpoint, requests, variants, args.at_once)
        print(f"parity: measured in {time.monotonic() - began:.0f} s", flush=True)
    checks += judge(args.out, read_requests(requests), variants)
    print(report("parity", checks), flush=True)
    groups = read_requests(requests)
    differences = repeatability(groups, read_results(args.out, variants), variants)
    for name, row in differences.items():
        print(f"      {name}, mean |delta|: {', '.join(f'{k} {v:.1e}' for k, v in row.items())}")
    written = {
        "checks": as_json(checks),
        "runs": summary(args.out, variants),
        "mean_differences": differences,
    }
    (args.out / "parity.json").write_text(json.dumps(written, indent=1) + "\n")
    return int(not checks or not all(check.passed for check in checks))


if __name__ == "__main__":
    sys.exit(main())
