"""How a command ends, and with it the processes and folders that it made."""

from __future__ import annotations

import contextlib
import ctypes
import signal


def end_as_by_ctrl_c() -> None:
    """Let SIGTERM and SIGHUP take the way of Ctrl-C, so that what is cleared up then is now too.

    The exit code becomes 128 and the signal's number.
    """
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _leave)


def _leave(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def end_with_parent() -> None:
    """Runs in a child before its program: have Linux send it SIGTERM when the process that made it
    ends, even by SIGKILL."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
