"""`glm53 bench slice`: its plan, its children, its report, its errors; with a fake child."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_glm53 import cli
from sglang_glm53.bench import jobs as running
from sglang_glm53.bench import plan, report
from sglang_glm53.bench import slice as bench
from sglang_glm53.bench.plan import Options
from sglang_glm53.bench.rank_slice import slice_config
from sglang_glm53.bench.served import check_side
from sglang_glm53.bench.step_bytes import FP8
from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error

FAKE = Path(__file__).with_name("fake_bench_child.py")
ROOT = Path(__file__).resolve().parents[2]
H200 = 139.8 * plan.GIB
COLUMNS = (
    *("work", "batch", "context", "stock_ms", "ours_ms", "bound_ms", "launches_stock"),
    *("launches_ours", "kv_tokens_stock", "kv_tokens_ours", "startup_stock_s", "startup_ours_s"),
    *("stock_raw_ms", "ours_raw_ms", "served_stock", "served_ours", "memory_gib_stock"),
)


def measure(
    out: Path, behaviour: str = "-", options: Options | None = None, **others: Any
) -> tuple[int, dict[str, Any], list[str]]:
    """Run with the fake child: exit code, report, what was said."""
    said: list[str] = []
    settings: dict[str, Any] = {
        "json_file": None,
        "profile": False,
        "resume": False,
        "timeout": 60.0,
        **others,
    }
    code = bench.run(
        options or Options(rounds=1, startup=1),
        out=out,
        command_line="glm53 bench slice",
        say=said.append,
        command=(sys.executable, str(FAKE), behaviour),
        **settings,
    )
    return code, json.loads((out / "slice.json").read_text()), said


def started(out: Path) -> list[str]:
    return [line.split()[0] for line in (out / "started").read_text().splitlines()]


# --- a whole run ---------------------------------------------------------------------------------


def test_a_run_measures_both_sides_and_reports_every_row(tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "slice.json"
    code, found, said = measure(out, json_file=file)
    assert code == 0 and found["errors"] == []
    assert json.loads(file.read_text()) == found
    assert started(out) == [
        "machine",
        *("decode-stock-1", "decode-ours-1", "mtp-stock-1", "mtp-ours-1"),
        *("prefill-default-stock-1", "prefill-default-ours-1"),
        *("prefill-disabled-stock-1", "prefill-disabled-ours-1"),
    ]
    rows = [(row["work"], row["batch"], row.get("graph")) for row in found["rows"]]
    assert rows == [
        *(("decode", batch, None) for batch in (1, 8, 16)),
        *(("mtp_step", batch, None) for batch in (1, 8)),
        *(("prefill", 1, graph) for graph in ("default", "disabled")),
    ]
    for row in found["rows"]:
        assert set(COLUMNS) <= set(row), row["work"]
    first = found["rows"][0]
    assert (first["stock_ms"], first["ours_ms"]) == (21.0, 20.0)
    assert first["ratio"] == pytest.approx(20 / 21)
    assert first["bound_ms"] == pytest.approx(42.43e9 / 4.3e12 * 1e3, rel=0.001)
    assert first["bytes"] == pytest.approx(sum(first["bytes_by"].values()), abs=20)
    assert first["distinct_experts"] == 8 and first["distinct_experts_ours"] == [8] * 75
    assert found["rows"][-1]["bound_ms"] is None
    assert found["startup"]["stock_raw_s"] == [50.0] and found["startup"]["ours_s"] == 51.0
    assert set(found) >= {"machine", "versions", "date", "command", "bandwidth", "options"}
    assert any(line.startswith("decode-ours-1: half way") for line in said)


def test_only_stocks_environment_asks_for_stock(tmp_path: Path) -> None:
    measure(tmp_path)
    lines = dict(line.split() for line in (tmp_path / "started").read_text().splitlines())
    for name, serve in lines.items():
        assert serve == ("stock" if "-stock-" in name else "-"), name


def test_the_environment_of_the_sides_differs_in_what_serves_alone() -> None:
    base = {
        "PATH": "/bin",
        "GLM53_SERVE": "stock",
        "GLM53_ON_ERROR": "stock",
        "SGLANG_SIMULATE_UNIFORM_EXPERTS": "1",
    }
    stock, ours = (running.environment(side, base, 3.5) for side in ("stock", "ours"))
    assert stock.pop("GLM53_SERVE") == "stock"
    assert ours.pop("GLM53_STRICT") == "1"
    assert stock == ours
    assert ours["SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS"] == "1"
    assert ours["SGLANG_SIMULATE_ACC_LEN"] == "3.5"
    assert not {"GLM53_ON_ERROR", "SGLANG_SIMULATE_UNIFORM_EXPERTS"} & set(ours)
    asked = running.environment("ours", {"GLM53_SERVE": "ours"}, 3.5)
    assert asked["GLM53_SERVE"] == "ours"


def test_the_text_shows_every_row_and_what_stands_beside_it(tmp_path: Path) -> None:
    _, found, _ = measure(tmp_path)
    text = report.render(found)
    table = [line.split() for line in text.splitlines() if line.startswith("decode  ")]
    assert [row[1:6] for row in table] == [
        ["1", "2304", "21.00", "20.00", "0.952"],
        ["8", "2304", "28.00", "27.00", "0.964"],
        ["16", "2304", "36.00", "35.00", "0.972"],
    ]
    assert table[0][6:] == ["9.87", "2.13", "2.03", "2813", "2813"]
    assert "NVIDIA Fake, 139.8 GiB" in text and "4.30 TB/s" in text
    assert "accept length 3.50" in text and "KV tokens stock 150000, ours 150000" in text
    assert "start-up: stock 50.0 s, ours 51.0 s" in text
    assert "prefill (default graph)" in text
    assert "batch 8, steps enqueued one behind another: stock 27.50 ms, ours 26.50 ms" in text


def test_the_kernels_of_both_sides_stand_beside_each_other(tmp_path: Path) -> None:
    _, found, said = measure(tmp_path, options=Options(work=("decode",), rounds=1), profile=True)
    lines = report.render_kernels(found).splitlines()
    (gemm,) = [line.split() for line in lines if line.endswith("gemm<fp8>")][:1]
    assert gemm == [*(["150", "45.5", "6825", "6000"] * 2), "gemm<fp8>"]
    (alone,) = [line.split() for line in lines if line.endswith("ours_only")][:1]
    assert alone == ["-", "-", "-", "-", "78", "2.0", "156", "117", "ours_only"]
    assert "stock 6.14 ms, 0.02 of them idle; 6.98 busy in all" in lines[1]
    assert any("gemm<fp8>" in text for text in said)


def test_kernels_of_a_report_without_exposed_times() -> None:
    row = {"work": "decode", "batch": 1, "kernels_stock": [["gemm", 2.0, 10.0]]}
    lines = report.render_kernels({"rows": [row]}).splitlines()
    assert lines[1].endswith("(stock 0.02 ms busy, overlapping kernels counted each)")
    assert lines[3].split() == ["2", "10.0", "20", "-", "-", "-", "-", "-", "gemm"]


# --- what fails ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ("fails:decode-ours", "decode-ours-1: ended with exit code 1: the answer is wrong"),
        ("dies:decode-ours", "decode-ours-1: ended by signal SIGKILL: bench: half way"),
        ("partial:decode-ours", "decode-ours-1: the measurement wrote no whole result"),
    ],
)
def test_a_child_that_fails_costs_its_own_measurement_alone(
    tmp_path: Path, behaviour: str, says: str
) -> None:
    code, found, said = measure(tmp_path, behaviour)
    assert code == 1
    (error,) = found["errors"]
    assert error.startswith(says) and error.endswith(str(tmp_path / "decode-ours-1.log"))
    assert f"failed: {error}" in said
    assert f"error: {error}" in report.render(found)
    assert len(started(tmp_path)) == 9  # the others ran
    assert {row["work"] for row in found["rows"]} == {"decode", "mtp_step", "prefill"}
    assert found["rows"][0]["stock_ms"] == 21.0


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    options = Options(work=("decode",), rounds=1, startup=0)
    code, found, _ = measure(tmp_path, "hangs:decode-ours", options, timeout=1.0)
    assert code == 1 and "not done after 1 s" in found["errors"][0]
    assert found["rows"][0]["ours_ms"] is None and found["rows"][0]["stock_ms"] == 21.0
    assert " - " in report.render(found)


def test_an_interrupted_run_leaves_no_child(tmp_path: Path) -> None:
    def say(line: str) -> None:
        if "half way" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.run_job(
            running.Job("decode-ours-1", "ours", {"kind": "decode", "side": "ours"}),
            tmp_path,
            dict(os.environ),
            timeout=60,
            say=say,
            command=(sys.executable, str(FAKE), "hangs:decode"),
        )
    (pid,) = (tmp_path / "pids").read_text().split()
    assert not Path(f"/proc/{pid}").exists()


def test_sides_that_read_different_experts_are_an_error(tmp_path: Path) -> None:
    code, found, _ = measure(tmp_path, "experts", Options(work=("decode",), rounds=1, startup=0))
    assert code == 1
    assert any("stock 8, ours 7 distinct" in line for line in found["errors"])
    assert any("ours reads 31 distinct experts" in line for line in found["errors"])


def test_experts_that_could_not_be_counted_are_an_error_too(tmp_path: Path) -> None:
    row = {"batch": 1, "distinct_experts": 8, "distinct_experts_stock": [8, 8]}
    assert report._compare_experts({**row, "distinct_experts_ours": [8, 8]}) == []
    (line,) = report._compare_experts({**row, "distinct_experts_ours": "AttributeError('x')"})
    assert "could not be counted: AttributeError('x')" in line


def test_a_run_is_resumed_where_the_same_was_measured(tmp_path: Path) -> None:
    options = Options(work=("decode",), rounds=1, startup=0)
    measure(tmp_path, "fails:decode-ours", options)
    (tmp_path / "started").unlink()
    code, found, said = measure(tmp_path, options=options, resume=True)
    assert code == 0 and started(tmp_path) == ["decode-ours-1"]
    assert any(line.startswith("decode-stock-1: taken from") for line in said)
    assert found["rows"][0]["ratio"] == pytest.approx(20 / 21)
    (tmp_path / "started").unlink()
    measure(tmp_path, options=replace(options, steps=5), resume=True)
    assert started(tmp_path) == ["decode-stock-1", "decode-ours-1"]


@pytest.mark.parametrize(
    ("behaviour", "options", "says"),
    [
        ("no-gpu", Options(), "torch finds no GPU"),
        ("busy", Options(), "only 10.0 of the GPU's 139.8 GiB are free"),
        ("small", Options(), "needs about 126 GiB .* use at most --layers 1[0-9], or fewer"),
        ("small", Options(work=("prefill",), prefill_layers=20), "at most --prefill-layers 1"),
        ("-", Options(batch=(64,), context=65536, work=("decode",)), "cache 2.*or fewer --experts"),
        (
            "-",
            Options(sglang_arguments=("--mem-fraction-static", "0.78")),
            "--mem-fraction-static 0.78 .* raise it",
        ),
    ],
)
def test_what_cannot_fit_shows_before_a_measurement_starts(
    tmp_path: Path, behaviour: str, options: Options, says: str
) -> None:
    with pytest.raises(Glm53Error, match=says):
        measure(tmp_path, behaviour, options)
    assert started(tmp_path) == ["machine"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batch", "0"], "--batch takes numbers from 1 up"),
        (["--batch", "one"], "argument --batch"),
        (["--work", "training"], "argument --work"),
        (["--steps", "0"], "--steps is 0"),
        (["--startup", "-1"], "--startup is -1"),
        (["--accept-length", "7"], "--accept-length 7"),
        (["--prefill-chunk", "100"], "--prefill-chunk 100"),
        (["--layers", "0"], "0 layers"),
        (["--experts", "4"], "4 experts"),
        (["--json", "/nowhere/slice.json"], "cannot write /nowhere/slice.json"),
        (["--out", "/dev/null/x"], "cannot write to /dev/null/x"),
    ],
)
def test_a_bad_option_is_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    command = [sys.executable, "-m", "sglang_glm53.cli", "bench", "slice"]
    if "--out" not in arguments:
        command += ["--out", str(tmp_path)]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert says in line


def test_an_unwritten_json_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    bench.check_writable(file)
    assert not file.exists()
    file.write_text("before")
    bench.check_writable(file)
    assert file.read_text() == "before"


# --- the plan ------------------------------------------------------------------------------------


def planned(options: Options) -> list[running.Job]:
    models = {}
    for name, layers in (("slice", options.layers), ("prefill", options.prefill_layers)):
        config = Glm53Config.from_hf(slice_config(layers=layers, experts=options.experts))
        models[name] = (Path(f"/{name}"), config, FP8)
    return plan.jobs(options, models=models, gpu_bytes=H200, folder=Path("/out"))


def value_of(job: running.Job, option: str) -> str:
    arguments = job.spec["arguments"]
    return arguments[arguments.index(option) + 1]


def test_the_sides_alternate_and_every_start_counts() -> None:
    names = [job.name for job in planned(Options(work=("mtp",), rounds=2, startup=3))]
    assert names == [
        *("mtp-stock-1", "mtp-ours-1", "mtp-ours-2", "mtp-stock-2"),
        *("startup-stock-3", "startup-ours-3"),
    ]
    names = [job.name for job in planned(Options(work=("decode",), rounds=1, startup=2))]
    assert names == [
        *("decode-stock-1", "decode-ours-1"),
        *("startup-stock-1", "startup-ours-1", "startup-ours-2", "startup-stock-2"),
    ]
    assert len(planned(Options(work=("prefill",), rounds=1, startup=3))) == 4
    assert {job.side for job in planned(Options(only="stock"))} == {"stock"}


def test_both_sides_get_the_same_arguments() -> None:
    found = planned(Options(rounds=1, sglang_arguments=("--random-seed", "7")))
    for stock, ours in zip(found[::2], found[1::2], strict=True):
        assert {stock.side, ours.side} == {"stock", "ours"} and stock.kind == ours.kind
        assert stock.spec["arguments"] == ours.spec["arguments"]
        assert stock.spec["arguments"][-2:] == ["--random-seed", "7"]


def test_the_arguments_of_the_works() -> None:
    found = {job.name: job for job in planned(Options(rounds=1))}
    decode, mtp = found["decode-ours-1"], found["mtp-ours-1"]
    assert value_of(decode, "--mem-fraction-static") == "0.82"
    assert value_of(decode, "--load-format") == "dummy"
    assert value_of(mtp, "--speculative-num-draft-tokens") == "6"
    default, without = found["prefill-default-ours-1"], found["prefill-disabled-ours-1"]
    assert value_of(default, "--cuda-graph-bs-prefill") == "8192"
    assert "--cuda-graph-backend-prefill" not in default.spec["arguments"]
    assert value_of(without, "--cuda-graph-backend-prefill") == "disabled"
    assert value_of(default, "--model-path") == "/prefill"
    (uneven,) = (
        job
        for job in planned(Options(rounds=1, prefill_tokens=10000, only="ours"))
        if job.name == "prefill-default-ours-1"
    )
    at = uneven.spec["arguments"].index("--cuda-graph-bs-prefill")
    assert uneven.spec["arguments"][at + 1 : at + 3] == ["1808", "8192"]


def test_the_arguments_are_sglangs() -> None:
    """Its own parser takes every one of them."""
    ServerArgs = pytest.importorskip("sglang.srt.server_args").ServerArgs  # noqa: N806
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    for job in planned(Options()):
        _, unknown = parser.parse_known_args(job.spec["arguments"])
        assert not unknown


def test_a_user_own_memory_fraction_is_kept() -> None:
    (job, *_) = planned(Options(sglang_arguments=("--mem-fraction-static=0.8",)))
    assert "--mem-fraction-static" not in job.spec["arguments"]
    assert job.spec["arguments"][-1] == "--mem-fraction-static=0.8"
    with pytest.raises(Glm53Error, match="takes a number"):
        plan.own_fraction(["--mem-fraction-static", "much"])


@pytest.mark.parametrize(
    ("side", "model", "right"),
    [
        ("ours", "sglang_glm53.models.glm_moe_dsa.GlmMoeDsaForCausalLM", True),
        ("stock", "sglang.srt.models.glm4_moe.GlmMoeDsaForCausalLM", True),
        ("stock", "sglang_glm53.models.glm_moe_dsa.GlmMoeDsaForCausalLM", False),
        ("ours", "sglang.srt.models.glm4_moe.GlmMoeDsaForCausalLM", False),
    ],
)
def test_a_side_is_measured_on_its_own_class(side: str, model: str, right: bool) -> None:
    if right:
        check_side(side, model)
        return
    with pytest.raises(Glm53Error, match=f"serves where {side} was to be measured"):
        check_side(side, model)


# --- show ----------------------------------------------------------------------------------------


def test_show_prints_what_the_run_printed(tmp_path: Path, capsys: Any) -> None:
    _, found, said = measure(tmp_path)
    assert cli.main(["bench", "show", str(tmp_path / "slice.json")]) == 0
    text = capsys.readouterr().out.rstrip("\n")
    assert text in said
    assert cli.main(["bench", "show", "--profile", str(tmp_path / "slice.json")]) == 0
    assert "gemm<fp8>" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "{", "[]", '{"rows": [{"work": "decode"}]}'])
def test_show_of_something_else_is_one_line(
    tmp_path: Path, capsys: Any, content: str | None
) -> None:
    file = tmp_path / "a.json"
    if content is not None:
        file.write_text(content)
    assert cli.main(["bench", "show", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("glm53 bench: ") and str(file) in line


def test_recorded_runs_can_be_shown() -> None:
    files = sorted((ROOT / "docs/benchmarks").glob("slice*.json"))
    if not files:
        pytest.skip("no run is recorded yet")
    for file in files:
        assert report.render(bench.load_report(file))
