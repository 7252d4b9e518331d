"""Starts a recipe's server in the foreground, and leaves no process behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sglang_glm53 import miniature
from sglang_glm53.checks import machine
from sglang_glm53.commands.demo import tiny_checkpoint
from sglang_glm53.cookbook.command import Command
from sglang_glm53.cookbook.recipe import MINIATURE, Recipe, Server
from sglang_glm53.ending import end_as_by_ctrl_c, end_with_parent
from sglang_glm53.errors import Glm53Error

STOP_WITHIN = 20.0  # seconds that a server has to end by itself


def require_hardware(recipe: Recipe, server: Server) -> None:
    """Refuse a machine that has not what the recipe is for.

    Raises:
        Glm53Error: no GPU, or fewer than a machine of the recipe has.
    """
    needed = server.hardware
    if needed.gpu == "cpu":
        return
    if machine.device() == "cpu":
        raise Glm53Error(
            f"recipe {recipe.name} needs {needed.gpus} x {needed.gpu}, and this machine has no "
            "GPU; print the command with `glm53 recipe show`, or run the recipe laptop"
        )
    there = machine.gpus()
    if there is not None and there < needed.gpus:
        raise Glm53Error(
            f"recipe {recipe.name} needs {needed.gpus} GPUs, and this machine shows {there}; "
            "check CUDA_VISIBLE_DEVICES"
        )


def require_router() -> None:
    """Refuse to start a router that is not there: it is no part of SGLang.

    Raises:
        Glm53Error: sglang-router is not installed.
    """
    if importlib.util.find_spec("sglang_router") is None:
        raise Glm53Error(
            "the router is a package of its own, which is not installed here: "
            "pip install sglang-router"
        )


def checkpoint(recipe: Recipe, model: str | None) -> str:
    """The path or repository to serve: what was asked for, or the recipe's own.

    Raises:
        Glm53Error: the miniature cannot be made.
    """
    if model is not None:
        return str(Path(model).expanduser()) if Path(model).expanduser().is_dir() else model
    if recipe.model != MINIATURE:
        return recipe.model
    return str(miniature.folder() if miniature.shipped() else tiny_checkpoint(fp8=False))


def run(command: Command, program: Sequence[str]) -> int:
    """Run the command until it ends, or until this process is told to end.

    The server is a process group of its own, which is ended as a whole: Ctrl-C in a terminal, and
    SIGTERM or SIGHUP to this process alone, leave nothing behind.

    Returns:
        The server's exit code; 128 and the signal's number where a signal ended it.
    """
    end_as_by_ctrl_c()
    process = subprocess.Popen(
        [*program, *command.argv],
        start_new_session=True,
        preexec_fn=end_with_parent,
        env={**os.environ, **command.environment},
    )
    try:
        code = process.wait()
        return code if code >= 0 else 128 - code
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the group: SIGTERM to the server, after a while SIGKILL to whatever is left."""
    # A second Ctrl-C must not keep the rest from being ended.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_WITHIN)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nobody is left
        process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
