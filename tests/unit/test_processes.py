"""A child process that printed its line ends the server with code 1 and nothing more."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_glm53 import errors, processes
from sglang_glm53.errors import TOLD, Glm53Error


def process(code: int | None) -> Any:
    return SimpleNamespace(exitcode=code, join=lambda timeout: None)


def raiser(error: BaseException) -> Any:
    def call(*args: Any, **kwargs: Any) -> None:
        raise error

    return call


def test_scheduler_tells_our_errors_and_leaves_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "_code", TOLD)
    with pytest.raises(SystemExit) as caught:
        processes._scheduler(raiser(Glm53Error("what; do this")))(object())
    assert caught.value.code == TOLD
    assert capfd.readouterr().err == "sglang-glm53: what; do this\n"
    with pytest.raises(ValueError, match="SGLang's own"):
        processes._scheduler(raiser(ValueError("SGLang's own")))(object())


@pytest.fixture(autouse=True)
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would run first when this process ends."""
    registered: list[tuple[Any, ...]] = []
    monkeypatch.setattr(processes.atexit, "register", lambda *call: registered.append(call))
    return registered


def test_first_process_ends_quietly_after_a_told_child(at_exit: list[tuple[Any, ...]]) -> None:
    wait = processes._wait(raiser(RuntimeError("scheduler died")))
    with pytest.raises(SystemExit) as caught:
        wait([], [process(0), process(TOLD)])
    assert caught.value.code == 1
    assert at_exit == [(processes._leave, 1)]
    with pytest.raises(RuntimeError, match="scheduler died"):
        wait([], [process(-9), process(None)])
    assert processes._wait(lambda readers, procs: "ready")([], []) == "ready"


def test_controller_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    start = processes._controller(raiser(EOFError()))
    with pytest.raises(SystemExit) as caught:
        start(SimpleNamespace(scheduler_procs=[process(TOLD)]))
    assert caught.value.code == TOLD and not slept
    with pytest.raises(EOFError):
        start(SimpleNamespace(scheduler_procs=[process(1)]))
    assert not slept
    with pytest.raises(EOFError):  # the first process ends this one in the meantime
        start(SimpleNamespace(scheduler_procs=[]))
    assert slept == [processes.FIRST_PROCESS_SECONDS]


def test_leaving_waits_for_nothing() -> None:
    """A ZeroMQ context that waits for a peer that is gone would keep the process for ever."""
    program = (
        "import atexit, time\n"
        "from sglang_glm53.processes import _leave\n"
        "atexit.register(time.sleep, 60)\n"
        "atexit.register(_leave, 7)\n"
        "print('said')\n"
        "raise SystemExit(1)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (7, "said\n")
