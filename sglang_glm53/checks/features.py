"""The package's table of features as rules: what is refused, what stands down."""

from __future__ import annotations

import os
from contextlib import contextmanager
from types import SimpleNamespace

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.reading import on_gpu
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict
from sglang_glm53.features import (
    FEATURES,
    REFUSED,
    STANDS_DOWN,
    UNTESTED,
    Feature,
    Situation,
    serve_wish,
)


def situation(facts: Facts) -> Situation:
    """What the table's predicates read, from facts."""
    device = str(facts.arg("device") or facts.device or "cuda").split(":")[0]
    dtype = facts.arg("dtype", "auto")
    if dtype == "auto":
        dtype = facts.raw_config.get("dtype") or facts.raw_config.get("torch_dtype") or "bfloat16"
    names = {"half": "float16", "float": "float32", "bf16": "bfloat16"}
    return Situation(
        read=lambda name: getattr(facts.args, name, None),
        config=SimpleNamespace(**facts.raw_config),
        device="cuda" if device == "rocm" else device,
        dtype=f"torch.{names.get(str(dtype), str(dtype).removeprefix('torch.'))}",
        capability=facts.capability,
        rocm=facts.device == "rocm",
        sglang=(facts.versions or {}).get("sglang"),
    )


def _hits(facts: Facts, decision: str) -> list[Feature]:
    with _variables(facts):
        where = situation(facts)
        return [row for row in FEATURES if row.decision == decision and row.asked(where)]


def stands_down(facts: Facts) -> list[Feature]:
    """Rows for which SGLang's own class would serve; empty where ours does."""
    rows = _hits(facts, STANDS_DOWN)
    with _variables(facts):
        lifted = serve_wish() == "ours"
    return [row for row in rows if not (lifted and row.reason == UNTESTED)]


@contextmanager
def _variables(facts: Facts):
    """The table reads the process's variables: those of the facts, where they are said."""
    if facts.environment is None or facts.environment is os.environ:
        yield
        return
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(facts.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _refused(facts: Facts) -> Verdict:
    rows = _hits(facts, REFUSED)
    if not rows:
        return None
    return {"name": rows[0].name, "reason": rows[0].reason, "advice": rows[0].advice}


def _down(facts: Facts) -> Verdict:
    rows = stands_down(facts)
    if not rows:
        return None
    more = f" (and {', '.join(row.name for row in rows[1:])})" if rows[1:] else ""
    return {"name": rows[0].name + more, "reason": rows[0].reason, "advice": rows[0].advice}


def ranks(facts: Facts) -> int:
    """Processes with a GPU each that one server has, over all its machines."""
    copies = 1 if facts.arg("enable_dp_attention") else facts.arg("dp_size", 1)
    return facts.arg("tp_size", 1) * facts.arg("pp_size", 1) * copies


def _several_gpus(facts: Facts) -> Verdict:
    count = ranks(facts)
    ours = on_gpu(facts) and not _hits(facts, REFUSED) and not stands_down(facts)
    return {"count": count} if ours and count > 1 else None


RULES: tuple[Rule, ...] = (
    Rule(
        id="feature-refused",
        title="nothing is asked for that neither class can give",
        severity=FAIL,
        reads=("args", "raw_config", "quantization"),
        condition=_refused,
        message="{name}: {reason}",
        cure="{advice}",
        symptom="The server ends at start with this line.",
        cause="Neither our classes nor SGLang's own give what was asked for.",
        source=("docs/compatibility.md",),
        at_start=False,
    ),
    Rule(
        id="feature-stands-down",
        title="our classes serve with these options",
        severity=WARN,
        reads=("args", "raw_config", "quantization"),
        condition=_down,
        message="SGLang's own class will serve: {name}: {reason}",
        cure="{advice}",
        symptom="`glm53 status` says `serving stock`.",
        cause="The option was not run with our classes, or they do not have it.",
        source=("docs/compatibility.md",),
        at_start=False,
    ),
    Rule(
        id="several-gpus-unmeasured",
        title="our classes serve as many GPUs as they were run on",
        severity=WARN,
        reads=("args", "raw_config", "quantization", "device"),
        condition=_several_gpus,
        message="our classes will serve on {count} GPUs, and were never run on more than one: "
        "several ranks were tested with two processes on a CPU",
        cure="compare answers and speed with SGLang's own class (GLM53_SERVE=stock) before you "
        "rely on it",
        symptom="Nothing that is known of; nobody has looked.",
        cause="This project had one H200. Sums over ranks, expert parallelism and attention groups "
        "ran with two CPU ranks, one rank of an 8-GPU deployment ran alone.",
        source=("docs/compatibility.md", "docs/benchmarks.md"),
    ),
)
