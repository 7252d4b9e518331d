"""Rules on the command line: what SGLang refuses, no longer has, or replaces without an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from textwrap import shorten
from typing import Any

from sglang_glm53.checks.arguments import as_written, field_of, options
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.reading import mtp
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict
from sglang_glm53.compat.flags import DEPRECATED, GONE, RENAMED, Renamed

# Fields whose replacement is only another spelling, or is told by a rule of its own.
TOLD_ELSEWHERE = frozenset(
    {
        *("model_path", "tokenizer_path", "speculative_algorithm", "dp_size", "page_size"),
        *("enable_dp_attention", "chunked_prefill_size", "speculative_num_draft_tokens"),
        *("enable_mixed_chunk", "tool_call_parser", "reasoning_parser", "log_level"),
        *("enable_flashinfer_allreduce_fusion", "max_running_requests"),
    }
)
LONGEST = 300  # characters of SGLang's line
SPELLINGS = {"bf16": "bfloat16", "fp16": "half"}


def _refused(facts: Facts) -> Verdict:
    line = shorten(facts.args_problem, LONGEST, placeholder=" ...")  # argparse lists all choices
    return {"line": line} if facts.args_problem else None


def _candidates(option: str, known: frozenset[str]) -> list[str]:
    """Options that an abbreviation stands for, as argparse reads it."""
    return sorted(name for name in known if name.startswith(option))


def _gone(facts: Facts) -> Verdict:
    for option, _ in options(facts.argv):
        if option in facts.flag_names:
            continue
        renamed = _renamed(option, GONE)
        if renamed is not None:
            return {"what": f"{option} is gone ({renamed.note})", "do": f"use {_new(renamed)}"}
        found = _candidates(option, facts.flag_names)
        if len(found) == 1:
            continue
        if found:
            return {"what": f"{option} may be any of {', '.join(found[:3])}", "do": "write one out"}
        near = get_close_matches(option, facts.flag_names, 1, cutoff=0.7)
        do = f"{near[0]} is nearest" if near else "leave it out"
        return {"what": f"{option} is no option of the installed SGLang", "do": do}
    return None


def _deprecated(facts: Facts) -> Verdict:
    given = {option.removeprefix("--"): values for option, values in options(facts.argv)}
    if "dp" in given:  # how most published commands write --dp-size
        given.setdefault("dp-size", given["dp"])
    for row in RENAMED:
        if row.state == DEPRECATED and given.keys() >= set(row.old):
            old = " ".join(f"--{name}" for name in row.old)
            return {"option": old, "instead": _instead(row, given), "note": row.note}
    return None


def _renamed(option: str, state: str) -> Renamed | None:
    """The row of an option that SGLang has given another name."""
    name = option.removeprefix("--")
    return next((row for row in RENAMED if row.state == state and row.old == (name,)), None)


def _new(row: Renamed) -> str:
    return " ".join(f"--{name}" for name in row.new)


def _instead(row: Renamed, given: Mapping[str, Sequence[str]]) -> str:
    """The new options with the values that the old ones have, as one would type them."""
    values = {name: " ".join(given[name]) or True for name in row.old}
    try:
        return " ".join(
            f"--{name}" if value is True else f"--{name} {value}"
            for name, value in row.to_new(values).items()
        )
    except (KeyError, ValueError):  # a value that the old option did not have either
        return _new(row)


def _same(wrote: Any, has: Any) -> bool:
    if isinstance(wrote, str) and isinstance(has, str):
        return SPELLINGS.get(wrote, wrote).lower() == SPELLINGS.get(has, has).lower()
    return wrote == has


def _replaced(facts: Facts) -> Verdict:
    """Plain values that resolution changed; "auto" and lists are meant to be resolved."""
    changed = []
    for name, wrote in as_written(facts.argv).items():
        has = getattr(facts.args, name, None)
        if name in TOLD_ELSEWHERE or wrote == "auto" or not isinstance(wrote, int | float | str):
            continue
        if not isinstance(has, int | float | str) or type(wrote) is not type(has):
            continue
        if not _same(wrote, has):
            changed.append(f"--{name.replace('_', '-')} {wrote} became {has}")
    return {"changed": ", ".join(changed)} if changed else None


def _draft_path(facts: Facts) -> Verdict:
    path = as_written(facts.argv).get(field_of("--speculative-draft-model-path"))
    return {"path": path} if path and mtp(facts) else None


RULES: tuple[Rule, ...] = (
    Rule(
        id="flags-unknown",
        title="SGLang has every option that is given",
        severity=FAIL,
        reads=("argv", "flag_names"),
        condition=_gone,
        message="{what}",
        cure="{do}; `glm53 recipe show` prints commands for the installed SGLang",
        symptom="`unrecognized arguments`, or `ambiguous option`; the server does not start.",
        cause="Options were renamed, and published commands were not: --cuda-graph-max-bs became "
        "two, --enable-dsa-prefill-context-parallel is --enable-prefill-cp.",
        source=("SGLang's GLM-5.2 and GLM-5.3 cookbooks, held against its parser",),
        at_start=False,
    ),
    Rule(
        id="flags-refused",
        title="SGLang takes the options together",
        severity=FAIL,
        reads=("args_problem",),
        condition=_refused,
        message="SGLang refuses the command: {line}",
        cure="change that option",
        symptom="The same error at start, below a traceback.",
        cause="SGLang's own checks of its arguments.",
        source=("SGLang's own parser and resolution, run for the doctor",),
        at_start=False,
    ),
    Rule(
        id="flags-deprecated",
        title="no option is on its way out",
        severity=WARN,
        reads=("argv",),
        condition=_deprecated,
        message="{option} is deprecated: {note}",
        cure="use {instead}",
        symptom="A warning today; after an upgrade the command no longer starts (attention groups "
        "by --enable-dp-attention: after 2026-12-31).",
        cause="SGLang renamed it.",
        source=("SGLang's argument parser",),
        at_start=False,
    ),
    Rule(
        id="flags-replaced",
        title="every value is the one that was given",
        severity=WARN,
        reads=("argv", "args", "given"),
        condition=_replaced,
        message="SGLang replaces what you gave: {changed}",
        cure="leave those options out, or change what forces them (the server's log names it)",
        symptom="A WARNING line among hundreds; the server runs with another value.",
        cause="Options that exclude each other are settled by SGLang's rules.",
        source=("SGLang's deepseek_v2.py, moe_hook.py and hicache_hook.py",),
        at_start=False,
    ),
    Rule(
        id="mtp-draft-path",
        title="no draft checkpoint is named",
        severity=WARN,
        reads=("argv", "args"),
        condition=_draft_path,
        message="--speculative-draft-model-path {path} is not needed: the MTP layer is in the "
        "checkpoint",
        cure="leave it out",
        symptom="A warning; with another path, a draft that does not fit.",
        cause="SGLang takes the target's own path for this model.",
        source=("SGLang's speculative_hook.py",),
        at_start=False,
    ),
)
