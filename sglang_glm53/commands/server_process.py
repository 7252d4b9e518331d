"""A real `sglang serve` in a process group of its own: started, watched, stopped whole."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sglang_glm53.commands.stacks import append_stacks
from sglang_glm53.ending import end_with_parent
from sglang_glm53.errors import PREFIX, Glm53Error

REPORT_EVERY = 3.0  # seconds between two lines of progress, three times that if nothing is new
STOP_WITHIN = 20.0  # seconds a server has to end by itself

# What a line of SGLang's log says about the start, for those who do not know the log. The last
# line that one of these marks matches is shown.
PHASES = (
    ("server_args=", "reading arguments"),
    ("Auto-detected template", "starting the scheduler process, which imports the model"),
    ("Load weight begin", "loading the weights"),
    ("Load weight end", "done with the weights"),
    ("KV Cache is allocated", "allocating the KV cache"),
    ("Memory pool end", "allocating the KV cache"),
    ("max_total_num_tokens", "starting the HTTP server"),
    ("Started server process", "starting the HTTP server"),
    ("Application startup complete", "warming up with a first request"),
    ("The server is fired up", "ready to answer"),
)
# Lines that say best themselves what goes on: shards, graphs, kernels being compiled.
PROGRESS = re.compile(r"\d+%|Captur|[Cc]ompil|[Dd]ownload|[Ww]arm")


def free_port(host: str, wanted: int | None) -> int:
    """`wanted` if nothing listens there, or a free port if it is None.

    Raises:
        Glm53Error: the port is taken.
    """
    if wanted is not None and not 0 < wanted < 65536:
        raise Glm53Error(f"port {wanted} does not exist; give --port a number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted or 0))
        except OSError as error:
            raise Glm53Error(
                f"port {wanted} on {host} cannot be used ({error.strerror}); "
                "choose another with --port, or leave it out for a free one"
            ) from error
        return probe.getsockname()[1]


def sglang_command() -> list[str]:
    """The `sglang` command of the environment that this runs in.

    Raises:
        Glm53Error: SGLang is not installed there.
    """
    if importlib.util.find_spec("sglang") is None:
        raise Glm53Error(
            f"SGLang is not installed for {sys.executable}; "
            "run `pip install sglang==0.5.23` in this environment"
        )
    script = Path(sys.executable).with_name("sglang")
    if script.exists():
        return [str(script)]
    return [sys.executable, "-c", "from sglang.cli.main import main; main()"]


class Server:
    """One `sglang serve`; its output goes to a log file. `stop()` leaves no process behind."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        url: str,
        log: Path,
        keep: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`keep`: the server may outlive this process; `environment`: variables to add."""
        self.url = url
        self.log = log
        self._environment = environment or {}
        self._keep = keep
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start the process; `wait_ready` waits for the server in it."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            output = self.log.open("wb")
        except OSError as error:
            raise Glm53Error(
                f"cannot write the log {self.log}: {error.strerror or error}; "
                "set XDG_CACHE_HOME to another folder"
            ) from error
        with output:
            self._process = subprocess.Popen(
                [*sglang_command(), "serve", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if self._keep else end_with_parent,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self._environment},
            )

    def wait_ready(self, timeout: float, report: Callable[[float, str], None]) -> float:
        """Wait until requests are answered; call `report(seconds, doing)` every few seconds.

        Returns:
            Seconds that the start took.

        Raises:
            Glm53Error: the server ended, or was not ready in time; one line with the log's path.
        """
        assert self._process is not None, "not started"
        began = reported = time.monotonic()
        last = ""
        while True:
            seconds = time.monotonic() - began
            code = self._process.poll()
            if code is not None:
                raise Glm53Error(f"the server {_ended(code)} while starting: {self._last_words()}")
            if self._answers():
                return seconds
            if seconds > timeout:
                doing = self.doing()
                told = append_stacks(self._process.pid, self.log)
                raise Glm53Error(
                    f"the server was not ready after {timeout:.0f} s, it was {doing}; "
                    f"wait longer with --timeout; its log: {self.log}"
                    + (" (at the end: what its processes are doing)" if told else "")
                )
            doing = self.doing()
            pause = 3 * REPORT_EVERY if doing == last else REPORT_EVERY
            if time.monotonic() - reported >= pause:
                reported, last = time.monotonic(), doing
                report(seconds, doing)
            time.sleep(0.5)

    def check_alive(self) -> None:
        """Raise Glm53Error if the server has ended, or is about to."""
        assert self._process is not None, "not started"
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return
        raise Glm53Error(f"the server {_ended(code)}: {self._last_words()}")

    def doing(self) -> str:
        """What the log says last, in words where we have some."""
        for line in reversed(self._lines()):
            for mark, words in PHASES:
                if mark in line:
                    return words
            if PROGRESS.search(line) and "warnings.warn" not in line:
                return _shorten(line)
        return "importing SGLang"

    def stop(self) -> None:
        """End the server: SIGTERM, after a while SIGKILL to whatever of its group is left."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_WITHIN)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nobody is left
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _lines(self) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 65536))
            text = log.read().decode(errors="replace")
        return [line for line in re.split(r"[\r\n]+", text) if line.strip()]

    def _last_words(self) -> str:
        """The line of the log that says best why the server ended, and the log's path."""
        lines = self._lines()
        ours = [line for line in lines if line.startswith(PREFIX)]
        errors = [line for line in lines if re.match(r"\s*[\w.]*(Error|Exception)\b", line)]
        why = (ours or errors or lines or ["it wrote nothing"])[-1]
        return f"{_shorten(why.removeprefix(PREFIX), 300)}; its log: {self.log}"


def _ended(code: int) -> str:
    if code < 0:
        return f"was ended by signal {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _shorten(line: str, limit: int = 100) -> str:
    line = re.sub(r"^\[\d{4}-\d\d-\d\d [^\]]*\]\s*", "", line.strip())  # the log's time stamp
    return line if len(line) <= limit else line[: limit - 3] + "..."
