"""The process that runs SGLang's parser and resolution: resolve_child.py QUESTION ANSWER.

QUESTION is JSON: `jobs` (each with argv, config, device, environment; one platform), `sglang` (the
folder of an unpacked wheel, or null). Each job runs in a fork, so that none sees what another one
set in the environment, in SGLang's modules or in its caches.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

from sglang_glm53.cookbook.devices import Device

LONGEST = 300  # characters of SGLang's message; some print a whole config


class _Refused(Exception):
    """SGLang's parser does not take the command line."""


class _Lines(logging.Handler):
    """Keeps what is logged, a line each."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        if line not in self.lines:
            self.lines.append(line)


def main(argv: list[str]) -> int:
    question = json.loads(Path(argv[0]).read_text())
    if question["sglang"] is not None:
        sys.path.insert(0, question["sglang"])
    jobs = question["jobs"]
    first = _device(jobs[0]["device"] if jobs else question["device"])
    if first.platform != "cpu":
        from sglang_glm53.compat import pretend

        pretend.before_import(first)
    import sglang
    from sglang.srt.server_args import ServerArgs

    importlib.import_module("sglang.srt.arg_groups.pipeline")  # once, not in every fork
    parser = _parser(ServerArgs)
    answer = {
        "version": str(sglang.__version__).split("+")[0],
        "flag_names": sorted({name for a in parser._actions for name in a.option_strings}),
        "variables": _variables(),
        "results": [_forked(job) for job in jobs],
    }
    Path(argv[1]).write_text(json.dumps(answer))
    return 0


def _device(fields: dict[str, Any]) -> Device:
    return Device(**{**fields, "capability": tuple(fields["capability"])})


def _variables() -> list[str]:
    """Names of the variables that SGLang declares."""
    from sglang.srt import environ

    return sorted(name for name in dir(type(environ.envs)) if name.isupper())


def _parser(server_args: Any) -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise _Refused(message)

    parser = Parser(prog="sglang serve")
    server_args.add_cli_args(parser)
    return parser


def _forked(job: dict[str, Any]) -> dict[str, Any]:
    """`_resolve` in a child of this process."""
    with tempfile.NamedTemporaryFile("r", prefix="glm53-job-") as file:
        child = os.fork()
        if child == 0:
            try:
                Path(file.name).write_text(json.dumps(_resolve(job), default=str))
                code = 0
            except BaseException:
                traceback.print_exc()
                code = 1
            os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit("resolving " + " ".join(job["argv"]) + f": status {status}")
        return json.load(file)


def _resolve(job: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.server_args import ServerArgs

    device = _device(job["device"])
    os.environ.update(job["environment"])
    if device.platform == "cpu":
        from sglang.srt.plugins import load_plugins

        load_plugins()  # without a GPU, SGLang resolves as this package has it do
    else:
        from sglang_glm53.compat import pretend

        pretend.before_import(device)
        pretend.after_import(device)
    log = _Lines()
    logging.basicConfig(level=logging.INFO, handlers=[log], force=True)
    result: dict[str, Any] = {"args": {}, "given": [], "rows": {}, "problem": ""}
    with tempfile.TemporaryDirectory(prefix="glm53-model-") as folder:
        _write_model(Path(folder), job["config"])
        try:
            args, result["given"] = _parse(ServerArgs, job["argv"], folder)
            result["args"] = {name: getattr(args, name, None) for name in _fields(args)}
            args.resolve_once()
            result["rows"] = _rows(args)
            result["args"] = args.resolved_dict()
        except _Refused as refused:
            result["problem"] = " ".join(str(refused).split())
        except BaseException as error:  # SGLang raises whatever it likes; SystemExit too
            result["problem"] = _line(error)
        path = _after(job["argv"], "--model-path")
        result["args"] = {
            name: path if value == folder else value for name, value in result["args"].items()
        }
    return {**result, "log": log.lines}


def _parse(server_args: Any, argv: list[str], folder: str) -> tuple[Any, list[str]]:
    """SGLang's record of the arguments, with the model at `folder`; the fields that they set."""
    raw = _parser(server_args).parse_args([*argv, "--model-path", folder])
    silent = _parser(server_args)
    for action in silent._actions:
        action.default = argparse.SUPPRESS
    given = set(vars(silent.parse_args(argv or ["--model-path", folder])))
    return server_args.from_cli_args(raw), sorted(given)


def _fields(args: Any) -> list[str]:
    import msgspec

    return [field.name for field in msgspec.structs.fields(type(args))]


def _rows(args: Any) -> dict[str, list[str]]:
    """Names of the rows of features.py that the arguments ask for, by decision."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import model_config_of

    from sglang_glm53 import support
    from sglang_glm53.features import FEATURES

    model_config = model_config_of(args)
    if not support.is_ours(model_config.hf_config):
        return {}
    view = resolving_view(args)
    situation = support.situation_from(lambda name: getattr(view, name, None), model_config)
    rows: dict[str, list[str]] = {}
    for row in FEATURES:
        if row.asked(situation):
            rows.setdefault(row.decision, []).append(row.name)
    return rows


def _write_model(folder: Path, config: dict[str, Any]) -> None:
    """A model's folder without weights: what SGLang reads while it resolves."""
    (folder / "config.json").write_text(json.dumps(config))


def _after(argv: list[str], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv[:-1] else None


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # nothing of SGLang's keeps this process from ending
