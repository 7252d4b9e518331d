"""The doctor: facts, arguments as written, the command, and the rules inside a server's start."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_glm53 import cli
from sglang_glm53.checks import engine, gather, once, preflight
from sglang_glm53.checks.arguments import as_written, options
from sglang_glm53.checks.engine import PASS, SKIPPED
from sglang_glm53.checks.facts import UNKNOWN, Facts
from sglang_glm53.checks.gather import Question
from sglang_glm53.checks.loading import OUR_VARIABLES
from sglang_glm53.checks.packages import Plugin, contested, pins, plugins
from sglang_glm53.checks.report import as_json, table
from sglang_glm53.checks.rule import FAIL, WARN, Rule
from sglang_glm53.checks.rules import AT_START, RULES, SUBJECTS
from sglang_glm53.compat.versions import GPU_TESTED
from sglang_glm53.cookbook.resolve import Resolution
from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger.glm53 import config_json

ARGUMENTS = (
    *("tp_size", "dp_size", "attn_dp_size", "nnodes", "chunked_prefill_size", "dcp_size"),
    *("kv_cache_dtype", "moe_a2a_backend", "speculative_algorithm", "speculative_eagle_topk"),
    *("speculative_num_steps", "default_chat_template_kwargs", "tool_call_parser", "device"),
)
MODULE = (sys.executable, "-m", "sglang_glm53.cli")


def rule(**changed: Any) -> Rule:
    row: dict[str, Any] = {
        "id": "a-rule",
        "title": "it is fine",
        "severity": FAIL,
        "reads": ("gpus",),
        "condition": lambda facts: {"has": facts.gpus} if facts.gpus > 1 else None,
        "message": "there are {has}",
        "cure": "take {has} out",
        "symptom": "A.",
        "cause": "B.",
        "source": ("C",),
    }
    return Rule(**{**row, **changed})


# --- the engine and the facts --------------------------------------------------------------------


def test_a_rule_fails_with_its_values_passes_or_is_skipped() -> None:
    failed, passed, skipped = (
        engine.check(rule(), facts)
        for facts in (Facts.only(gpus=2), Facts.only(gpus=1), Facts.only())
    )
    assert (failed.status, failed.message, failed.cure) == (FAIL, "there are 2", "take 2 out")
    assert (passed.status, passed.message) == (PASS, "")
    assert (skipped.status, skipped.message) == (SKIPPED, UNKNOWN["gpus"])


def test_a_condition_may_be_true_without_values() -> None:
    plain = rule(condition=lambda facts: True, message="so", cure="do", severity=WARN)
    assert engine.check(plain, Facts.only(gpus=1)).status == WARN


def test_the_first_failure_is_raised_as_one_line() -> None:
    results = engine.run([rule(severity=WARN), rule(id="b"), rule(id="c")], Facts.only(gpus=2))
    with pytest.raises(Glm53Error, match=r"^there are 2; take 2 out \[b\]$"):
        engine.raise_first(results)
    engine.raise_first(results[:1])


def test_options_of_any_value_stop_no_doctor() -> None:
    """Where SGLang's parser is not asked, a value may be anything."""
    for value in ("abc", True, [1, "x"], {"a": 1}, -1, None):
        facts = Facts.only(
            args=dict.fromkeys(ARGUMENTS, value), argv=(), given=frozenset(), environment={},
            raw_config=config_json(), capability=(9, 0), gpus=8, device="cuda",
        )  # fmt: skip
        results = engine.judge(RULES, facts)
        assert [result.rule.id for result in results] == [row.id for row in RULES]


def test_facts_that_are_said_are_not_gathered() -> None:
    assert Facts(gpus=3).gpus == 3
    everything = Facts.only()
    assert all(getattr(everything, name) is None for name in UNKNOWN)
    with pytest.raises(TypeError, match="no such fact: gpu"):
        Facts(gpu=1)


def test_the_config_follows_from_config_json() -> None:
    good = Facts.only(raw_config=config_json())
    assert good.config_problem == "" and good.config.num_hidden_layers == 78
    bad = Facts.only(raw_config={})
    assert "missing" in bad.config_problem and bad.config is None


def test_this_environment_is_sound_and_its_facts_are_real() -> None:
    facts = Facts()
    # Those are the environment's.
    about_versions = {row.id for row in (*SUBJECTS["Versions"], *SUBJECTS["Kernel packages"])}
    failed = {result.rule.id for result in engine.run(RULES, facts) if result.status == FAIL}
    assert failed <= about_versions
    assert facts.versions["sglang"] and facts.pins["torch"].startswith("==")
    assert {point.name for point in facts.entry_points} >= {"glm53"}


# --- arguments as written ------------------------------------------------------------------------


def test_arguments_are_read_without_sglangs_parser() -> None:
    argv = "--tp 8 --page-size=32 --enable-mixed-chunk --cuda-graph-bs-decode 1 2 --model-path m -x"
    assert as_written([*argv.split(), "--json-model-override-args", '{"a": null}']) == {
        "tp_size": 8,
        "page_size": 32,
        "enable_mixed_chunk": True,
        "cuda_graph_bs_decode": [1, 2],
        "model_path": ["m", "-x"],
        "json_model_override_args": {"a": None},
    }
    assert list(options(["serve", "--a", "--b=1"])) == [("--a", []), ("--b", ["1"])]


@pytest.mark.parametrize(
    "rest",
    [
        "-- --tp 8",
        "--tp 8",
        "-- sglang serve --tp 8",
        "-- python -m sglang.launch_server --tp 8",
        "-- /usr/bin/python3.12 -m sglang.launch_server --tp 8",
        "-- python3 /opt/sglang/launch_server.py --tp 8",
    ],
)
def test_a_pasted_command_is_taken(rest: str) -> None:
    assert gather.pasted(rest.split()) == (("--tp", "8"), {})
    assert gather.pasted(["--", rest.removeprefix("-- ")]) == (("--tp", "8"), {})  # quoted


def test_a_model_needs_no_option() -> None:
    found = ("--model-path", "a/b", "--tp", "8"), {"A": "1"}
    assert gather.pasted("-- env A=1 sglang serve a/b --tp 8".split()) == found


def test_a_quote_that_does_not_end_is_one_line() -> None:
    with pytest.raises(Glm53Error, match="check its quotes"):
        gather.pasted(["--", "sglang serve --model-path 'a b"])


def test_options_of_a_file_count(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "tp-size: 7\nenable_mixed_chunk: true\nlog-requests: false\ncuda-graph-bs: [1, 2]"
    )
    argv, _ = gather.pasted(["--", "sglang", "serve", "--tp-size", "8", "--config", str(file)])
    assert argv == (
        *("--tp-size", "7", "--enable-mixed-chunk", "--cuda-graph-bs", "1", "2"),
        *("--tp-size", "8"),
    )
    assert as_written(argv)["tp_size"] == 8


@pytest.mark.parametrize("content", [None, "- a", ": ["], ids=["no file", "a list", "no YAML"])
def test_a_file_of_options_that_cannot_be_read_is_one_line(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "c.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(Glm53Error, match="--config") as told:
        gather.pasted(["--", "--config", str(file)])
    assert "\n" not in str(told.value)


def test_a_name_that_is_none_is_one_line() -> None:
    with pytest.raises(Glm53Error, match="no repository's name"):
        gather.find_checkpoint("a b/c?d")


def test_no_command_is_none() -> None:
    assert gather.pasted([]) == (None, {})
    assert gather.pasted(["--"]) == (None, {})


def test_variables_before_the_program_count() -> None:
    argv, variables = gather.pasted("-- SGLANG_A=1 B=x=y sglang serve --tp 8".split())
    assert argv == ("--tp", "8") and variables == {"SGLANG_A": "1", "B": "x=y"}
    question = Question(argv=argv, variables=variables, ask_sglang=False)
    facts, _ = gather.gather(question)
    assert facts.environment["SGLANG_A"] == "1" and "PATH" in facts.environment


# --- gathering -----------------------------------------------------------------------------------


def answer(**changed: Any) -> Resolution:
    values: dict[str, Any] = {
        "args": {"tp_size": 8},
        "given": frozenset({"tp_size"}),
        "problem": "",
        "flag_names": frozenset({"--tp-size"}),
        "variables": frozenset({"SGLANG_X"}),
        "rows": {},
        "log": (),
        "version": "0",
    }
    return Resolution(**{**values, **changed})


def test_sglangs_own_resolution_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def resolve(argv: Any, config: Any, device: Any, environment: Any) -> Resolution:
        asked.append((argv, config["model_type"], device.name, device.count))
        return answer(problem="no such thing")

    monkeypatch.setattr("sglang_glm53.cookbook.resolve.resolve", resolve)
    argv = ("--model-path", "zai-org/GLM-5.3-not-here", "--tp", "8")
    facts, notes = gather.gather(Question(argv=argv, gpu="h200", count=4))
    monkeypatch.setattr(
        "sglang_glm53.cookbook.resolve.resolve", lambda *a: answer(args={}, problem="unrecognized")
    )
    refused, _ = gather.gather(Question(argv=argv, gpu="h200"))
    assert refused.args_problem == "unrecognized"
    assert refused.arg("tp_size") == 8, "the parser gave none: they count as written"
    assert asked == [(argv, "glm_moe_dsa", "NVIDIA H200", 4)]
    assert facts.args_problem == "no such thing" and facts.arg("tp_size") == 8
    assert facts.capability == (9, 0) and facts.gpus == 4 and facts.hardware.name == "h200"
    assert facts.driver_cuda is None, "another machine's driver"
    assert any("published config" in note for note in notes)


@pytest.mark.parametrize(
    ("model", "asked", "form"),
    [
        ("zai-org/GLM-5.3", (), "fp8"),
        ("zai-org/GLM-5.3-BF16", (), "bf16"),
        ("zai-org/GLM-5.3-BF16", ("--quantization", "fp8"), "fp8"),
        ("RadixArk/GLM-5.3-NVFP4", (), None),
        ("me/GLM-5.3-W4AFP8", ("--quantization", "w4afp8"), "w4afp8"),
        ("me/my-own-tune", (), None),
    ],
)
def test_a_checkpoint_elsewhere_has_the_precision_of_its_name(
    monkeypatch: pytest.MonkeyPatch, model: str, asked: tuple[str, ...], form: str | None
) -> None:
    monkeypatch.setattr(gather, "find_checkpoint", lambda model: None)
    argv = ("--model-path", model, "--tp", "8", "--mem-fraction-static", "0.85", *asked)
    facts, notes = gather.gather(Question(argv=argv, gpu="h200", ask_sglang=False))
    assert facts.quantization == form
    assert facts.precision == (form if form in ("bf16", "fp8") else None)
    assert ("quantization_config" in facts.raw_config) == (model != "zai-org/GLM-5.3-BF16")
    statuses = {result.rule.id: result.status for result in engine.run(RULES, facts)}
    fits = {"fp8": PASS, "bf16": FAIL}.get(form, SKIPPED)
    assert statuses["memory-does-not-fit"] == fits
    depend = ("memory-long-context", "memory-indexer-logits")
    assert all((statuses[name] == SKIPPED) == (fits == SKIPPED) for name in depend)
    assert (statuses["feature-stands-down"] == SKIPPED) == (form is None)
    assert any("in no form that is known" in note for note in notes) == (form is None)


@pytest.mark.parametrize(
    ("argv", "gpu", "warns"),
    [
        ("--model-path zai-org/GLM-5.3 --tp 8", None, True),
        ("--model-path zai-org/GLM-5.3", None, True),
        ("--model-path SMALL", None, False),
        ("--model-path SMALL --tp 2", None, True),
        ("--model-path SMALL --tp 2 --device cpu", None, False),
        ("--model-path zai-org/GLM-5.3 --tp 8", "h200", False),
    ],
)
def test_a_login_node_is_told_to_name_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: str, gpu: str | None, warns: bool
) -> None:
    small = {**config_json(), "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(small))
    find = gather.find_checkpoint
    monkeypatch.setattr(
        gather, "find_checkpoint", lambda model: None if "zai" in model else find(model)
    )
    monkeypatch.setattr("sglang_glm53.checks.machine.device", lambda: "cpu")
    words = tuple(argv.replace("SMALL", str(tmp_path)).split())
    facts, _ = gather.gather(Question(argv=words, gpu=gpu, ask_sglang=False))
    (row,) = (row for row in RULES if row.id == "judged-for-a-cpu")
    result = engine.check(row, facts)
    assert (result.status == WARN) == warns
    assert not warns or "--gpu h200" in result.cure


@pytest.mark.parametrize(
    ("changed", "warns"),
    [
        ({}, True),
        ({"tp_size": 1, "dp_size": 2}, True),
        ({"tp_size": 1, "pp_size": 2}, True),
        ({"moe_a2a_backend": "deepep"}, False),
        ({"device": "cpu"}, False),
        ({"environment": {"GLM53_SERVE": "stock"}}, False),
        ({"capability": (10, 0)}, False),
    ],
)
def test_several_gpus_are_told_where_ours_would_serve(changed: dict[str, Any], warns: bool) -> None:
    facts: dict[str, Any] = {
        "raw_config": config_json(), "device": "cuda", "capability": (9, 0), "environment": {},
        "versions": {"sglang": GPU_TESTED[-1]},
    }  # fmt: skip
    args: dict[str, Any] = {"device": "cuda", "tp_size": 8}
    for name, value in changed.items():
        (facts if name in facts and name != "device" else args)[name] = value
    (row,) = (row for row in RULES if row.id == "several-gpus-unmeasured")
    assert (engine.check(row, Facts.only(args=args, **facts)).status == WARN) == warns


def test_without_a_parser_to_ask_the_doctor_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: Any) -> Resolution:
        raise Glm53Error("SGLang's parser could not be asked: no module")

    monkeypatch.setattr("sglang_glm53.cookbook.resolve.resolve", resolve)
    argv = ("--model-path", "zai-org/GLM-5.3-not-here", "--tp", "8")
    facts, notes = gather.gather(Question(argv=argv, gpu="h200"))
    assert facts.arg("tp_size") == 8 and facts.args_problem is None
    assert any("could not be asked" in note for note in notes)


def test_quick_takes_options_as_written() -> None:
    facts, notes = gather.gather(Question(argv=("--tp", "8"), ask_sglang=False))
    assert facts.arg("tp_size") == 8 and facts.given == {"tp_size"}
    assert facts.args_problem is None and facts.flag_names is None
    assert any("as they are written" in note for note in notes)


def test_the_checkpoint_is_found_by_its_folder_and_the_override_is_put_in(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json()))
    argv = ("--model-path", str(tmp_path), "--json-model-override-args", '{"index_topk": 7}')
    facts, _ = gather.gather(Question(argv=argv, ask_sglang=False))
    assert facts.checkpoint == tmp_path and facts.config.index_topk == 7
    assert gather.find_checkpoint(str(tmp_path / "config.json")) == tmp_path


@pytest.mark.parametrize("model", ["/not/there", "./not", "~/not/there", "name"])
def test_a_folder_that_is_not_there_is_an_error(model: str) -> None:
    with pytest.raises(Glm53Error, match="no folder"):
        gather.find_checkpoint(model)


def test_a_broken_config_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Glm53Error, match="config.json: .*take config.json"):
        gather.gather(Question(model=str(tmp_path)))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(Glm53Error, match="a JSON object"):
        gather.gather(Question(model=str(tmp_path)))


def test_a_newer_kernel_package_is_a_warning_of_its_own_and_an_older_one_a_failure() -> None:
    """Each package is told by one rule."""
    pins = {"sglang-kernel": "==0.4.10", "torch": "==2.14.1"}
    for versions, failed, warned in (
        ({"sglang-kernel": "0.4.11", "torch": "2.14.1"}, set(), {"other-pins"}),
        ({"sglang-kernel": "0.4.9", "torch": "2.14.1"}, {"kernel-packages"}, set()),
        ({"sglang-kernel": "0.4.10", "torch": "2.14.0"}, set(), {"other-pins"}),
        ({"sglang-kernel": "0.4.10", "torch": "2.13.0"}, {"torch-version"}, set()),
    ):
        facts = Facts.only(versions=versions, pins=pins, modules=frozenset(), device="cuda")
        wanted = ("kernel-packages", "torch-version", "other-pins")
        results = engine.run([row for row in RULES if row.id in wanted], facts)
        assert {result.rule.id for result in results if result.status == FAIL} == failed
        assert {result.rule.id for result in results if result.status == WARN} == warned


# --- plugins of others ---------------------------------------------------------------------------


def test_a_plugin_that_defines_our_class_or_hooks_our_symbol_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "rival_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    symbol = "sglang.srt.model_loader.utils.get_model_architecture"
    point = Plugin("sglang.srt.plugins", "rival", "rival_plugin.x:register", "rival")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sglang_glm53.checks.packages.plugins", lambda: (point,))
    for source, found in (
        ("from sglang.srt.model_loader.utils import get_model_architecture", ()),
        ("class GlmMoeDsaForCausalLM(Base): ...", ("rival (rival): GlmMoeDsaForCausalLM",)),
        (f'register_hook("{symbol}", f)', (f"rival (rival): {symbol}",)),
    ):
        (package / "x.py").write_text(source)
        assert contested() == found


def test_plugins_whose_module_is_gone_are_told_without_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "halfway"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    info = tmp_path / "halfway-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halfway\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nhere = halfway:f\ngone = halfway.gone:f\nno = nowhere_at_all:f\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    problems = {p.name: p.problem for p in plugins() if p.distribution == "halfway"}
    assert problems == {
        "here": "",
        "gone": "there is no module halfway.gone",
        "no": "there is no module nowhere_at_all",
    }


def test_pins_are_those_of_the_installed_sglang() -> None:
    found = pins()
    assert found is not None and {"torch", "transformers", "sglang-kernel"} <= set(found)


def test_every_variable_of_ours_is_known() -> None:
    package = Path(cli.__file__).parent
    named: set[str] = set()
    for path in package.rglob("*.py"):
        named.update(re.findall(r"(?<![A-Z_])GLM53_[A-Z]+(?:_[A-Z]+)*", path.read_text()))
    assert {name for name in named if not name.endswith("_")} <= set(OUR_VARIABLES)


# --- the command ---------------------------------------------------------------------------------


def test_the_table_has_failures_first_and_one_line_a_rule() -> None:
    facts = Facts.only(gpus=2, versions={"sglang": "9"})
    rules = [
        rule(id="fine", condition=lambda facts: None),
        rule(id="unknown", reads=("device",)),
        rule(id="unknown-too", reads=("device",)),
        rule(id="odd", severity=WARN),
        rule(id="bad"),
    ]
    results = engine.run(rules, facts)
    for all_, passed in (
        (False, "pass  1 rule (--all names them)"),
        (True, "pass  fine: it is fine"),
    ):
        lines = table(results, facts, ["assumed"], all_=all_, columns=100).splitlines()
        assert lines[2].split() == ["note", "assumed"]
        assert lines[4:-2] == [
            "fail  bad: there are 2; take 2 out",
            "warn  odd: there are 2; take 2 out",
            passed,
            f"skip  2 rules: {UNKNOWN['device']}",
        ]
        assert lines[-1] == "1 fail, 1 warn, 1 pass, 2 skipped"
    assert "environment" not in "\n".join(lines)
    assert "environment  this machine's" in table(results, facts, [], here=False)


def test_long_lines_are_wrapped_below_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    long = rule(message="words of --some-long-option " * 20, id="odd")
    facts = Facts.only(gpus=2)
    results = engine.run([long], facts)
    for columns, wide in ((40, 60), (60, 60), (90, 90)):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = table(results, facts, ["a note " * 30]).splitlines()
        assert max(map(len, lines)) <= wide
        body = lines[lines.index("") + 1 : -2]
        assert len(body) > 2 and body[0].startswith("fail  odd: words")
        assert all(line.startswith("      ") and line[6] != " " for line in body[1:])
        assert not any(line.endswith("-") for line in body), "an option was cut"


@pytest.mark.parametrize(
    ("problem", "argv", "failed"),
    [
        ("unrecognized arguments: --bogus 1", "--bogus 1", {"flags-unknown"}),
        (
            "unrecognized arguments: --bogus --other",
            "--bogus --other",
            {"flags-unknown", "flags-refused"},
        ),
        (
            "argument --reasoning-parser: invalid choice: 'glm47'",
            "--reasoning-parser glm47",
            {"reasoning-parser-name"},
        ),
        ("argument --page-size: invalid int value", "--page-size x", {"flags-refused"}),
    ],
)
def test_one_mistake_is_told_once(problem: str, argv: str, failed: set[str]) -> None:
    words = tuple(argv.split())
    facts = Facts.only(
        argv=words, args=as_written(words), args_problem=problem,
        flag_names=frozenset({"--reasoning-parser", "--page-size"}),
    )  # fmt: skip
    results = once.without_repeats(engine.run(RULES, facts), facts)
    assert {result.rule.id for result in results if result.status == FAIL} == failed
    assert len(results) == len(RULES)


@pytest.mark.parametrize(
    ("argv", "instead"),
    [
        ("--dp 8 --enable-dp-attention", "use --attn-dp-size 8"),
        ("--dp-size=4 --enable-dp-attention", "use --attn-dp-size 4"),
        ("--disable-cuda-graph", "use --cuda-graph-backend-decode disabled --cuda"),
        ("--enable-dp-attention --dp", "use --attn-dp-size"),
    ],
)
def test_a_deprecated_option_is_told_with_its_value(argv: str, instead: str) -> None:
    (row,) = (row for row in RULES if row.id == "flags-deprecated")
    assert engine.check(row, Facts.only(argv=tuple(argv.split()))).cure.startswith(instead)


def test_json_has_every_rule_with_its_source() -> None:
    facts = Facts.only(gpus=2)
    content = as_json(engine.run([rule()], facts), facts, [])
    assert json.loads(json.dumps(content)) == content
    assert content["counts"] == {"fail": 1, "warn": 0, "skipped": 0, "pass": 0}
    assert content["results"] == [
        {
            "id": "a-rule",
            "title": "it is fine",
            "status": "fail",
            "message": "there are 2",
            "cure": "take 2 out",
            "details": [],
            "source": ["C"],
        }
    ]


def test_without_arguments_it_is_quick_and_imports_nothing_heavy() -> None:
    """In processor time: the machine may be busy."""
    program = (
        "import sys, time\n"
        "from sglang_glm53.cli import main\n"
        "code = main(['doctor', '--json'])\n"
        "heavy = {'torch', 'sglang', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert time.process_time() < 5, time.process_time()\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert {result["id"] for result in content["results"]} == {row.id for row in RULES}


def test_a_failure_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--quick", "--gpu", "h200", "--", "--tp-size", "16", "--nnodes", "1"]
    assert cli.main(arguments) == 1
    out = capsys.readouterr().out
    assert "fail  ranks-without-gpus" in out and "there are 8" in out
    assert cli.main([*arguments[:-1], "2", "--dist-init-addr", "h:1"]) == 0


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["doctor", "--model", "/not/there"],
        ["doctor", "--gpu", "h900"],
        ["doctor", "--gpu", "h200", "--gpus", "0"],
        ["check", "/not/there"],
    ):
        assert cli.main(arguments) == 1
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.fixture(scope="module")
def resolved() -> dict[str, Any]:
    """What the doctor says of a published command, resolved by SGLang's own parser."""
    command = (
        "sglang serve --model-path zai-org/GLM-5.3 --tp 8 --dp 8 --enable-dp-attention "
        "--moe-a2a-backend deepep --speculative-algorithm EAGLE --speculative-num-steps 1 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 2 --mem-fraction-static 0.85 "
        "--chunked-prefill-size 32768 --max-running-requests 256 --page-size 32 "
        "--tool-call-parser glm45 --reasoning-parser glm45"
    )
    done = subprocess.run(
        [*MODULE, "doctor", "--json", "--gpu", "h200", "--", *command.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    return {result["id"]: result for result in json.loads(done.stdout)["results"]}


def test_a_published_command_gets_its_warnings(resolved: dict[str, Any]) -> None:
    """SGLang splits the chunk over eight groups, takes page 64, and calls two options old."""
    ours = {"flags-deprecated", "kv-page-size", "tool-call-parser", "feature-stands-down"}
    assert {name for name in ours if resolved[name]["status"] == "warn"} == ours
    assert "32 is replaced by 64" in resolved["kv-page-size"]["message"]


def test_a_published_command_passes_what_is_right(resolved: dict[str, Any]) -> None:
    right = ("flags-unknown", "flags-refused", "small-prefill-chunks", "mtp-few-requests")
    assert {name: resolved[name]["status"] for name in right} == dict.fromkeys(right, "pass")


# --- inside a server's start ---------------------------------------------------------------------


class HfConfig:
    def to_dict(self) -> dict[str, Any]:
        return config_json()


@pytest.fixture(autouse=True)
def not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_told", False)
    monkeypatch.delenv(preflight.VARIABLE, raising=False)


def start(**args: Any) -> None:
    preflight.check(SimpleNamespace(device="cpu", **args), HfConfig(), "not here")


def test_a_failure_ends_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(Glm53Error, match="nodes-without-address"):
        start(nnodes=2, reasoning_parser="glm45")
    told = [record.getMessage() for record in caplog.records]
    assert sum("--tool-call-parser is not given" in line for line in told) == 1
    assert not any("--reasoning-parser" in line for line in told)


def test_a_server_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        start()
        first = len(caplog.records)
        start(nnodes=2)
    assert first > 0 and len(caplog.records) == first


def test_warn_lets_a_failure_pass_and_says_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(preflight.VARIABLE, "warn")
    with caplog.at_level(logging.WARNING):
        start(nnodes=2)
    assert any("[nodes-without-address]" in record.getMessage() for record in caplog.records)


def test_off_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(preflight.VARIABLE, "off")
    monkeypatch.setattr(preflight, "facts_of", lambda *args: pytest.fail("it was asked"))
    start(nnodes=2)


def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(preflight.VARIABLE, "no")
    with pytest.raises(Glm53Error, match="GLM53_DOCTOR"):
        start()


def test_workers_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.multiprocessing, "parent_process", lambda: object())
    monkeypatch.setattr(preflight, "facts_of", lambda *args: pytest.fail("a worker was asked"))
    start(nnodes=2)


def test_a_rule_that_raises_stops_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preflight, "AT_START", [rule(id="broken", condition=lambda facts: 1 / 0)])
    monkeypatch.setattr(preflight, "facts_of", lambda *args: Facts.only(gpus=2))
    with caplog.at_level(logging.WARNING):
        start()
    assert any("broken: ZeroDivisionError" in record.getMessage() for record in caplog.records)


def test_only_sglangs_own_command_line_is_read() -> None:
    assert preflight.command_line(["/bin/sglang", "serve", "--tp", "8"]) == ("serve", "--tp", "8")
    assert preflight.command_line(["/x/launch_server.py", "--tp", "8"]) == ("--tp", "8")
    assert preflight.command_line(["my_program.py", "--tp", "8"]) is None
    assert preflight.command_line([]) is None


def test_what_the_server_checks_anyway_is_not_checked_twice() -> None:
    ids = {row.id for row in AT_START}
    assert "nodes-without-address" in ids and "mtp-default-steps" in ids
    assert not ids & {"catalog-drift", "config-garbage", "feature-stands-down", "flags-refused"}


# --- this machine --------------------------------------------------------------------------------


class Nvml:
    """NVIDIA's library as nvidia-ml-py shows it: two H200, a driver for CUDA 13.1."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=150_000_000_000)

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010


def test_an_nvidia_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    facts = Facts()
    assert (facts.device, facts.gpus, facts.gpu_name) == ("cuda", 2, "NVIDIA H200")
    assert facts.capability == (9, 0) and facts.driver_cuda == "13.1"
    assert facts.gpu_memory_bytes == 150_000_000_000 and facts.hardware.name == "h200"
    assert gather.this_machine().count == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert Facts().gpus == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b,MIG-c")
    assert Facts().gpus == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Facts().device != "cuda"


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(Nvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("no driver")

    monkeypatch.setitem(sys.modules, "pynvml", Missing())
    facts = Facts()
    assert facts.gpus is None and facts.driver_cuda is None and facts.hardware is None
    assert gather.this_machine().platform == "cpu"
