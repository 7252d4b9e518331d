"""The cookbook against SGLang: every recipe is parsed and resolved by it; one is run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests

from sglang_glm53.compat.flags import RENAMED
from sglang_glm53.compat.versions import SUPPORTED, sglang_version
from sglang_glm53.cookbook import check, docs, recipe
from sglang_glm53.cookbook.devices import device
from sglang_glm53.cookbook.resolve import Job, flag_names, resolve_all
from sglang_glm53.ledger.glm53 import config_json

from .harness import READY_SECONDS, free_port

pytestmark = pytest.mark.server("alone")

MTP = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "5"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "6"),
)


@pytest.fixture(scope="module")
def other_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The other supported SGLang, unpacked into a folder and not installed: version, folder."""
    (version,) = [each for each in SUPPORTED if each != sglang_version()]
    folder = tmp_path_factory.mktemp("wheel")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*download, "--dest", str(folder), f"sglang=={version}"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        why = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        pytest.skip(f"SGLang {version} could not be fetched: {why}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder / "unpacked")
    return version, folder / "unpacked"


def hold(version: str, sglang: Path | None) -> None:
    """Every recipe, with and without its options, on a version of SGLang."""
    cases = check.cases([recipe.load(name) for name in recipe.names()])
    findings = check.check(cases, version, sglang)
    assert len(findings) == len(cases)
    failed = [(f.case.title, f.lines) for f in findings if f.status == check.FAIL]
    assert not failed, failed
    # The check would see it: SGLang itself answered, and differently for different hardware.
    caches = {f.case.title: f.resolution.args["kv_cache_dtype"] for f in findings if f.resolution}
    assert caches["h200-latency"] == "bfloat16"
    assert caches["b200-fp8-latency"] == "fp8_e4m3"


def test_the_flags_for_production_are_the_installed_parsers() -> None:
    (section,) = re.findall(r"## Before it is in production\n(.*?)\n## ", docs.HEAD, re.DOTALL)
    named = set(re.findall(r"`(--[a-z-]+)", section))
    assert {"--api-key", "--enable-metrics", "--served-model-name"} <= named <= flag_names()


def test_every_recipe_passes_on_the_installed_sglang() -> None:
    hold(sglang_version() or "", None)


def test_every_recipe_passes_on_the_other_supported_sglang(
    other_wheel: tuple[str, Path],
) -> None:
    hold(*other_wheel)


def held_flags(version: str, sglang: Path | None) -> None:
    """The table of renamed flags against the parser of a version."""
    (answer,) = resolve_all([Job(["--help-me"], config_json(), device("h200"))], sglang=sglang)
    assert answer.version == version
    assert answer.problem == "unrecognized arguments: --help-me"
    for row in RENAMED:
        new = all(f"--{flag}" in answer.flag_names for flag in row.new)
        assert new == (row.since is None or version >= row.since), row
        if row.state == "gone":
            assert not any(f"--{flag}" in answer.flag_names for flag in row.old), row
        if row.state == "deprecated":
            assert all(f"--{flag}" in answer.flag_names for flag in row.old), row


def test_the_table_of_renamed_flags_is_the_installed_parsers() -> None:
    held_flags(sglang_version() or "", None)


def test_the_table_of_renamed_flags_is_the_other_parsers(other_wheel: tuple[str, Path]) -> None:
    held_flags(*other_wheel)


def test_a_process_for_many_devices_answers_as_one_for_each() -> None:
    """What SGLang remembers of the first device does not reach the answers for the next."""
    jobs = [
        Job(["--model-path", "x", "--tp-size", "8", *MTP], config_json(), device(kind))
        for kind in ("h200", "b200")
    ]
    together, (alone,) = resolve_all(jobs), resolve_all(jobs[1:])
    chosen = {"random_seed"}  # at random, each time
    for name, value in alone.args.items():
        assert name in chosen or together[1].args[name] == value, name
    assert (together[1].rows, together[1].log) == (alone.rows, alone.log)
    assert together[0].args["dsa_decode_backend"] != alone.args["dsa_decode_backend"]


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """`glm53 recipe run laptop`: its process, the server's URL, and its log."""
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "sglang_glm53.cli", "recipe", "run", "laptop"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--with", "mtp", "--", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        yield process, f"http://127.0.0.1:{port}", log
    finally:
        process.terminate()
        process.wait(60)


def test_the_laptop_recipe_serves_and_ctrl_c_leaves_no_process(
    laptop: tuple[subprocess.Popen[bytes], str, Path],
) -> None:
    process, url, log = laptop
    until = time.monotonic() + READY_SECONDS
    while not _healthy(url):
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < until, log.read_text(errors="replace")[-4000:]
        time.sleep(1)
    status = subprocess.run(
        [sys.executable, "-m", "sglang_glm53.cli", "status", url],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "ours" in status.stdout
    message = {"role": "user", "content": "Hello, who are you?"}
    body = {"model": "glm", "messages": [message], "max_tokens": 16}
    answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
    assert answer["usage"]["completion_tokens"] > 0
    processes = psutil.Process(process.pid).children(recursive=True)
    assert len(processes) > 1  # the server, its scheduler, its detokenizer
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def _healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False
