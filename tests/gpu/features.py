"""What the table of features says of a GPU, tried on one: weight updates, sleep, returned tensors,
MoE kernels, DeepEP, CPU offload.

Each run is one engine with its options, and asks one thing or several; results go into OUT as they
come (`feature-*.json`, `feature-*.npz`), and are judged at the end (`features.json`). A run that
tries what the table does not yet call tested is started with GLM53_SERVE=ours and is only recorded:
if SGLang's own class fails with the same options, neither has it.

usage: python -m gpu.features OUT [--only NAME ...] [--promised] [--at-once 3] [--judge]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
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
from .compare import TIE, Check, as_json, first_divergence, report
from .real_dims import prompt

COMMON: dict[str, Any] = {
    "kv_cache_dtype": "fp8_e4m3",
    "mem_fraction_static": 0.7,
    "max_total_tokens": 16384,
    "context_length": 8192,
    "max_running_requests": 4,
    "chunked_prefill_size": 4096,
    "cuda_graph_bs_decode": [1, 2, 4],
    "cuda_graph_backend_prefill": "disabled",
}
LENGTHS = (100, 2900)  # dense and sparse prefill: index_topk is 2048
NEW = 24
RETURNED = {
    "enable_return_hidden_states": True,
    "enable_return_routed_experts": True,
    "enable_return_indexer_topk": True,
}
DEEPEP = {"moe_a2a_backend": "deepep", "moe_runner_backend": "deep_gemm"}
SAVER = {"enable_memory_saver": True}

# Shares of equal elements, and the cosine of hidden states, that bfloat16 and FP8 leave between
# two implementations; a wrong row, column or layer leaves next to nothing.
AT_LEAST = {"routed_experts": 0.95, "indexer_topk": 0.97, "hidden": 0.99}


@dataclass(frozen=True)
class Run:
    """One engine.

    Attributes:
        name: of the run; its results are feature-<name>.json.
        side: "ours" or "stock".
        asks: names of functions of ASKS, in order.
        options: of `sglang.Engine`, over COMMON.
        like: a run whose greedy answers these must equal, near ties apart.
        tried: whether the table does not call it tested; then nothing is judged but what came out
            is recorded.
        environment: beside GLM53_SERVE.
    """

    name: str
    side: str
    asks: tuple[str, ...] = ("answers",)
    options: dict[str, Any] = field(default_factory=dict)
    like: str | None = None
    tried: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def _both(name: str, options: dict[str, Any], **more: Any) -> list[Run]:
    """The same options on both sides; ours is held against stock's."""
    return [
        Run(f"{name}-stock", "stock", options=options, tried=more.get("tried", False)),
        Run(f"{name}-ours", "ours", options=options, like=f"{name}-stock", **more),
    ]


RUNS: tuple[Run, ...] = (
    Run("returned-stock", "stock", ("answers", "returned"), RETURNED),
    Run("returned-ours", "ours", ("answers", "returned", "updates"), RETURNED, "returned-stock"),
    *_both("triton", {"moe_runner_backend": "triton"}),
    *_both("deep-gemm", {"moe_runner_backend": "deep_gemm"}),
    *_both("fused-shared", {"enforce_shared_experts_fusion": True}),
    Run("sleep-ours", "ours", ("answers", "sleep"), SAVER, "returned-ours", tried=True),
    Run(
        "sleep-backup-ours",
        "ours",
        ("answers", "nap"),
        {**SAVER, "enable_weights_cpu_backup": True},
        "returned-ours",
        tried=True,
    ),
    *_both("offload", {"cpu_offload_gb": 2}, tried=True),
    *_both("offload-groups", {"offload_group_size": 2}, tried=True),
    *_both("deepep-normal", {**DEEPEP, "deepep_mode": "normal"}, tried=True),
    *_both("deepep-auto", {**DEEPEP, "deepep_mode": "auto"}, tried=True),
    *_both(
        "torch-topk",
        {"dsa_topk_backend": "torch"},
        tried=True,
        environment={"SGLANG_DSA_FUSE_TOPK": "0"},
    ),
    *_both("flashinfer-topk", {"dsa_topk_backend": "flashinfer"}, tried=True),
)


# --- in the engine's process -----------------------------------------------------------------


class Asking:
    """One engine and what is asked of it; `record` is what the run leaves."""

    def __init__(self, engine: Any, prompts: list[list[int]], args: dict[str, Any]) -> None:
        self.engine, self.prompts, self.args = engine, prompts, args
        self.record: dict[str, Any] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def request(self, tokens: list[int], new: int = NEW, **fields: Any) -> dict[str, Any]:
        """One greedy request; `fields` are GenerateReqInput's."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=tokens,
            sampling_params={"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=2,
            **fields,
        )
        reply = self.engine.tokenizer_manager.generate_request(request, None)
        return self.engine.loop.run_until_complete(reply.__anext__())

    def greedy(self) -> list[dict[str, Any]]:
        """Greedy answers to all prompts, each from an empty cache: tokens, logprobs, top."""
        answers = []
        for tokens in self.prompts:
            self.engine.flush_cache()
            meta = (reply := self.request(tokens))["meta_info"]
            answers.append(
                {
                    "tokens": list(reply["output_ids"]),
                    "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
                    "top": [
                        [[value, token] for value, token, *_ in best]
                        for best in meta["output_top_logprobs"]
                    ],
                }
            )
        return answers


def ask_answers(asking: Asking) -> None:
    """The plain greedy answers."""
    asking.record["answers"] = asking.greedy()


def ask_returned(asking: Asking) -> None:
    """Hidden states, routed experts and indexer selections of each prompt."""
    for number, tokens in enumerate(asking.prompts):
        asking.engine.flush_cache()
        # All rows of a long prompt would be 18 million numbers in Python lists.
        mode: Any = True if len(tokens) < 200 else "last"
        meta = asking.request(
            tokens,
            new=4,
            return_hidden_states=mode,
            return_routed_experts=True,
            return_indexer_topk=True,
        )["meta_info"]
        asking.arrays[f"hidden.{number}"] = rows_of(meta["hidden_states"])
        for name in ("routed_experts", "indexer_topk"):
            packed = np.frombuffer(base64.b64decode(meta[name]), dtype=np.int32)
            asking.arrays[f"{name}.{number}"] = packed
    asking.record["returned"] = {name: list(a.shape) for name, a in asking.arrays.items()}


def rows_of(hidden_states: Any) -> np.ndarray:
    """[rows, hidden] of SGLang's nested lists: one row, a list of rows, or lists of rows in it."""
    if not isinstance(hidden_states[0], list):
        return np.asarray([hidden_states], dtype=np.float32)
    return np.concatenate([rows_of(part) for part in hidden_states])


def ask_updates(asking: Asking) -> None:
    """Weights from disk: the same, another seed's, one that does not fit, the first again; and
    one tensor from memory, with turned signs, and put back."""
    import torch
    from safetensors import safe_open

    engine, first, other = asking.engine, asking.args["checkpoint"], asking.args["other"]
    steps = asking.record["updates"] = {}

    def update(name: str, folder: str) -> None:
        success, message = engine.update_weights_from_disk(folder)[:2]
        steps[name] = {"success": bool(success), "message": str(message)[:300]}
        steps[name]["answers"] = asking.greedy()
        print(f"update {name}: {success}", flush=True)

    update("same", first)
    update("other", other)
    update("misfit", asking.args["misfit"])
    update("back", first)

    name = "model.norm.weight"
    index = json.loads((Path(first) / "model.safetensors.index.json").read_text())
    with safe_open(Path(first) / index["weight_map"][name], framework="pt") as shard:
        weight = shard.get_tensor(name)
    device = asking.args["device"]
    signs = 1 - 2 * (torch.arange(weight.shape[0]) % 2)
    for step, factor in (("turned", signs), ("restored", 1)):
        tensor = (weight.float() * factor).to(torch.bfloat16).to(device)
        engine.begin_weight_update()
        success, message = engine.update_weights_from_tensor([(name, tensor)])[:2]
        engine.end_weight_update()
        steps[step] = {"success": bool(success), "message": str(message)[:300]}
        steps[step]["answers"] = asking.greedy()


def free_gib() -> float:
    """Free memory of the GPU."""
    import torch

    return torch.cuda.mem_get_info()[0] / 2**30


def ask_sleep(asking: Asking) -> None:
    """Release everything, resume, load the weights again: the same answer."""
    before = free_gib()
    asking.engine.release_memory_occupation()
    asleep = free_gib()
    asking.engine.resume_memory_occupation()
    success, message = asking.engine.update_weights_from_disk(asking.args["checkpoint"])[:2]
    asking.record["sleep"] = {
        "success": bool(success),
        "message": str(message)[:300],
        "released_gib": round(asleep - before, 2),
        "answers": asking.greedy(),
    }


def ask_nap(asking: Asking) -> None:
    """Release everything and resume; the weights come from the host's copy."""
    before = free_gib()
    asking.engine.release_memory_occupation()
    asleep = free_gib()
    asking.engine.resume_memory_occupation()
    asking.record["sleep"] = {
        "success": True,
        "released_gib": round(asleep - before, 2),
        "answers": asking.greedy(),
    }


ASKS: dict[str, Callable[[Asking], None]] = {
    "answers": ask_answers,
    "returned": ask_returned,
    "updates": ask_updates,
    "sleep": ask_sleep,
    "nap": ask_nap,
}


def run_one(run: Run, out: Path, args: dict[str, Any]) -> None:
    """Start the engine of a run, ask, and write after every answer."""
    import sglang

    file = out / f"feature-{run.name}.json"
    record: dict[str, Any] = {"side": run.side, "options": run.options, "complete": False}
    options = {**COMMON, **run.options, **args["engine"]}
    began = time.monotonic()
    engine = sglang.Engine(
        model_path=args["checkpoint"], skip_tokenizer_init=True, log_level="warning", **options
    )
    try:
        block = engine.get_server_info()["internal_states"][0]["glm53"]
        record["status"] = block
        record["started_seconds"] = round(time.monotonic() - began, 1)
        print(f"{run.name}: {block['model']} after {record['started_seconds']} s", flush=True)
        assert block["serving"] == run.side, f"asked for {run.side}, {block['model']} serves"
        asking = Asking(engine, args["prompts"], args)
        asking.record = record
        for name in run.asks:
            ASKS[name](asking)
            file.write_text(json.dumps(record))
            if asking.arrays:
                np.savez(out / f"feature-{run.name}.npz", **asking.arrays)
            print(f"{run.name}: {name} answered", flush=True)
        record["complete"] = True
        file.write_text(json.dumps(record))
    finally:
        engine.shutdown()


# --- judging ---------------------------------------------------------------------------------


def same_answers(name: str, left: Sequence[Any], right: Sequence[Any], *, same: bool) -> Check:
    """Greedy answers that must be the same, near ties apart, or must differ in each prompt."""
    parted = []
    for a, b in zip(left, right, strict=True):
        divergence = first_divergence(a, b)
        if divergence is not None:
            parted.append(divergence)
    detail = f"{len(left) - len(parted)} of {len(left)} identical"
    if parted:
        detail += "; parted " + ", ".join(f"@{d.position}: {d.gap:.1e}" for d in parted)
    if same:
        return Check(name, bool(left) and all(d.gap <= TIE for d in parted), detail)
    return Check(name, len(parted) == len(left) > 0, detail)


def judge_updates(name: str, record: dict[str, Any]) -> list[Check]:
    """Who must answer as before an update, and who must not."""
    first, steps = record["answers"], record["updates"]
    checks = []
    for step, same, success in (
        ("same", True, True),
        ("other", False, True),
        ("back", True, True),
        ("turned", False, True),
        ("restored", True, True),
    ):
        check = same_answers(f"{name}: weights {step}", first, steps[step]["answers"], same=same)
        told = "" if steps[step]["success"] == success else f"; {steps[step]['message']}"
        checks.append(Check(check.name, check.passed and not told, check.detail + told))
    misfit = same_answers(
        f"{name}: a checkpoint that does not fit leaves the weights",
        steps["other"]["answers"],
        steps["misfit"]["answers"],
        same=True,
    )
    refused = not steps["misfit"]["success"]
    checks.append(Check(misfit.name, misfit.passed and refused, misfit.detail))
    return checks


def judge_returned(
    name: str, ours: dict[str, np.ndarray], stock: dict[str, np.ndarray], config: dict[str, Any]
) -> list[Check]:
    """Returned tensors of ours against stock's, row by row."""
    checks = [Check(f"{name}: the same tensors", ours.keys() == stock.keys(), f"{sorted(ours)}")]
    for key in sorted(ours.keys() & stock.keys()):
        kind = key.partition(".")[0]
        a, b = ours[key], stock[key]
        if a.shape != b.shape or not a.size:
            checks.append(Check(f"{name}: {key}", False, f"shapes {a.shape} and {b.shape}"))
            continue
        if kind == "hidden":
            norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
            share = float(((a * b).sum(axis=1) / norms).mean())
        else:
            width = config["num_experts_per_tok" if kind == "routed_experts" else "index_topk"]
            share = equal_share(a.reshape(-1, width), b.reshape(-1, width))
        detail = f"{'mean cosine' if kind == 'hidden' else 'share of equal ids'} {share:.4f}"
        checks.append(Check(f"{name}: {key}", share >= AT_LEAST[kind], detail))
    return checks


def equal_share(left: np.ndarray, right: np.ndarray) -> float:
    """Share of ids that both rows of a pair hold, in any order; -1 counts where both have it."""
    common = total = 0
    for a, b in zip(np.sort(left), np.sort(right), strict=True):
        padding = min(int((a < 0).sum()), int((b < 0).sum()))
        common += len(np.intersect1d(a[a >= 0], b[b >= 0])) + padding
        total += len(a)
    return common / total


def judge(out: Path, runs: Sequence[Run], config: dict[str, Any]) -> list[Check]:
    """Checks over what is there; of a run that only tries, a failure is told as such."""
    records = {run.name: read(out, run) for run in runs}
    checks: list[Check] = []
    for run in runs:
        record = records[run.name]
        mine: list[Check] = []
        if not record.get("complete"):
            mine.append(
                Check(f"{run.name} finishes", False, str(record.get("failed", "no result")))
            )
        like = records.get(run.like or "", {})
        if "answers" in record and "answers" in like:
            name = f"{run.name}: as {run.like}"
            mine.append(same_answers(name, like["answers"], record["answers"], same=True))
        if "restored" in record.get("updates", {}):
            mine += judge_updates(run.name, record)
        if "sleep" in record:
            check = same_answers(
                f"{run.name}: after the sleep",
                record["answers"],
                record["sleep"]["answers"],
                same=True,
            )
            released = record["sleep"]["released_gib"]
            awake = check.passed and record["sleep"]["success"] and released > 1
            mine.append(Check(check.name, awake, f"{check.detail}; {released} GiB released"))
        arrays = (out / f"feature-{run.name}.npz", out / f"feature-{run.like}.npz")
        if "returned" in run.asks and all(file.exists() for file in arrays):
            mine += judge_returned(run.name, *(dict(np.load(f)) for f in arrays), config)
        checks += [_tried(check) for check in mine] if run.tried else mine
    return checks


def _tried(check: Check) -> Check:
    """A check of something that the table does not promise: recorded, never a failure."""
    told = "" if check.passed else "does not run: "
    return Check(f"tried, {check.name}", True, told + check.detail)


def read(out: Path, run: Run) -> dict[str, Any]:
    """A run's record, with what its log says where it did not finish."""
    file = out / f"feature-{run.name}.json"
    record = json.loads(file.read_text()) if file.exists() else {}
    failed = out / "logs" / f"feature-{run.name}.failed"
    if failed.exists() and not record.get("complete"):
        record["failed"] = failed.read_text()
    return record


# --- the parent ------------------------------------------------------------------------------


def side(run: Run) -> dict[str, str]:
    """What makes the side serve; ours by the table alone, unless the run tries beyond it."""
    return (
        {"GLM53_SERVE": "ours"} if run.tried and run.side == "ours" else side_environment(run.side)
    )


def measure(out: Path, runs: Sequence[Run], arguments: Path, at_once: int) -> None:
    """Run all engines; what fails leaves its reason in logs/feature-<name>.failed."""
    children = [
        Child(
            run.name,
            "gpu.features",
            [str(out), "--child", run.name, "--arguments", str(arguments)],
            out / "logs" / f"feature-{run.name}.log",
            {**side(run), **run.environment},
            timeout=300,  # kernels may have to be compiled first
        )
        for run in runs
    ]
    for run in runs:
        for old in (f"feature-{run.name}.json", f"feature-{run.name}.npz"):
            (out / old).unlink(missing_ok=True)
        (out / "logs" / f"feature-{run.name}.failed").unlink(missing_ok=True)
    for ended in run_all(children, at_once):
        if not ended.ok:
            (out / "logs" / f"feature-{ended.child.name}.failed").write_text(ended.reason)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge; the exit code is 1 if anything that the table promises fails."""
    parser = argparse.ArgumentParser(description="features on a GPU, ours and stock's")
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", type=Path, default=Path("/tmp/glm53-features"))
    parser.add_argument("--other", type=Path, help="the same sizes, another seed")
    parser.add_argument("--misfit", type=Path, help="other sizes")
    parser.add_argument("--only", nargs="+", choices=[run.name for run in RUNS])
    parser.add_argument("--promised", action="store_true", help="leave out what is only tried")
    parser.add_argument("--at-once", type=int, default=3, help="engines at the same time")
    parser.add_argument("--judge", action="store_true", help="only judge what OUT holds")
    parser.add_argument("--engine", type=json.loads, default={}, help="engine options, as JSON")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        (run,) = [run for run in RUNS if run.name == args.child]
        run_one(run, args.out, json.loads(args.arguments.read_text()))
        return 0
    end_children_when_ended()
    runs = [
        run
        for run in RUNS
        if (args.only is None or run.name in args.only) and not (args.promised and run.tried)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "logs" / "features-arguments.json"
    if not args.judge:
        began = time.monotonic()
        write_arguments(args, file)
        measure(args.out, runs, file, args.at_once)
        print(f"features: measured in {time.monotonic() - began:.0f} s", flush=True)
    config = json.loads((args.checkpoint / "config.json").read_text())
    checks = judge(args.out, runs, config)
    print(report("features", checks), flush=True)
    (args.out / "features.json").write_text(json.dumps({"checks": as_json(checks)}, indent=1))
    return int(not checks or not all(check.passed for check in checks))


def write_arguments(args: argparse.Namespace, file: Path) -> None:
    """Make the checkpoints that are not there, and write what every child reads."""
    sizes = {"layers": 4, "experts": 8}
    other = args.other or args.checkpoint.with_name(args.checkpoint.name + "-other")
    misfit = args.misfit or args.checkpoint.with_name(args.checkpoint.name + "-misfit")
    vocab = ensure_checkpoint(args.checkpoint, args.out, **sizes) if not args.other else 0
    if not args.other:
        ensure_checkpoint(other, args.out, **sizes, seed=1)
        ensure_checkpoint(misfit, args.out, layers=4, experts=8, vocab=vocab // 2)
    vocab = int(json.loads((args.checkpoint / "config.json").read_text())["vocab_size"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        json.dumps(
            {
                "checkpoint": str(args.checkpoint),
                "other": str(other),
                "misfit": str(misfit),
                "engine": args.engine,
                "device": args.engine.get("device", "cuda"),
                "prompts": [prompt(vocab, length, seed=7) for length in args.lengths],
            }
        )
    )


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
