"""How this package fails: one line (what, where, what to do) and exit code 1.

SGLang logs and swallows whatever a plugin raises, and would then serve its own class under the
same name. A `SystemExit` is no `Exception`, so it passes through those handlers.
Standard library only: this module must import when everything else is broken.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

PREFIX = "sglang-glm53: "

# Exit code of a child process of the server that printed its line: its parent then ends with code 1
# and prints nothing more.
TOLD = 53
FIRST_RANK_SECONDS = 10.0
_PARENT = "_GLM53_SERVER_PID"
_PACKAGE = Path(__file__).resolve().parent

# What went wrong where GLM53_ON_ERROR=stock let the process go on; None: nothing did.
_degraded: str | None = None


class Glm53Error(Exception):
    """A failure that the user can act on; the message is one line: what, where, what to do."""


def describe(error: BaseException) -> str:
    """One line for any exception: our own message, or type, text and our innermost frame."""
    text = " ".join(str(error).split())
    if isinstance(error, Glm53Error):
        return text
    place = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_PACKAGE) and path.name not in ("plugin.py", "host.py"):
            place = f" at {path.relative_to(_PACKAGE.parent)}:{frame.lineno}"
            break
    return f"{type(error).__name__}: {text}{place}"


def announce_process() -> None:
    """Let child processes that are started from here know that their parent reads TOLD."""
    _exit_code()  # remembers what the parent announced
    os.environ[_PARENT] = str(os.getpid())


def _exit_code() -> int:
    global _code
    if _code is None:
        child = multiprocessing.parent_process() is not None
        _code = TOLD if child and os.environ.get(_PARENT) == str(os.getppid()) else 1
    return _code


_code: int | None = None


def fatal(message: str) -> NoReturn:
    """Print `sglang-glm53: <message>` to stderr and end the process with exit code 1.

    What stops one rank of a parallel group mostly stops all of them: the others wait for the first
    rank's line, whose end stops the server, and speak only if it had nothing to say.
    """
    if _exit_code() == TOLD and _follows_another_rank():
        time.sleep(FIRST_RANK_SECONDS)
    _tell(" ".join(message.split()))
    if os.environ.get("GLM53_DEBUG") == "1" and sys.exc_info()[0] is not None:
        traceback.print_exc()
    sys.stderr.flush()
    if threading.current_thread() is not threading.main_thread():
        os._exit(_exit_code())  # SystemExit would end this thread alone: the server would hang
    raise SystemExit(_exit_code())


def _tell(line: str) -> None:
    """Print our line, on a line of its own: SGLang may have a progress bar open, which has no end
    of line."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    end_of_bar = "\n" if len(getattr(tqdm, "_instances", ())) else ""
    sys.stderr.write(f"{end_of_bar}{PREFIX}{line}\n")


def _follows_another_rank() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_rank() > 0
    )


def failed(error: BaseException, *, doing: str) -> None:
    """End the process for `error`, or, with GLM53_ON_ERROR=stock, print the line and go on.

    Args:
        error: what was caught.
        doing: what was being done; the line needs it where the error is none of ours.
    """
    global _degraded
    line = describe(error)
    if not isinstance(error, Glm53Error):
        line = (
            f"{doing}: {line}; reinstall sglang-glm53 or report this "
            f"(GLM53_DEBUG=1 shows the traceback)"
        )
    if not serve_stock_on_error():
        fatal(line)
    if _degraded is None:
        sys.stderr.write(f"{PREFIX}{line}; GLM53_ON_ERROR=stock: SGLang's own class serves\n")
        sys.stderr.flush()
        _degraded = line


def serve_stock_on_error() -> bool:
    """Whether the user asked for SGLang's own class where ours fails (GLM53_ON_ERROR=stock)."""
    return os.environ.get("GLM53_ON_ERROR", "") == "stock"


def degraded() -> str | None:
    """The failure after which this process serves SGLang's own class, or None."""
    return _degraded
