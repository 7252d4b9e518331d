"""Every DSA attention backend of SGLang 0.5.23 on Hopper: ours does what stock does.

`--dsa-prefill-backend` and `--dsa-decode-backend` are set one by one over both KV dtypes. A setting
that stock answers with must answer alike with our classes, or these must stand down and say why;
one that stock refuses, or that fails in its first pass, must fail with ours too. Each setting says
what SGLang's source does with it on SM90 and where (argument checks, the backend's constructor, its
first pass); the run says whether it is so.

usage: python -m gpu.backends OUT [--quick] [--checkpoint FOLDER] [--at-once 6]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .children import (
    Child,
    Ended,
    end_children_when_ended,
    ensure_checkpoint,
    run_all,
    side_environment,
)
from .compare import Answer, Check, as_json, greedy, report
from .prompts import Group, write_requests
from .real_dims import prompt

SIDES = ("stock", "ours")
RUNS, ARGUMENTS, CONSTRUCTOR, FIRST_PASS = "runs", "arguments", "constructor", "first pass"
CLOSE = 0.1  # nats, mean |difference| of prompt log-probabilities of the two sides

# What stock needs where a run does not set the option itself: fa3, its decode default for bf16 KV,
# is FlashAttention 3.
DEFAULTS = {
    "bfloat16": ("flashmla_sparse", "flashmla_sparse"),
    "fp8_e4m3": ("flashmla_kv", "flashmla_kv"),
}


@dataclass(frozen=True)
class Setting:
    """One start. expected: what stock does on Hopper; quick: part of the quick selection."""

    kv: str
    prefill: str
    decode: str
    expected: str
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.kv.split('_')[0].replace('bfloat16', 'bf16')}.{self.prefill}.{self.decode}"

    @property
    def needs(self) -> str | None:
        """The module without which SGLang's kernel cannot be there."""
        chosen = {self.prefill, self.decode}
        if "fa3" in chosen:
            return "sgl_kernel.flash_ops"
        return "tilelang" if "tilelang" in chosen else None


def settings() -> list[Setting]:
    """All of them, those that run first."""
    b, f = "bfloat16", "fp8_e4m3"
    listed = [
        Setting(b, "flashmla_sparse", "flashmla_sparse", RUNS, quick=True),
        Setting(b, "flashmla_sparse_q8", "flashmla_kv", RUNS, quick=True),
        Setting(b, "flashmla_kv", "flashmla_sparse", RUNS, quick=True),
        Setting(b, "flashmla_auto", "flashmla_sparse", RUNS, quick=True),
        Setting(f, "flashmla_kv", "flashmla_kv", RUNS, quick=True),
        Setting(f, "flashmla_sparse", "flashmla_kv", RUNS, quick=True),
        Setting(f, "flashmla_sparse_q8", "flashmla_kv", RUNS, quick=True),
        Setting(f, "flashmla_auto", "flashmla_kv", RUNS, quick=True),
        Setting(b, "fa3", "fa3", RUNS, quick=True),
        Setting(f, "fa3", "flashmla_kv", FIRST_PASS),
        Setting(b, "tilelang", "tilelang", RUNS, quick=True),
        Setting(f, "tilelang", "tilelang", RUNS, quick=True),
        # The packed FP8 cache is not what flashmla_sparse's decode reads.
        Setting(f, "flashmla_kv", "flashmla_sparse", FIRST_PASS),
    ]
    for kv in (b, f):
        prefill, decode = DEFAULTS[kv]
        # ROCm's, refused while arguments are read.
        listed.append(Setting(kv, "triton", decode, ARGUMENTS, quick=kv == f))
        listed.append(Setting(kv, prefill, "triton", ARGUMENTS))
        # Prefill only; more than 32 query heads a rank; SM120 only.
        listed.append(Setting(kv, prefill, "flashmla_sparse_q8", CONSTRUCTOR, quick=kv == b))
        listed.append(Setting(kv, "triton_sparse_mla", decode, CONSTRUCTOR, quick=kv == b))
        listed.append(Setting(kv, "flashinfer_sparse_mla", decode, CONSTRUCTOR, quick=kv == f))
        listed.append(Setting(kv, prefill, "flashinfer_sparse_mla", CONSTRUCTOR))
        # No case for it in decode; Blackwell's, ROCm's and XPU's kernels.
        listed.append(Setting(kv, prefill, "flashmla_auto", FIRST_PASS, quick=kv == f))
        for other in ("trtllm", "aiter", "intel_xpu"):
            listed.append(Setting(kv, other, decode, FIRST_PASS, quick=other == "aiter"))
            listed.append(Setting(kv, prefill, other, FIRST_PASS))
    # Raw and packed FP8 layouts do not mix.
    listed.append(Setting(f, "tilelang", "flashmla_kv", ARGUMENTS))
    return listed


def not_run(setting: Setting) -> str | None:
    """Why a setting cannot be run here; None if it can."""
    if setting.needs is None:
        return None
    try:
        there = importlib.util.find_spec(setting.needs) is not None
    except ImportError:
        there = False
    return None if there else f"{setting.needs} is not installed"


def judge_one(setting: Setting, stock: Ended, ours: Ended, out: Path) -> Check:
    """Both answer alike, or both refuse; hanging is no refusal, nor is failing where it runs."""
    name = f"{setting.name} ({setting.expected})"
    if late := [side for side, end in zip(SIDES, (stock, ours), strict=True) if end.code is None]:
        return Check(name, False, f"not done in time: {', '.join(late)}")
    if stock.ok != ours.ok:
        return Check(
            name, False, f"stock: {stock.reason or 'answers'}; ours: {ours.reason or 'answers'}"
        )
    if not stock.ok:
        refused = setting.expected != RUNS
        return Check(name, refused, f"stock: {stock.reason} | ours: {ours.reason}")
    answers = {side: _answers(out / f"backend-{setting.name}-{side}.json") for side in SIDES}
    check = greedy(name, answers["ours"], answers["stock"])
    deltas = [
        abs(a - b)
        for one, other in zip(answers["ours"], answers["stock"], strict=True)
        for a, b in zip(one["prompt_logprobs"], other["prompt_logprobs"], strict=True)
    ]
    mean = sum(deltas) / len(deltas)
    detail = f"{check.detail}; prompts: mean |delta| {mean:.1e}, largest {max(deltas):.1e}"
    status = json.loads((out / f"backend-{setting.name}-ours.json").read_text())["status"]
    if status["serving"] != "ours":
        reasons = "; ".join(row["reason"] for row in status["stood_down"])
        detail = f"ours stands down ({reasons}); {detail}"
    return Check(name, check.passed and mean <= CLOSE, detail)


def _answers(file: Path) -> list[Answer]:
    groups = json.loads(file.read_text())["groups"]
    return [answer for group in groups.values() for answer in group]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the settings on both sides and judge them; exit code 1 if one fails."""
    parser = argparse.ArgumentParser(description="every DSA backend, ours beside stock")
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", type=Path, default=Path("/tmp/glm53-real-dims-4"))
    parser.add_argument("--quick", action="store_true", help="those that run, and some that do not")
    parser.add_argument("--at-once", type=int, default=6, help="engines at the same time")
    args = parser.parse_args(arguments)
    end_children_when_ended()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    vocab = ensure_checkpoint(args.checkpoint, args.out, layers=4, experts=8, vocab=32768)
    prompts = [prompt(vocab, 100, 7), prompt(vocab, 3000, 8)]
    groups = [Group(f"p{len(p)}", [p], 16, prompt_logprobs=True) for p in prompts]
    requests = write_requests(groups, args.out / "logs" / "backend-requests.json")
    chosen = [s for s in settings() if s.quick or not args.quick]
    checks: list[Check] = []
    children, pending = [], {}
    left_out: dict[str, str] = {}
    for setting in chosen:
        if reason := not_run(setting):
            print(f"not run  {setting.name}: {reason}", flush=True)
            left_out[setting.name] = reason
            continue
        for side in SIDES:
            child = _child(setting, side, args.checkpoint, requests, args.out)
            children.append(child)
            pending[child.name] = (setting, side)
    ended: dict[str, dict[str, Ended]] = {}

    def told(result: Ended) -> None:
        setting, side = pending[result.child.name]
        ended.setdefault(setting.name, {})[side] = result
        both = ended[setting.name]
        if len(both) == len(SIDES):
            checks.append(judge_one(setting, both["stock"], both["ours"], args.out))
            written = {"checks": as_json(checks), "not_run": left_out}
            (args.out / "backends.json").write_text(json.dumps(written, indent=1) + "\n")

    run_all(children, args.at_once, told)
    print(f"backends: measured in {time.monotonic() - began:.0f} s", flush=True)
    print(report("backends", checks), flush=True)
    surprises = [s.name for s in chosen if s.name in ended and _surprise(s, ended[s.name])]
    if surprises:  # about SGLang's source, not about us
        print(f"note  stock does another thing than its source says: {', '.join(surprises)}")
    return int(not checks or not all(check.passed for check in checks))


def _surprise(setting: Setting, both: dict[str, Ended]) -> bool:
    return both["stock"].ok != (setting.expected == RUNS)


def _child(setting: Setting, side: str, checkpoint: Path, requests: Path, out: Path) -> Child:
    options = {
        "kv_cache_dtype": setting.kv,
        "dsa_prefill_backend": setting.prefill,
        "dsa_decode_backend": setting.decode,
        "mem_fraction_static": 0.9,
        "max_total_tokens": 8192,
        "context_length": 8192,
        "max_running_requests": 2,
        "chunked_prefill_size": 2048,  # so that the longer prompt has a cached prefix
        "cuda_graph_bs_decode": [1],
        "cuda_graph_backend_prefill": "disabled",
    }
    name = f"backend-{setting.name}-{side}"
    asked = "default" if side == "ours" else side
    arguments = [asked, str(checkpoint), str(requests), str(out / f"{name}.json")]
    return Child(
        f"{setting.name}-{side}",
        "gpu.generate",
        [*arguments, json.dumps(options)],
        out / "logs" / f"{name}.log",
        side_environment(side),
        timeout=300,  # kernels may have to be compiled first
    )


if __name__ == "__main__":
    sys.exit(main())
