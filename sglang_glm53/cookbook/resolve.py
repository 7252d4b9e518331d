"""SGLang's arguments, resolved by SGLang's own code as on a machine that need not be this one.

The parser and the resolution of the installed SGLang, or of a wheel that was unpacked into a
folder, run in a process of their own (resolve_child.py): one process for all jobs of a platform,
since importing SGLang is most of the time (10 to 20 s). No weight is read and no GPU is touched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_glm53.cookbook.devices import Device
from sglang_glm53.errors import Glm53Error

TIMEOUT = 600.0  # seconds for all jobs of a platform


@dataclass(frozen=True)
class Job:
    """One command line to resolve.

    Attributes:
        argv: SGLang's arguments, without the program.
        config: the content of the model's config.json; `--model-path` in argv is not looked at.
        device: the GPU to resolve for.
        environment: variables that the command sets.
    """

    argv: Sequence[str]
    config: Mapping[str, Any]
    device: Device
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolution:
    """What SGLang made of a command line.

    Attributes:
        args: resolved ServerArgs fields; as they were written where `problem` is not "".
        given: names of the fields that the command line sets.
        problem: the line with which SGLang refused, "" where it did not.
        flag_names: every option of the parser, as "--page-size".
        variables: every variable that SGLang declares, as "SGLANG_JIT_DEEPGEMM_PRECOMPILE".
        rows: names of this package's feature rows (features.py) that are asked for, by decision.
        log: what SGLang logged while it resolved, a line each.
        version: SGLang's.
    """

    args: dict[str, Any]
    given: frozenset[str]
    problem: str
    flag_names: frozenset[str]
    variables: frozenset[str]
    rows: dict[str, tuple[str, ...]]
    log: tuple[str, ...]
    version: str


def resolve(
    argv: Sequence[str],
    config: Mapping[str, Any],
    device: Device,
    environment: Mapping[str, str] | None = None,
    *,
    sglang: Path | None = None,
) -> Resolution:
    """Resolve one command line; see `Job` and `resolve_all`."""
    return resolve_all([Job(argv, config, device, environment or {})], sglang=sglang)[0]


def resolve_all(jobs: Sequence[Job], *, sglang: Path | None = None) -> list[Resolution]:
    """Resolve command lines.

    Args:
        sglang: a folder that a wheel of SGLang was unpacked into; default: the installed one.

    Returns:
        One resolution a job, in order.

    Raises:
        Glm53Error: SGLang is not there, or its process died.
    """
    found: dict[int, Resolution] = {}
    for platform in sorted({job.device.platform for job in jobs}):
        chosen = [i for i, job in enumerate(jobs) if job.device.platform == platform]
        for index, result in zip(chosen, _run([jobs[i] for i in chosen], sglang), strict=True):
            found[index] = result
    return [found[index] for index in range(len(jobs))]


def flag_names(sglang: Path | None = None) -> frozenset[str]:
    """Every option of SGLang's parser, as "--page-size"."""
    from sglang_glm53.cookbook.devices import device

    question = {"jobs": [], "device": asdict(device("h200"))}
    return frozenset(_ask(question, sglang, "cuda")["flag_names"])


def _run(jobs: Sequence[Job], sglang: Path | None) -> Iterable[Resolution]:
    question = {"jobs": [asdict(replace(job, environment=_clean(job.environment))) for job in jobs]}
    answer = _ask(question, sglang, jobs[0].device.platform)
    flags, variables = frozenset(answer["flag_names"]), frozenset(answer["variables"])
    for result in answer["results"]:
        yield Resolution(
            args=result["args"],
            given=frozenset(result["given"]),
            problem=result["problem"],
            flag_names=flags,
            variables=variables,
            rows={decision: tuple(names) for decision, names in result["rows"].items()},
            log=tuple(result["log"]),
            version=answer["version"],
        )


def _ask(question: dict[str, Any], sglang: Path | None, platform: str) -> dict[str, Any]:
    """Run the child with a JSON question and return its JSON answer."""
    if sglang is not None and not (sglang / "sglang" / "srt" / "server_args.py").is_file():
        raise Glm53Error(
            f"{sglang} holds no SGLang; unpack a wheel there: pip download --no-deps "
            "sglang==VERSION, then python -m zipfile -e WHEEL FOLDER"
        )
    question["sglang"] = None if sglang is None else str(sglang.resolve())
    with tempfile.TemporaryDirectory(prefix="glm53-resolve-") as scratch:
        asked, answered = Path(scratch) / "question.json", Path(scratch) / "answer.json"
        asked.write_text(json.dumps(question))
        command = [sys.executable, "-W", "ignore", "-m", "sglang_glm53.cookbook.resolve_child"]
        try:
            process = subprocess.run(
                [*command, str(asked), str(answered)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                env=_environment(platform),
            )
        except subprocess.TimeoutExpired:
            raise Glm53Error(
                f"SGLang's parser did not answer within {TIMEOUT:.0f} s; try again on a machine "
                "that is less busy"
            ) from None
        if process.returncode or not answered.is_file():
            lines = [line for line in process.stderr.splitlines() if line.strip()]
            why = lines[-1].strip() if lines else f"exit code {process.returncode}"
            raise Glm53Error(f"SGLang's parser could not be asked: {why}")
        return json.loads(answered.read_text())


def _environment(platform: str) -> dict[str, str]:
    """This process's, for the device that is asked about."""
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**_clean(os.environ), **(cpu if platform == "cpu" else {})}


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what a server on this machine has, or is given by this package."""
    ours = ("SGLANG_USE_CPU_ENGINE", "_GLM53_SERVER_PID")
    return {name: value for name, value in environment.items() if name not in ours}
