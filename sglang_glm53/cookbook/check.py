"""Holds recipes against SGLang's own parser and resolution, the rules, and what is told of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from sglang_glm53.checks.facts import Facts
from sglang_glm53.cookbook import expect, resolved, show
from sglang_glm53.cookbook.command import argv_of, server_commands
from sglang_glm53.cookbook.devices import Device, device
from sglang_glm53.cookbook.models import config_of
from sglang_glm53.cookbook.recipe import Recipe, Server, common_accepts
from sglang_glm53.cookbook.resolve import Job, Resolution, resolve_all
from sglang_glm53.ledger import hardware

OK, WARN, FAIL = "ok", "warn", "fail"
# Which class serves is a field of its own, of `show` and of the documentation.
TOLD_ELSEWHERE = "feature-stands-down"
# Addresses for placeholders: SGLang wants to see one, and contacts nobody while it resolves.
_ADDRESSES = {"NODE0": "127.0.0.1"}
# A reason of --max-running-requests that is held against the ledger.
CLAIM = re.compile(r"about (what|as many as) (the|its) cache holds at 8K in and 1K out")
CLAIM_WITHIN = 0.1
# Lived with by every recipe that names no length of its own; a length that is named has to fit.
_LENGTH = "memory-long-context"


@dataclass(frozen=True)
class Case:
    """One server of a recipe, with the options that are switched on."""

    recipe: Recipe
    server: Server
    options: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        several = len(self.recipe.servers) > 1
        name = f"{self.recipe.name} ({self.server.role})" if several else self.recipe.name
        return name + "".join(f" +{option}" for option in self.options)

    def device(self) -> Device:
        return device(self.server.hardware.gpu, self.server.hardware.gpus)


@dataclass(frozen=True)
class Finding:
    """What became of one case.

    Attributes:
        lines: what is wrong, and what to do.
        notes: packages that the recipe needs and that are not installed here.
        says: which class serves and what fits, where nothing is told of the recipe yet.
    """

    case: Case
    version: str
    status: str
    lines: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    resolution: Resolution | None = field(default=None, compare=False)


def cases(recipes: Iterable[Recipe], *, options: bool = True) -> list[Case]:
    """Every server of every recipe; with `options`, once more for each option."""
    found = []
    for recipe in recipes:
        chosen: list[tuple[str, ...]] = [()]
        if options:
            chosen += [(name,) for name in recipe.options]
        for names in chosen:
            changed = recipe.with_options(names)
            found += [Case(changed, server, names) for server in changed.servers]
    return found


def check(found: Sequence[Case], version: str, sglang: Path | None = None) -> list[Finding]:
    """Hold cases against a version of SGLang.

    Args:
        version: of the SGLang that is asked: the installed one's, or that of the wheel.
        sglang: a folder with an unpacked wheel; default: the installed SGLang.
    """
    wanted = [case for case in found if version in case.recipe.sglang]
    answers = resolve_all([job(case, version) for case in wanted], sglang=sglang)
    return [_finding(case, version, each) for case, each in zip(wanted, answers, strict=True)]


def job(case: Case, version: str) -> Job:
    """The command line of the case's first machine, to be resolved on its hardware."""
    one = replace(case.recipe, servers=(case.server,))
    command = server_commands(one, version, addresses=_ADDRESSES)[0]
    return Job(command.argv, config_of(case.recipe), case.device(), command.environment)


def _finding(case: Case, version: str, resolution: Resolution) -> Finding:
    lines = [f"SGLang {version} refuses it: {resolution.problem}"] if resolution.problem else []
    for name in case.server.environment:
        if name.startswith("SGLANG_") and name not in resolution.variables:
            lines.append(f"{name} is no variable of SGLang {version}; it would do nothing")
    if resolution.problem:
        return Finding(case, version, FAIL, tuple(lines), resolution=resolution)
    warnings = []
    for status, line in _rules(case, version, resolution):
        (lines if status == FAIL else warnings).append(line)
    if not case.options:
        lines += _stale(case, version, resolution) + _claims(case, resolution)
    status = FAIL if lines else WARN if warnings else OK
    return Finding(
        case,
        version,
        status,
        (*lines, *warnings),
        _says(case, version, resolution),
        _missing(case.recipe),
        resolution,
    )


def _claims(case: Case, resolution: Resolution) -> list[str]:
    """Whether --max-running-requests is what the cache holds, where its reason says so."""
    if not CLAIM.search(case.recipe.why.get("max-running-requests", "")):
        return []
    found = expect.expected(case.recipe, case.server, resolved.of(resolution).args)
    if isinstance(found, str):
        return []
    asked, fits = resolution.args["max_running_requests"], found.fits[expect.CONTEXTS[0]]
    if abs(asked - fits) <= CLAIM_WITHIN * fits:
        return []
    return [
        f"--max-running-requests {asked} is said to be about what the cache holds, and "
        f"{fits} requests of {expect.CONTEXTS[0]:,} tokens fit; change it or its reason"
    ]


def _missing(recipe: Recipe) -> tuple[str, ...]:
    """Packages of `needs` that this environment lacks: no fault of the recipe."""
    return tuple(
        f"needs {package}, which is not installed here: {why}"
        for package, why in recipe.needs.items()
        if not _installed(package)
    )


def _installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _says(case: Case, version: str, resolution: Resolution) -> tuple[str, ...]:
    if resolved.find(case.recipe, case.server.role, version) is not None:
        return ()  # `show` and the documentation tell it
    now = resolved.of(resolution)
    found = expect.expected(case.recipe, case.server, now.args)
    return (f"serves: {show.serves_as(now)}", *show.memory_lines(found))


def _stale(case: Case, version: str, resolution: Resolution) -> list[str]:
    """Whether what is told of the recipe is still what SGLang makes of it."""
    told = resolved.find(case.recipe, case.server.role, version)
    if told is None:
        return []  # a recipe of the user's own
    now = resolved.of(resolution)
    changed = [f"{k}={v!r}, not {told.args.get(k)!r}" for k, v in now.args.items()
               if told.args.get(k) != v]  # fmt: skip
    if now.rows != told.rows:
        changed.append(f"features {now.rows}, not {told.rows}")
    if not changed:
        return []
    cure = "python -m sglang_glm53.cookbook.docs --resolve writes what is told of recipes anew"
    return [f"SGLang resolves another {'; '.join(changed)}: {cure}"]


def _rules(case: Case, version: str, resolution: Resolution) -> list[tuple[str, str]]:
    """Verdicts of the doctor's rules on the recipe's arguments: status and line."""
    from sglang_glm53.checks.engine import run
    from sglang_glm53.checks.rules import RULES

    accepted = dict(case.recipe.accepts)
    for name, why in common_accepts().items():
        if name != _LENGTH or "context_length" not in resolution.given:
            accepted.setdefault(name, why)
    facts = facts_of(case, version, resolution)
    results = run(RULES, facts)
    return [
        (result.status, f"{result.message}; {result.cure} [{result.rule.id}]")
        for result in results
        if result.status in (WARN, FAIL)
        and result.rule.id not in accepted
        and result.rule.id != TOLD_ELSEWHERE
    ]


def facts_of(case: Case, version: str, resolution: Resolution) -> Facts:
    """What is known of a recipe's server: its arguments, model and hardware; not this machine."""
    gpu = case.server.hardware.gpu
    known: Mapping[str, object] = {
        "argv": tuple(argv_of(case.server.arguments, version)),
        "args": resolution.args,
        "given": resolution.given,
        "args_problem": resolution.problem,
        "flag_names": resolution.flag_names,
        "raw_config": config_of(case.recipe),
        "environment": dict(case.server.environment),
        "device": case.device().platform,
    }
    if gpu != "cpu":
        known = {
            **known,
            "hardware": hardware.load(gpu),
            "gpus": case.server.hardware.gpus,
            "gpu_memory_bytes": case.device().memory_bytes,
        }
        if case.device().platform == "cuda":
            known = {**known, "capability": case.device().capability}
    return Facts.only(**known)
