"""Facts for `glm53 doctor`: of this machine or another GPU, a checkpoint, a command line."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_glm53.checks import files, machine, precision
from sglang_glm53.checks.arguments import as_written, with_config
from sglang_glm53.checks.config import field_of_override
from sglang_glm53.checks.facts import Facts
from sglang_glm53.cookbook.devices import CPU, Device, device
from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger import hardware

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """What the doctor is asked.

    Attributes:
        model: a checkpoint's folder, or a repository's name; None: what `argv` names.
        argv: SGLang's arguments as written; None: none were given.
        gpu: a GPU's name (cookbook/devices.py) to judge for; None: this machine.
        count: GPUs of a machine of that kind.
        ask_sglang: whether SGLang's own parser may be asked (10 to 20 s).
        variables: environment variables of the server, on top of this process's.
    """

    model: str | None = None
    argv: tuple[str, ...] | None = None
    gpu: str | None = None
    count: int = 8
    ask_sglang: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)


def gather(question: Question) -> tuple[Facts, list[str]]:
    """The facts, and what was assumed, one line each.

    Raises:
        Glm53Error: the model's folder is not there, a file of it is no JSON, or there is no such
            GPU.
    """
    written = as_written(question.argv or ())
    model = question.model or written.get("model_path")
    folder = find_checkpoint(str(model)) if model is not None else None
    notes: list[str] = []
    assumed: dict[str, Any] = {}
    config = files.read_json(folder, "config.json")
    if model is not None and config is None:
        if folder is not None:
            raise Glm53Error(f"{folder} has no config.json; give a checkpoint's folder")
        config, form = precision.published(str(model))
        form = written.get("quantization", form)
        notes.append(
            f"{model} is not on this machine: GLM-5.3's published config is assumed, its weights "
            + (f"in {form.upper()}" if form else "in no form that is known")
        )
        assumed = {"quantization": form}
    config = overridden(config, written)
    said: dict[str, Any] = {"checkpoint": folder, "raw_config": config, **assumed}
    if question.variables:
        said["environment"] = {**os.environ, **question.variables}
    said["machine_named"] = question.gpu is not None
    if question.gpu is not None:
        if question.count < 1:
            raise Glm53Error(f"--gpus is {question.count}; give 1 or more")
        said |= of_device(device(question.gpu, question.count))
    if question.argv is not None:
        said |= _arguments(question, written, config, notes)
    return Facts(**said), notes


def of_device(kind: Device) -> dict[str, Any]:
    """Facts of a machine with these GPUs, of which only the GPUs are known."""
    name = next((row for row in hardware.available() if device(row).name == kind.name), None)
    gpu = kind.platform != "cpu"
    return {
        "device": kind.platform,
        "capability": kind.capability if kind.platform == "cuda" else None,
        "gpu_name": kind.name if gpu else None,
        "gpus": kind.count if gpu else None,
        "gpu_memory_bytes": kind.memory_bytes if gpu else None,
        "hardware": hardware.load(name) if name else None,
        "driver_cuda": None,
        "host_memory_bytes": None,
    }


def find_checkpoint(model: str) -> Path | None:
    """The folder of a checkpoint: a path, or a repository in Hugging Face's cache; None where a
    repository is not on this machine.

    Raises:
        Glm53Error: a path that is not there.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise Glm53Error(
            f"{model} is no folder; give a checkpoint's folder, or a repository's name"
        )
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # the library's own check of the name
        raise Glm53Error(
            f"{model[:80]!r} is no folder, and no repository's name (OWNER/NAME)"
        ) from None
    return Path(found).parent if isinstance(found, str) else None


def overridden(config: dict[str, Any] | None, written: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json with what --json-model-override-args puts in."""
    override = written.get(field_of_override())
    if config is None or not isinstance(override, dict):
        return config
    return {**config, **override}


def _arguments(
    question: Question,
    written: dict[str, Any],
    config: dict[str, Any] | None,
    notes: list[str],
) -> dict[str, Any]:
    """Facts of the command line: resolved by SGLang where it can be asked, else as written."""
    argv = tuple(question.argv or ())
    said: dict[str, Any] = {"argv": argv, "args": written, "given": frozenset(written)}
    if not question.ask_sglang or config is None:
        notes.append("SGLang's parser was not asked: options count as they are written")
        return said
    from sglang_glm53.cookbook.resolve import resolve

    if question.gpu is None and machine.device() == "rocm":
        notes.append("an AMD GPU: name it for SGLang's own resolution (--gpu mi300x)")
        return said
    kind = device(question.gpu, question.count) if question.gpu else this_machine()
    if kind is CPU and question.gpu is None and written.get("device") != "cpu":
        notes.append("no GPU here: options are resolved for a CPU (--gpu h200 for another machine)")
    try:
        answer = resolve(argv, config, kind, {**os.environ, **question.variables})
    except Glm53Error as error:  # no SGLang, or one that does not run: the rules say more
        notes.append(f"{error}; options count as they are written")
        return said
    if answer.args:  # none where the parser itself refuses
        said |= {"args": answer.args, "given": answer.given}
    return said | {
        "args_problem": answer.problem,
        "flag_names": answer.flag_names,
        "variables": answer.variables,
    }


def this_machine() -> Device:
    """This machine's GPUs, or the CPU."""
    count, name, capability = machine.gpus(), machine.gpu_name(), machine.capability()
    if not count or name is None or capability is None:
        return CPU
    return Device(name, capability, machine.gpu_memory_bytes() or 0, count=count)


def pasted(rest: Sequence[str]) -> tuple[tuple[str, ...] | None, dict[str, str]]:
    """A server's command line after `--`, as one would paste it, in one word (quoted) too.

    Returns:
        SGLang's arguments, None where there are none; and the variables set before the program
        (`SGLANG_X=1 sglang serve ...`). What `--config FILE` holds stands before the others.

    Raises:
        Glm53Error: a quote that does not end, or a file of `--config` that cannot be read.
    """
    words = list(rest)
    if words[:1] == ["--"]:
        words = words[1:]
    if len(words) == 1 and " " in words[0]:
        try:
            words = shlex.split(words[0])
        except ValueError as error:
            raise Glm53Error(f"the command line after `--`: {error}; check its quotes") from None
    variables = {}
    while words and (words[0] == "env" or _ASSIGNMENT.match(words[0])):
        if found := _ASSIGNMENT.match(words[0]):
            variables[found[1]] = found[2]
        words = words[1:]
    words = words[_program(words) :]
    if words and not words[0].startswith("-"):  # `sglang serve MODEL`
        words = ["--model-path", *words]
    return tuple(with_config(words)) or None, variables


def _program(words: Sequence[str]) -> int:
    """How many words at the beginning are the program."""
    name = Path(words[0]).name if words else ""
    if name == "sglang" and words[1:2] == ["serve"]:
        return 2
    if re.fullmatch(r"python[\d.]*", name):
        if words[1:3] == ["-m", "sglang.launch_server"]:
            return 3
        return 2 if words[1:2] and Path(words[1]).name == "launch_server.py" else 0
    return int(name == "serve")
