"""Runs a piece of Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

SET_BY_US = ("SGLANG_USE_CPU_ENGINE", "_GLM53_SERVER_PID")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The finished process; `environment` is added to this process's.

    What importing SGLang here has set for its child processes is left out.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in SET_BY_US}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**inherited, **environment},
    )
