"""The same rules inside a server that starts: before a worker is started or a weight is read.

A failure ends the process with its line; warnings are logged, once for the whole server.
GLM53_DOCTOR=warn logs failures too and lets the server start; GLM53_DOCTOR=off asks nothing.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_glm53.checks import engine, files
from sglang_glm53.checks.arguments import as_written
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.gather import overridden
from sglang_glm53.checks.rule import FAIL, WARN
from sglang_glm53.checks.rules import AT_START
from sglang_glm53.errors import Glm53Error

VARIABLE = "GLM53_DOCTOR"
PROGRAMS = ("sglang", "launch_server.py")

logger = logging.getLogger(__name__)
_told = False


def wish() -> str:
    """The value of GLM53_DOCTOR: "", "warn" or "off".

    Raises:
        Glm53Error: it has a value that means nothing.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "warn", "off"):
        raise Glm53Error(f'{VARIABLE} is "{value}"; it can be "warn" or "off"')
    return value


def check(args: Any, hf_config: Any, model_path: str) -> None:
    """Hold the rules against a server's arguments.

    Args:
        args: resolved arguments, as attributes.
        hf_config: the checkpoint's config, as SGLang loaded it.
        model_path: where SGLang found it; a folder, mostly.

    Raises:
        Glm53Error: a rule failed, or GLM53_DOCTOR means nothing.
    """
    global _told
    lenient = wish()
    if lenient == "off" or _told or multiprocessing.parent_process() is not None:
        return  # workers resolve the same arguments again
    _told = True
    results = engine.judge(AT_START, facts_of(args, hf_config, model_path))
    for result in results:
        if result.message.startswith(engine.NOT_JUDGED):
            logger.warning("sglang-glm53 doctor: %s", result.message)
        if result.status == WARN or (result.status == FAIL and lenient == "warn"):
            logger.warning(
                "sglang-glm53 doctor: %s; %s [%s]", result.message, result.cure, result.rule.id
            )
    if lenient != "warn":
        engine.raise_first(results)


def facts_of(args: Any, hf_config: Any, model_path: str) -> Facts:
    """Facts of this process's server."""
    folder = Path(model_path) if Path(model_path).is_dir() else None
    argv = command_line(sys.argv)
    written = as_written(argv) if argv is not None else {}
    config = overridden(files.read_json(folder, "config.json"), written)
    return Facts(
        args=args,
        argv=argv,
        given=None if argv is None else frozenset(written),
        checkpoint=folder,
        raw_config=config if config is not None else hf_config.to_dict(),
    )


def command_line(argv: Sequence[str]) -> tuple[str, ...] | None:
    """SGLang's arguments in a process's command line; None where the server is started from a
    program of its own."""
    if not argv or Path(argv[0]).name not in PROGRAMS:
        return None
    return tuple(argv[1:])
