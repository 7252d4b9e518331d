"""Recipes: their schema, their commands, and what is told of them; without SGLang."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from sglang_glm53 import cli
from sglang_glm53.compat.versions import SUPPORTED
from sglang_glm53.cookbook import docs, recipe, resolved, show
from sglang_glm53.cookbook.devices import device, kinds
from sglang_glm53.cookbook.expect import Expected
from sglang_glm53.cookbook.wheel import version_in
from sglang_glm53.errors import Glm53Error
from sglang_glm53.features import FEATURES, STANDS_DOWN

NAMES = recipe.names()
NEWEST = SUPPORTED[-1]
WANTED = (
    *("h200-latency", "h200-balanced", "h200-throughput", "h200-long-context", "h200x2-bf16"),
    *(f"{gpu}-{form}-latency" for gpu in ("b200", "b300", "gb300") for form in ("fp8", "nvfp4")),
    *("mi300x-latency", "mi355x-latency", "h200-pd-mooncake", "h200-pd-nixl"),
    *("h200-hicache", "h200-prefill-cp", "laptop"),
)

MINIMAL = {
    "name": "mine",
    "summary": "a test",
    "model": "zai-org/GLM-5.3",
    "weights": "fp8",
    "hardware": {"gpu": "h200", "gpus": 8},
    "sglang": [NEWEST],
    "arguments": {"tp-size": 8, "sleep-on-idle": True},
    "why": {"sleep-on-idle": "a test"},
    "sources": ["this test"],
}


def written(folder: Path, **changes: object) -> Path:
    """A recipe file: the smallest one, changed."""
    content = {**MINIMAL, **changes}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    return path


# --- the shipped recipes ---------------------------------------------------------------------


def test_every_deployment_that_is_promised_has_a_recipe() -> None:
    assert set(WANTED) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_meets_its_schema_and_is_honest_about_what_was_run(name: str) -> None:
    found = recipe.load(name)
    assert set(found.sglang) == set(SUPPORTED)
    assert found.sources
    for server in found.servers:
        assert server.hardware.gpu in kinds()
        # What a cookbook's reader would forget: both parsers, or tool calls stay as text.
        assert server.arguments["tool-call-parser"] == "glm47"
        assert server.arguments["reasoning-parser"] == "glm45"
    for run in found.verified:
        assert run.sglang in SUPPORTED
    # Nobody has had eight GPUs here.
    assert show.run_here(found).startswith("yes" if name == "laptop" else "no")
    for run in found.parts:
        assert run.sglang in SUPPORTED
        assert "itself was not run here" in run.result
        # The part is named with its layers and the file that has the figures.
        (file,) = re.findall(r"\((docs/\S+)\)", run.part)
        assert (docs.TARGET.parents[1] / file).is_file()
        assert re.search(r"\d+ layers", run.part)


def test_mtp_has_the_steps_that_are_published() -> None:
    def steps(name: str) -> tuple[object, ...]:
        arguments = recipe.load(name).server().arguments
        return tuple(
            arguments[f"speculative-{part}"]
            for part in ("num-steps", "eagle-topk", "num-draft-tokens")
        )

    assert steps("h200-latency") == (5, 1, 6)
    assert steps("h200-balanced") == steps("h200-throughput") == (1, 1, 2)


def test_what_is_told_of_the_recipes_covers_each_server_and_version_and_nothing_else() -> None:
    told = json.loads(resolved.FILE.read_text())
    expected = {
        name: {s.role: set(recipe.load(name).sglang) for s in recipe.load(name).servers}
        for name in NAMES
    }
    found = {
        name: {role: set(versions) for role, versions in roles.items()}
        for name, roles in told.items()
    }
    assert found == expected
    rows = {row.name for row in FEATURES}
    for name in NAMES:
        for server in recipe.load(name).servers:
            for version in SUPPORTED:
                entry = resolved.find(recipe.load(name), server.role, version)
                assert entry is not None
                assert {row for names in entry.rows.values() for row in names} <= rows
                assert (entry.serves == "ours") == (not entry.rows.get(STANDS_DOWN))
                # A flag that the recipe sets is what SGLang goes on with.
                assert entry.args["tp_size"] == server.arguments.get("tp-size", 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_figures_are_the_ledgers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`glm53 ledger` with the arguments that are told gives the figures that are told."""
    one = recipe.load(name)
    for server in one.servers:
        found = show.memory(one, server, NEWEST)
        if isinstance(found, str):
            assert one.weights == "nvfp4" or server.hardware.gpu == "cpu"
            continue
        if not found.exact:
            assert server.arguments["attn-cp-size"] > 1
            assert "no context parallelism" in show.memory_lines(found)[-1]
            continue
        program, *words = show.ledger_command(found).split()
        assert (program, show.memory_lines(found)[-1]) == (
            "glm53",
            f"({' '.join(['glm53', *words])})",
        )
        assert cli.main([*words, "--json"]) == 0
        figures = {row["name"]: row["value"] for row in _rows(json.loads(capsys.readouterr().out))}
        assert found.tokens == figures["pool_tokens"]
        assert found.weights_bytes == int(figures["stored_bytes"])
        assert found.fits[9216] == figures["concurrent"]


def _rows(value: object) -> list[dict[str, object]]:
    """Every object with a name and a value in some JSON."""
    if isinstance(value, dict):
        own = [value] if {"name", "value"} <= set(value) else []
        return own + [row for each in value.values() for row in _rows(each)]
    if isinstance(value, list):
        return [row for each in value for row in _rows(each)]
    return []


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.endswith("fp8-latency")] + ["h200-latency"]
)
def test_what_a_step_with_mtp_costs_is_the_ledgers(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason of --speculative-num-steps names a command and its figure."""
    why = recipe.load(name).why["speculative-num-steps"]
    (words,) = re.findall(r"`glm53 (ledger [^`]+)`", why)
    assert cli.main([*words.split(), "--json"]) == 0
    figures = {row["name"]: row["value"] for row in _rows(json.loads(capsys.readouterr().out))}
    assert f"up to {figures['break_even_accept']:.1f} times" in why
    slices = json.loads((docs.TARGET.parent / "benchmarks" / "slice.json").read_text())["rows"]
    ours = {
        row["work"]: row["ours_ms"] for row in slices if row["batch"] == 1 and row["layers"] == 78
    }
    assert f"it took {ours['mtp_step']:.1f} ms against {ours['decode']:.1f}" in why


def test_the_longest_context_leaves_room_for_a_wrong_estimate() -> None:
    one = recipe.load("h200-long-context")
    found = show.memory(one, one.server(), NEWEST)
    assert isinstance(found, Expected)
    assert 0.83 < one.server().arguments["context-length"] / found.tokens < 0.87


def test_a_router_is_a_package_of_its_own_and_what_differs_is_told() -> None:
    for name in NAMES:
        one = recipe.load(name)
        assert ("sglang-router" in one.needs) == bool(one.router)
        assert not one.router or one.differs
    assert "pip install sglang-router" in show.text(recipe.load("h200-pd-nixl"), NEWEST)
    assert "--disable-circuit-breaker" in show.text(recipe.load("h200-pd-nixl"), NEWEST)


def test_a_million_tokens_need_two_machines() -> None:
    def longest(name: str) -> int:
        one = recipe.load(name)
        found = show.memory(one, one.server(), NEWEST)
        assert isinstance(found, Expected)
        return found.fits[1_048_576]

    assert longest("h200-long-context") == 0
    assert longest("h200x2-long-context") == 1


def test_a_context_that_is_promised_fits() -> None:
    for name in NAMES:
        one = recipe.load(name)
        for server in one.servers:
            found, length = show.memory(one, server, NEWEST), server.arguments.get("context-length")
            if isinstance(found, Expected) and length is not None:
                assert length <= found.tokens, name


def test_the_document_is_the_recipes() -> None:
    assert docs.TARGET.read_text(encoding="utf-8") == docs.build(NEWEST), (
        "docs/recipes.md is stale: python -m sglang_glm53.cookbook.docs"
    )


# --- commands --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_run_as_pasted(name: str, tmp_path: Path) -> None:
    """A shell gets from the text exactly the words that are checked against SGLang's parser."""
    one = recipe.load(name)
    for program in ("sglang", "glm53", "python"):
        stub = tmp_path / program
        stub.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
        stub.chmod(0o755)
    addresses = {"NODE0": "10.0.0.1", "PREFILL": "10.0.0.2", "DECODE": "10.0.0.3"}
    expected = [
        word
        for command in show.commands(one, NEWEST, addresses=addresses)
        for word in (*command.program[1:], *command.argv)
    ]
    if one.model == recipe.MINIATURE:
        expected = ["tiny", "miniature", *expected]
    done = subprocess.run(
        ["bash", "-euc", show.script(one, NEWEST)],
        env={**addresses, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == expected


def test_an_address_that_is_not_set_stops_the_shell() -> None:
    text = show.script(recipe.load("h200x2-bf16"), NEWEST)
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert "NODE0: set it to the address of that machine" in done.stderr


def test_several_machines_get_a_command_each() -> None:
    found = show.commands(recipe.load("h200x2-bf16"), NEWEST, addresses={"NODE0": "10.0.0.1"})
    ends = [command.argv[-6:] for command in found]
    assert ends == [
        ("--nnodes", "2", "--node-rank", node, "--dist-init-addr", "10.0.0.1:20000")
        for node in ("0", "1")
    ]


def test_prefill_decode_and_router_fit_together() -> None:
    addresses = {"PREFILL": "10.0.0.2", "DECODE": "10.0.0.3"}
    found = show.commands(recipe.load("h200-pd-mooncake"), NEWEST, addresses=addresses)
    assert [command.title for command in found] == ["prefill", "decode", "router"]
    prefill, decode, router = (" ".join(command.argv) for command in found)
    assert "--disaggregation-mode prefill --disaggregation-bootstrap-port 8998" in prefill
    assert "--disaggregation-mode decode" in decode
    for flag in ("kv-cache-dtype", "speculative-num-steps", "disaggregation-transfer-backend"):
        values = [re.search(rf"--{flag} (\S+)", text)[1] for text in (prefill, decode)]
        assert values[0] == values[1]
    assert router.endswith("--prefill http://10.0.0.2:30000 8998 --decode http://10.0.0.3:30000")


def test_options_are_added_and_unknown_ones_are_refused() -> None:
    one = recipe.load("laptop")
    assert one.with_options(("exact",)).server().arguments["dtype"] == "float32"
    with pytest.raises(Glm53Error, match=r"laptop has no option 'fast' \(exact, mtp\)"):
        one.with_options(("fast",))


# --- the schema ------------------------------------------------------------------------------


def test_a_recipe_of_ones_own_is_read(tmp_path: Path) -> None:
    one = recipe.load(str(written(tmp_path)))
    assert one.server() == recipe.Server(
        "server", recipe.Hardware("h200", 8), {"tp-size": 8, "sleep-on-idle": True}, {}
    )
    assert "glm53 recipe check" in show.serves(one, one.server(), NEWEST)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"name": "other"}, "name is 'other', but the file is mine.yaml"),
        ({"summary": None}, "summary is missing; give a text"),
        ({"weights": "int4"}, "weights is 'int4'; use one of fp8, bf16, nvfp4"),
        ({"sglang": ["0.4.0"]}, "sglang lists 0.4.0; use"),
        ({"sglang": []}, "sglang lists nothing; use"),
        ({"sources": "me"}, "sources must be a list of texts"),
        ({"speed": 9}, "speed is no field; there are name, summary"),
        ({"arguments": {"dtype": "bfloat16"}}, "why.dtype is missing"),
        ({"arguments": {"--tp-size": 8}, "why": {"--tp-size": "x"}}, "without dashes"),
        ({"arguments": {"tp-size": None}}, "arguments.tp-size is None"),
        ({"arguments": {"tp-size": False}}, "arguments.tp-size is False"),
        ({"arguments": ["tp-size"]}, "arguments must hold named values"),
        ({"environment": {"A": True}, "why": {"A": "x"}}, 'environment.A is True; quote it ("1")'),
        ({"hardware": {"gpu": "abacus"}}, "hardware.gpu is 'abacus'; use one of cpu, h100"),
        ({"hardware": {"gpus": 8}}, "hardware must have gpu, gpus"),
        ({"hardware": {"gpu": "h200", "gpus": "8"}}, "gpus and nodes are numbers"),
        ({"verified": [{"date": "today"}]}, "verified[0] must have exactly date, sglang"),
        ({"router": {"policy": "random"}, "why": {"policy": "x"}}, "router needs servers"),
        ({"servers": {"prefill": {"flags": {}}}}, "servers.prefill.flags is no field"),
    ],
    ids=lambda value: value[:24].replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_mistake_gets_one_line(tmp_path: Path, changes: dict[str, object], line: str) -> None:
    changes = {**changes, "why": {**MINIMAL["why"], **changes.get("why", {})}}
    path = written(tmp_path, **changes)
    with pytest.raises(Glm53Error) as caught:
        recipe.load(str(path))
    assert str(caught.value).startswith(str(path))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_yaml_gets_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: [")
    with pytest.raises(Glm53Error, match=r"mine\.yaml: while parsing"):
        recipe.load(str(path))


# --- devices, wheels, the command --------------------------------------------------------------


def test_devices_have_the_memory_of_the_ledger() -> None:
    for kind in kinds():
        found = device(kind)
        assert (found.memory_bytes > 0) == (kind != "cpu")
        assert (found.platform == "rocm") == kind.startswith("mi")
    with pytest.raises(Glm53Error, match="no GPU 'abacus'; use one of cpu, h100"):
        device("abacus")


def test_a_folder_without_sglang_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(Glm53Error, match="holds no SGLang; unpack a wheel there"):
        version_in(tmp_path)
    (tmp_path / "sglang-0.4.0.dist-info").mkdir()
    with pytest.raises(Glm53Error, match=r"holds SGLang 0\.4\.0; recipes are held against"):
        version_in(tmp_path)
    (tmp_path / "sglang-0.4.0.dist-info").rename(tmp_path / f"sglang-{NEWEST}.dist-info")
    assert version_in(tmp_path) == NEWEST


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipe", "list"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "HARDWARE", "SERVES", "RUN", "HERE", "FOR"]
    assert [line.split()[0] for line in lines] == NAMES
    for width in (60, 80, 120):
        lines = show.table([recipe.load(name) for name in NAMES], NEWEST, width)
        assert max(map(len, lines)) <= width
        assert lines[1 + NAMES.index("laptop")].split()[:5] == [
            "laptop",
            "no",
            "GPU",
            "ours",
            "yes",
        ]
    assert cli.main(["recipe", "list", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == NAMES
    assert cli.main(["recipe", "show", "h200-latency", "--sglang", NEWEST]) == 0
    out = capsys.readouterr().out
    one = recipe.load("h200-latency")
    fits = show.memory(one, one.server(), NEWEST)
    assert isinstance(fits, Expected)
    tokens = f"{fits.tokens:,} tokens"
    ours = "ours: tensor parallelism (tested with 2 ranks on a CPU)"
    for part in ("--tp-size 8", ours, tokens, "not run here", "TPOT 3.71 ms"):
        assert part in out
    assert cli.main(["recipe", "show", "h200-latency", "--sglang", NEWEST, "--script"]) == 0
    assert capsys.readouterr().out.startswith("sglang serve \\\n  --model-path zai-org/GLM-5.3 ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("show", "h200-latancy"), "no recipe 'h200-latancy'; do you mean h200-latency?"),
        (("show", "common"), "no recipe 'common'"),
        (("show", "laptop", "--with", "wings"), "has no option 'wings'"),
        (("show", "h200x2-bf16", "--address", "NODE0"), "write NAME=HOST"),
        (("show", "laptop", "--address", "NODE0=a"), "recipe laptop asks for no address"),
        (("show", "h200-pd-nixl", "--address", "PREFIL=a"), "asks for PREFILL, DECODE"),
        (("show", "h200-pd-nixl", "--script"), "name a role, one of prefill, decode, router"),
        (("show", "h200x2-bf16", "--script"), "runs on 2 machines; name one: --node 0 to --node 1"),
        (("show", "h200x2-bf16", "--role", "server"), "--role and --node are for --script"),
        (("run", "h200-pd-nixl"), "name a role, one of prefill, decode, router (--role)"),
        (("run", "h200x2-bf16"), "runs on 2 machines; name one: --node 0 to --node 1"),
        (("run", "h200-latency", "--role", "router"), "has no router"),
        (("run", "h200-latency", "--node", "1"), "has 1 machine; --node counts from 0"),
        (("run", "h200-pd-nixl", "--role", "router"), "needs an address: --address PREFILL=HOST"),
        (("check", "laptop", "--sglang", "/nowhere"), "/nowhere holds no SGLang"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_command_gets_one_line(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["recipe", *arguments]) == 1
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1


def test_a_script_is_for_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for name, chosen in (
        ("h200x2-bf16", ["--node", "1"]),
        ("h200-pd-nixl", ["--role", "decode"]),
        ("h200-pd-nixl", ["--role", "router"]),
    ):
        assert cli.main(["recipe", "show", name, "--script", "--sglang", NEWEST, *chosen]) == 0
        out = capsys.readouterr().out
        assert len(re.findall(r"^(?:sglang serve|python -m)", out, re.MULTILINE)) == 1
        assert "#" not in out
    assert out.startswith("python -m sglang_router.launch_router")


def test_run_starts_the_command_with_what_follows_the_dashes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []
    monkeypatch.setattr(
        "sglang_glm53.commands.recipe_server.run", lambda *found: started.append(found) or 0
    )
    words = ["recipe", "run", "h200-pd-nixl", "--role", "router", "--address", "PREFILL=1.1.1.1"]
    words += ["--address", "decode=2.2.2.2", "--", "--log-level", "debug"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(words) == 1
    assert "pip install sglang-router" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert cli.main(words) == 0
    ((command, program),) = started
    assert program[1:] == ["-m", "sglang_router.launch_router"]
    assert command.argv[-7:-2] == (
        *("--prefill", "http://1.1.1.1:30000", "8998", "--decode", "http://2.2.2.2:30000"),
    )
    assert command.argv[-2:] == ("--log-level", "debug")


def test_a_recipe_for_gpus_does_not_start_without(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_glm53.checks.machine.device", lambda: "cpu")
    assert cli.main(["recipe", "run", "h200-latency"]) == 1
    assert "needs 8 x h200, and this machine has no GPU" in capsys.readouterr().err
    monkeypatch.setattr("sglang_glm53.checks.machine.device", lambda: "cuda")
    monkeypatch.setattr("sglang_glm53.checks.machine.gpus", lambda: 2)
    assert cli.main(["recipe", "run", "h200-latency"]) == 1
    assert "needs 8 GPUs, and this machine shows 2" in capsys.readouterr().err
