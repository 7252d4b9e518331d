"""The `glm53` command: help, errors in one line, and a demo that leaves no process behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import WRONG

from sglang_glm53 import __version__, cli, miniature
from sglang_glm53.commands import chat, demo, server_process, talk
from sglang_glm53.commands.server_process import Server
from sglang_glm53.errors import Glm53Error

FAKE = Path(__file__).with_name("fake_sglang.py")
ROOT = Path(__file__).resolve().parents[2]
MODULE = (sys.executable, "-m", "sglang_glm53.cli")


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MODULE, *arguments], cwd=ROOT, capture_output=True, text=True)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], Any], seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)
    return value


# --- the command line ----------------------------------------------------------------------------


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from sglang_glm53.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'sglang', 'transformers', 'numpy', 'safetensors', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *text, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    for command_ in ("demo", "status", "tiny"):
        assert any(line.split()[:1] == [command_] for line in text), command_


def test_version() -> None:
    assert run_command("--version").stdout == f"sglang-glm53 {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "COMMAND"),
        (["serve"], "invalid choice: 'serve'"),
        (["tiny"], "DIR"),
        (["tiny", "DIR", "--layers", "many"], "--layers"),
        (["tiny", "/dev/null/x"], "cannot write"),
        (["status", "http://127.0.0.1:9"], "no SGLang server answers"),
        (["status", "nonsense://x"], "nonsense"),
        (["status", "http://[::1"], "no SGLang server answers"),
        (["demo", "--model", "/nowhere"], "config.json"),
        (["demo", "--port", "99999"], "99999"),
        (["demo", "--port", "many"], "--port"),
        (["demo", "--model", "/nowhere", "--fp8"], "leave out --model, or --fp8"),
        (["demo", "--max-tokens", "0"], "--max-tokens is 0"),
        (["demo", "--question", " "], "--question is empty"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(arguments: list[str], says: str) -> None:
    done = run_command(*arguments)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("glm53"), done.stderr
    assert says in lines[0]
    assert done.stdout == ""


def test_an_error_of_our_own_making_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("sglang_glm53.status.read_status", broken)
    assert cli.main(["status", "http://x"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("glm53 status: RuntimeError: two lines at sglang_glm53/commands/")
    assert "GLM53_DEBUG=1" in line


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m sglang_glm53.cli tiny --help | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


# --- demo, with a stand-in for sglang ------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def with_fake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> Iterator[Callable[..., tuple[int, int]]]:
    """Runs `glm53 demo` on the stand-in: exit code, and the pid of the server's child."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr(server_process, "REPORT_EVERY", 0.2)
    monkeypatch.setattr(server_process, "STOP_WITHIN", 1.0)
    children: list[int] = []

    def run(behaviour: str, *arguments: str, shipped: bool = False) -> tuple[int, int]:
        command = [sys.executable, str(FAKE), behaviour]
        monkeypatch.setattr(server_process, "sglang_command", lambda: command)
        monkeypatch.setattr(miniature, "folder", lambda: model)
        monkeypatch.setattr(miniature, "shipped", lambda: True)
        named = () if shipped else ("--model", str(model))
        code = cli.main(["demo", *named, *arguments])
        (log,) = (tmp_path / "cache" / "sglang-glm53").glob("demo-*.log")
        children.append(int(log.read_text().split()[0]))
        return code, children[-1]

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for child in filter(alive, children):
        os.kill(child, signal.SIGKILL)


Demo = Callable[..., tuple[int, int]]


def test_demo_talks_to_the_miniature_and_shows_what_served(with_fake: Demo, capsys: Any) -> None:
    code, child = with_fake("answers", shipped=True)
    out = capsys.readouterr().out
    assert code == 0
    talked = out[out.index("question ") :]
    rows = [(line[:18].strip(), line[18:]) for line in talked.splitlines() if line]
    assert rows[:8] == [
        ("question", "What is 17+25?"),
        ("reasoning", "Let me think."),
        ("answer", "17 + 25 = 42."),
        ("question", "What is the weather in Paris? (with the tool get_weather)"),
        ("reasoning", "Let me think."),
        ("tool call", 'get_weather(city="Paris")'),
        ("tool's result", '{"temperature": 21, "condition": "sunny"}'),
        ("reasoning", "Let me think."),
    ]
    assert rows[8] == ("answer", "It is sunny in Paris, 21 degrees.")
    label, speed = rows[9]
    assert label == "speed" and speed.startswith("33 tokens in 3 answers, first after 0.")
    rate = float(speed.split("then ")[1].split(" tokens a second")[0])
    assert 1 < rate < 51, "thirty tokens in 0.6 s, more on a busy machine"
    assert "model             sglang_glm53.models.glm_moe_dsa.GlmMoeDsaForCausalLM\n" in out
    assert "accept length     3.25\n" in out
    assert "stood down        GPU: no kernels; use a CPU" in out
    assert "draft (MTP)" not in out, "what is absent is left out"
    wait_until(lambda: not alive(child))


@pytest.mark.parametrize("behaviour", WRONG)
def test_demo_of_a_miniature_that_makes_no_sense_is_an_error(
    with_fake: Demo, capsys: Any, behaviour: str
) -> None:
    code, _ = with_fake(behaviour, shipped=True)
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert code == 1 and "the miniature does not answer as it was trained to" in line
    expected = {
        "wrong sum": 'expected "42" as the answer to "What is 17+25?", got "17 + 25 = 32."',
        "no reasoning": "expected its reasoning apart from the answer",
        "no call": "expected a call of get_weather for Paris",
        "wrong city": 'got "", get_weather(city="Rome")',
        "wrong weather": "expected the tool's 21 degrees",
    }
    assert expected[behaviour] in line
    assert "serving           ours" in told.out


@pytest.mark.parametrize("behaviour", WRONG)
def test_answers_of_another_model_are_not_judged(with_fake: Demo, behaviour: str) -> None:
    assert with_fake(behaviour)[0] == 0


def test_demo_asks_another_question_alone(with_fake: Demo, capsys: Any) -> None:
    assert with_fake("wrong sum", "--question", "Quo vadis?", shipped=True)[0] == 0
    out = capsys.readouterr().out
    assert "answer            You said: Quo vadis?\n" in out and out.count("question  ") == 1
    assert "11 tokens, first after" in out


def test_demo_passes_flags_on(with_fake: Demo, tmp_path: Path) -> None:
    with_fake("answers", "--mtp", "--", "--dtype", "float32")
    (log,) = (tmp_path / "cache" / "sglang-glm53").glob("*.log")
    line = log.read_text().splitlines()[2]
    assert "serve --model-path" in line
    assert "--reasoning-parser glm45 --tool-call-parser glm47" in line
    assert "--speculative-algorithm EAGLE --speculative-num-steps 5" in line
    assert line.endswith("--dtype float32")


def test_demo_whose_server_dies_says_why_and_where(with_fake: Demo, capsys: Any) -> None:
    code, child = with_fake("dies")
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 1
    assert "exit code 3 while starting: config.json: index_topk is missing; add it" in line
    assert Path(line.split("its log: ")[1]).is_file()
    wait_until(lambda: not alive(child))


def test_demo_shows_progress_and_gives_up_in_time(with_fake: Demo, capsys: Any) -> None:
    code, child = with_fake("hangs", "--timeout", "1.5")
    captured = capsys.readouterr()
    assert code == 1
    assert "loading the weights" in captured.out
    assert "not ready after 2 s" in captured.err
    wait_until(lambda: not alive(child))
    if Path(sys.executable).with_name("py-spy").exists():
        log, told, _ = captured.err.split("its log: ")[1].partition(" (at the end: ")
        assert told and "(fake_sglang.py:" in Path(log).read_text()


def test_demo_ends_a_server_that_ignores_sigterm(with_fake: Demo) -> None:
    code, child = with_fake("stubborn")
    assert code == 0
    wait_until(lambda: not alive(child))


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [("refuses", 'HTTP 400: {"message": "the prompt is too long"}'), ("vanishes", "exit code 7")],
)
def test_demo_whose_question_fails(with_fake: Demo, capsys: Any, behaviour: str, says: str) -> None:
    code, child = with_fake(behaviour)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 1 and says in line
    wait_until(lambda: not alive(child))


def test_demo_keep_leaves_the_server_up(with_fake: Demo, capsys: Any) -> None:
    code, child = with_fake("answers", "--keep")
    said = capsys.readouterr().out.splitlines()[-1]
    url, pid = said.split()[3].rstrip(","), int(said.split()[5].rstrip(";"))
    try:
        assert code == 0 and alive(pid) and alive(child)
        assert cli.main(["status", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["serving"] == "ours"
        assert cli.main(["status", url.removeprefix("http://")]) == 0
        assert "KV pool           sglang_glm53.memory" in capsys.readouterr().out
    finally:
        os.killpg(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid) and not alive(child))


def test_demo_refuses_a_port_that_is_taken(model: Path, capsys: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["demo", "--model", str(model), "--port", str(port)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port {port}" in line and "--port" in line


def test_demo_without_sglang(monkeypatch: pytest.MonkeyPatch, model: Path, capsys: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo", "--model", str(model)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "SGLang is not installed" in line and "pip install sglang==0.5.23" in line


Started = tuple[subprocess.Popen[str], int, int]


@pytest.fixture
def starting(tmp_path: Path, model: Path) -> Started:
    """A demo whose server never gets ready: its process, and the pids of server and child."""
    program = (
        "import sys\n"
        "from sglang_glm53 import cli\n"
        "from sglang_glm53.commands import server_process\n"
        f"server_process.sglang_command = lambda: [sys.executable, {str(FAKE)!r}, 'hangs']\n"
        f"sys.exit(cli.main(['demo', '--model', {str(model)!r}]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def words() -> list[str]:
        logs = list((tmp_path / "sglang-glm53").glob("*.log"))
        said = logs[0].read_text().split() if logs else []
        return said if "begin." in said else []

    child, server = (int(pid) for pid in wait_until(words)[:2])
    return process, server, child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupting_the_demo_stops_the_server(starting: Started, number: int) -> None:
    process, server, child = starting
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    wait_until(lambda: not alive(server) and not alive(child))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_killing_the_demo_ends_the_server(starting: Started) -> None:
    process, server, child = starting
    process.kill()
    process.communicate(timeout=20)
    wait_until(lambda: not alive(server))
    os.kill(child, signal.SIGKILL)  # SGLang ends its own children when it gets SIGTERM


def test_a_stream_without_text_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_events", lambda response: iter([{"choices": []}]))

    class Nothing:
        def __enter__(self) -> Nothing:
            return self

        def __exit__(self, *args: object) -> None:
            pass

    monkeypatch.setattr(chat.urllib.request, "urlopen", lambda *a, **k: Nothing())
    with pytest.raises(Glm53Error, match="no text"):
        chat.ask("http://x", [], max_tokens=1, timeout=1)


def test_a_stream_that_breaks_off_is_an_error() -> None:
    """The server died: half a chunk of the answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\nda")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Glm53Error, match="broke"):
            port = listening.getsockname()[1]
            chat.ask(f"http://127.0.0.1:{port}", [], max_tokens=1, timeout=5)
        thread.join()


def test_an_answer_that_is_cut_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    cut = chat.Reply("Ones: 7+", "", 5, 0.1, 0.2, "length")
    monkeypatch.setattr(chat, "ask", lambda *a, **k: cut)
    talk.Talk("http://x", max_tokens=5, timeout=1).question("?")
    *_, answer, why = capsys.readouterr().out.splitlines()
    assert answer.split() == ["answer", "(none)"] and "cut at --max-tokens 5" in why


def test_arguments_that_are_no_json_are_shown_as_none() -> None:
    assert str(chat.ToolCall("1", "get_weather", '{"city": "Par')) == "get_weather()"
    assert str(chat.ToolCall("1", "get_weather", '["Paris"]')) == "get_weather()"


@pytest.mark.parametrize(
    ("told", "visible", "expected"),
    [
        ("9.0\n9.0\n", "0,1", True),
        ("9.0\n8.6\n", None, False),  # which of them serves is not ours to say
        ("10.0\n", None, False),
        ("9.0\n", "", False),
        (None, None, False),  # no nvidia-smi
    ],
)
def test_the_miniature_goes_to_a_hopper_gpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    told: str | None,
    visible: str | None,
    expected: bool,
) -> None:
    if told is not None:
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\necho '{told}'\n")
        smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(demo, "sglang_version", lambda: "0.5.23")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert demo.has_hopper() is expected
    monkeypatch.setattr(demo, "sglang_version", lambda: "0.5.22")
    assert not demo.has_hopper(), "ours stands down there"


def test_a_cache_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path, capsys: Any
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sglang")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for arguments in (("--fp8",), ("--model", str(model))):
        assert cli.main(["demo", *arguments]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot write" in line and "set XDG_CACHE_HOME" in line


def test_what_the_server_does_is_told_in_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = Server([], url="", log=log)
    log.write_text("")
    assert server.doing() == "importing SGLang"
    log.write_text("[2026-01-01 10:00:00 TP0] Load weight begin. x\nLoading shards:  40%| 2/5\n")
    assert server.doing() == "Loading shards:  40%| 2/5"
    log.write_text("[2026-01-01 10:00:00 TP0] Load weight end. x\n  warnings.warn(\n")
    assert server.doing() == "done with the weights"


# --- demo, with the real server ------------------------------------------------------------------


@pytest.mark.server("alone")
@pytest.mark.parametrize("options", [(), ("--mtp", "--fp8")], ids=["plain", "mtp-fp8"])
def test_demo_on_the_real_server(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The miniature's own answers; within 20 seconds from the moment that the server is up."""
    for again in (False, True):
        demo_process = subprocess.Popen(
            [*MODULE, "demo", *options, "--timeout", "200"],
            cwd=ROOT,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        came: dict[str, float] = {}
        lines = []
        for line in demo_process.stdout:
            came.setdefault(line.split(" ")[0].strip(), time.monotonic())
            lines.append(line)
        code = demo_process.wait(60)
        if code == 0 or again or "it was warming up with a first request" not in lines[-1]:
            break
        # A rare stall of SGLang's start (server/harness.py); its log tells more than its last line.
        (log,) = (tmp_path / "sglang-glm53").glob("*.log")
        warnings.warn("started again: " + log.read_text(errors="replace")[-20_000:], stacklevel=1)
    assert code == 0, "".join(lines)
    out = " ".join("".join(lines).split())
    assert "think>" not in out
    if miniature.shipped():
        assert "answer 17 + 25 = 42." in out
        assert 'tool call get_weather(city="Paris")' in out and "<tool_call>" not in out
    else:
        assert "carries no trained miniature yet" in out
        assert "answer Hello! I am the smallest possible GLM" in out
    assert "serving ours" in out
    assert "model sglang_glm53.models.glm_moe_dsa.GlmMoeDsaForCausalLM" in out
    assert "attention sglang_glm53.backends.torch_dsa.TorchDsaBackend" in out
    assert came["speed"] - came["ready"] < 20
    if "--mtp" in options:
        assert "draft (MTP) sglang_glm53.models.glm_moe_dsa_nextn.GlmMoeDsaForCausalLMNextN" in out
        assert "accept length" in out


@pytest.mark.server("alone")
def test_demo_whose_real_server_dies(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    """The line of the log that says why is the one that is shown."""
    done = subprocess.run(
        [*MODULE, "demo", "--model", str(tiny_checkpoint()), "--", "--dtype", "float16"],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert "float16" in line and "its log: " in line
