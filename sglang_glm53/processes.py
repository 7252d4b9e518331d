"""Ending a server whose child process has printed its line: no traceback after it, exit code 1.

SGLang answers any exception of a child with that child's traceback, a signal to the parent and the
parent's own traceback. For a failure of ours the line is all that the user needs.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from sglang_glm53 import catalog
from sglang_glm53.errors import TOLD, Glm53Error, describe, fatal

# SGLang's first process looks at its children every 5 s while it waits for them.
FIRST_PROCESS_SECONDS = 12.0


def watch() -> None:
    """Set the changes (rows of the catalog)."""
    catalog.wrap("sglang.srt.managers.scheduler:Scheduler.__init__", _scheduler)
    catalog.wrap("sglang.srt.entrypoints.engine:_wait_for_scheduler_ready", _wait)
    catalog.wrap(
        "sglang.srt.managers.data_parallel_controller:DataParallelController.__init__", _controller
    )


def _scheduler(original: Callable[..., None]) -> Callable[..., None]:
    """In the process that builds the model: our errors end it with their line."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except Glm53Error as error:
            fatal(describe(error))

    return __init__


def _wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the first process, which waits for the schedulers."""

    def _wait_for_scheduler_ready(scheduler_pipe_readers: Any, scheduler_procs: Any) -> Any:
        try:
            return original(scheduler_pipe_readers, scheduler_procs)
        except RuntimeError:
            _end_if_told(scheduler_procs, code=1)
            raise

    return _wait_for_scheduler_ready


def _controller(original: Callable[..., None]) -> Callable[..., None]:
    """In the process between them that data parallelism adds."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except EOFError:  # a scheduler ended before it was ready
            own = getattr(self, "scheduler_procs", ())
            _end_if_told(own, code=TOLD)
            if not own:  # the first process owns the schedulers, and sees which one told
                time.sleep(FIRST_PROCESS_SECONDS)
            raise

    return __init__


def _end_if_told(processes: Iterable[Any], *, code: int) -> None:
    for process in processes:
        if process is not None:
            process.join(timeout=1)
            if process.exitcode == TOLD:
                # Registered last, so run first at exit, after SGLang has ended its processes.
                atexit.register(_leave, code)
                raise SystemExit(code)


def _leave(code: int) -> None:
    """End this process at once: closing its ZeroMQ sockets can wait for a dead child for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
