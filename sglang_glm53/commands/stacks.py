"""What the processes of a server that does not get on are doing, for its log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DUMP_WITHIN = 30.0  # seconds for one process


def append_stacks(group: int, log: Path) -> bool:
    """Append the Python stacks of a process group's processes to the log.

    py-spy, which SGLang installs, reads them from outside: a process that hangs cannot tell.

    Returns:
        Whether anything was written.
    """
    py_spy = Path(sys.executable).with_name("py-spy")
    if not py_spy.exists():
        return False
    texts = []
    for pid in members(group):
        try:
            told = subprocess.run(
                [str(py_spy), "dump", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=DUMP_WITHIN,
            ).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            told = f"process {pid}: {error}\n".encode()
        texts.append(told)
    try:
        with log.open("ab") as end:
            end.write(b"\n".join([b"", b"What the server's processes are doing (py-spy):", *texts]))
    except OSError:
        return False
    return bool(texts)


def members(group: int) -> list[int]:
    """The process ids of a process group, ascending; none where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) == group:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue  # it has ended meanwhile
    return sorted(found)
