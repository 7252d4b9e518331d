"""`glm53 recipe check`: the verdicts, the table of renamed flags, and how a server is ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import fresh_process
import pytest

from sglang_glm53.checks.engine import Result
from sglang_glm53.checks.rule import Rule
from sglang_glm53.compat import flags
from sglang_glm53.compat.versions import SUPPORTED
from sglang_glm53.cookbook import check, recipe, resolved
from sglang_glm53.cookbook.resolve import Resolution, resolve
from sglang_glm53.errors import Glm53Error

NEWEST = SUPPORTED[-1]


def told(name: str) -> Resolution:
    """The resolution that resolved.json tells of, as SGLang would give it again."""
    kept = resolved.find(recipe.load(name), recipe.ALONE, NEWEST)
    assert kept is not None
    args = {**kept.args, "cuda_graph_config": {"decode": {"max_bs": None}}}
    args["cuda_graph_config"]["decode"]["max_bs"] = args.pop("decode_graph_max_bs")
    return Resolution(
        args=args,
        given=frozenset({"tp_size"}),
        problem="",
        flag_names=frozenset(),
        variables=frozenset({"SGLANG_KNOWN"}),
        rows=kept.rows,
        log=(),
        version=NEWEST,
    )


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch):
    """The finding for h200-latency, with SGLang's answer and the rules' verdicts replaced."""

    def find(answer: Resolution, *results: tuple[str, str], **changes: object) -> check.Finding:
        rules = [
            Result(Rule(name, "", status, (), lambda f: True, "", "", "", "", ()), status, "m", "c")
            for name, status in results
        ]
        monkeypatch.setattr("sglang_glm53.checks.engine.run", lambda *args: rules)
        monkeypatch.setattr(check, "resolve_all", lambda jobs, sglang=None: [answer for _ in jobs])
        one = replace(recipe.load("h200-latency"), **changes)
        (finding,) = check.check(check.cases([one], options=False), NEWEST)
        return finding

    return find


def test_a_recipe_that_sglang_takes_and_no_rule_minds_is_ok(verdict) -> None:
    assert verdict(told("h200-latency")).status == "ok"


def test_what_sglang_refuses_fails(verdict) -> None:
    found = verdict(replace(told("h200-latency"), problem="unrecognized arguments: --x"))
    assert found.status == "fail"
    assert found.lines == (f"SGLang {NEWEST} refuses it: unrecognized arguments: --x",)


def test_a_variable_that_sglang_does_not_have_fails(verdict) -> None:
    one = recipe.load("h200-latency")
    for name, status in (("SGLANG_UNKNOWN", "fail"), ("SGLANG_KNOWN", "ok"), ("OTHER", "ok")):
        servers = tuple(replace(server, environment={name: "1"}) for server in one.servers)
        assert verdict(told("h200-latency"), servers=servers).status == status


def test_what_is_told_and_no_longer_true_fails(verdict) -> None:
    answer = told("h200-latency")
    found = verdict(replace(answer, args={**answer.args, "kv_cache_dtype": "fp8_e4m3"}))
    assert found.status == "fail"
    assert "kv_cache_dtype='fp8_e4m3', not 'bfloat16'" in found.lines[0]
    found = verdict(replace(answer, rows={"stands down": ("LoRA",)}))
    assert found.status == "fail"
    assert "LoRA" in found.lines[0]


def test_rules_fail_warn_or_are_lived_with(verdict) -> None:
    answer = told("h200-latency")
    assert verdict(answer, ("a", "fail"), ("b", "warn")).status == "fail"
    assert verdict(answer, ("a", "warn")).lines == ("m; c [a]",)
    assert verdict(answer, ("a", "warn")).status == "warn"
    assert verdict(answer, ("a", "warn"), accepts={"a": "why"}).status == "ok"
    assert verdict(answer, (check.TOLD_ELSEWHERE, "warn")).status == "ok"


def test_a_claim_of_what_the_cache_holds_is_held_against_the_ledger(verdict) -> None:
    answer = told("h200-latency")
    why = recipe.load("h200-latency").why
    assert check.CLAIM.search(why["max-running-requests"])
    more = replace(answer, args={**answer.args, "max_running_requests": 80})
    (line,) = [line for line in verdict(more).lines if "is said to be" in line]
    assert "--max-running-requests 80" in line
    assert "23 requests of 9,216 tokens fit" in line
    other = {**why, "max-running-requests": "the published value"}
    assert not any("is said to be" in line for line in verdict(more, why=other).lines)
    claims = 0
    for name in recipe.names():
        one = recipe.load(name)
        for case in check.cases([one], options=False):
            kept = resolved.find(one, case.server.role, NEWEST)
            assert kept is not None
            assert check._claims(case, replace(answer, args=kept.args)) == [], case.title
            claims += bool(check.CLAIM.search(one.why["max-running-requests"]))
    assert claims >= 3


def test_a_package_that_is_missing_is_a_note_and_no_fault(verdict) -> None:
    found = verdict(told("h200-latency"), needs={"no-such-package": "a test", "pyyaml": "there"})
    assert found.status == "ok"
    assert found.notes == ("needs no-such-package, which is not installed here: a test",)


def test_warnings_that_all_live_with(verdict) -> None:
    answer = told("h200-latency")
    for name in recipe.common_accepts():
        assert verdict(answer, (name, "warn")).status == "ok"
    # A length that a recipe names has to fit.
    named = replace(answer, given=frozenset({"context_length"}))
    assert verdict(named, ("memory-long-context", "warn")).status == "warn"


def test_of_a_recipe_of_ones_own_the_check_says_who_serves_and_what_fits(verdict) -> None:
    answer = told("h200-latency")
    assert verdict(answer).says == ()
    serves, weights, tokens, *_ = verdict(answer, path=Path("h200-latency.yaml")).says
    assert serves.startswith("serves: ours: tensor parallelism")
    assert weights.startswith("weights 90.0 GiB a GPU")
    assert tokens.startswith("93,912 bytes a token: ")


def test_accepted_warnings_are_rules() -> None:
    from sglang_glm53.checks.rules import RULES

    known = {rule.id for rule in RULES}
    assert set(recipe.common_accepts()) <= known
    for name in recipe.names():
        assert set(recipe.load(name).accepts) <= known, name


def test_options_are_cases_of_their_own() -> None:
    found = check.cases([recipe.load("laptop"), recipe.load("h200-pd-nixl")])
    assert [case.title for case in found] == [
        "laptop",
        "laptop +exact",
        "laptop +mtp",
        "h200-pd-nixl (prefill)",
        "h200-pd-nixl (decode)",
    ]


# --- renamed flags ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"dp-size": 8, "enable-dp-attention": True}, {"attn-dp-size": 8}),
        ({"tp": 8, "dp": 8, "enable-dp-attention": True}, {"tp-size": 8, "attn-dp-size": 8}),
        ({"tp": 8, "dp": 2}, {"tp-size": 8, "dp-size": 2}),  # replicas, not attention groups
        ({"cuda-graph-max-bs": 16}, {"cuda-graph-max-bs-decode": 16}),
        ({"cuda-graph-bs": (1, 2)}, {"cuda-graph-bs-decode": (1, 2)}),
        (
            {"disable-cuda-graph": True},
            {"cuda-graph-backend-decode": "disabled", "cuda-graph-backend-prefill": "disabled"},
        ),
        (
            {"enable-dsa-prefill-context-parallel": True,
             "dsa-prefill-cp-mode": "round-robin-split"},
            {"enable-prefill-cp": True, "cp-strategy": "interleave"},
        ),
        ({"nsa-prefill-cp-mode": "in-seq-split"}, {"cp-strategy": "zigzag"}),
        ({"nsa-decode-backend": "fa3"}, {"dsa-decode-backend": "fa3"}),
        ({"tool-call-parser": "glm45"}, {"tool-call-parser": "glm47"}),
        ({"tool-call-parser": "glm47"}, {"tool-call-parser": "glm47"}),
        (
            {"enable-flashinfer-allreduce-fusion": True},
            {"flashinfer-allreduce-fusion-backend": "auto"},
        ),
    ],
    ids=lambda value: "+".join(value),
)  # fmt: skip
def test_old_spellings_become_todays(old: dict, new: dict) -> None:
    assert flags.modern(old)[0] == new
    assert flags.modern(new)[0] == new
    for version in SUPPORTED:
        assert flags.translate(old, version) == new


def test_a_spelling_that_a_version_lacks_is_written_as_it_has_it() -> None:
    written = {"tp-size": 8, "enable-hicache": True, "port": 1}
    assert flags.translate(written, "0.5.23") == written
    older = flags.translate(written, "0.5.22")
    assert older == {"tp-size": 8, "enable-hierarchical-cache": True, "port": 1}
    assert list(older) == ["tp-size", "enable-hierarchical-cache", "port"]


def test_recipes_are_written_in_todays_spelling() -> None:
    for name in recipe.names():
        for server in recipe.load(name).servers:
            assert flags.modern(server.arguments) == (server.arguments, []), name


# --- asking SGLang ---------------------------------------------------------------------------


def test_a_folder_that_holds_no_sglang_gets_one_line(tmp_path: Path) -> None:
    from sglang_glm53.cookbook.devices import device

    with pytest.raises(Glm53Error, match="holds no SGLang; unpack a wheel there"):
        resolve(["--help"], {}, device("h200"), sglang=tmp_path)


def test_a_process_that_dies_gets_one_line(tmp_path: Path) -> None:
    from sglang_glm53.cookbook.devices import device

    place = tmp_path / "sglang" / "srt" / "server_args.py"
    place.parent.mkdir(parents=True)
    place.write_text("")
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('broken install')")
    with pytest.raises(Glm53Error, match="could not be asked: RuntimeError: broken install"):
        resolve(["--help"], {}, device("cpu"), sglang=tmp_path)


def test_a_pretended_gpu_answers_and_kernels_are_stood_in_for() -> None:
    done = fresh_process.run("""
        from sglang_glm53.compat import pretend
        from sglang_glm53.cookbook.devices import device
        for kind in ("b200", "mi355x"):
            pretend.before_import(device(kind, 4))
            import torch
            print(torch.cuda.get_device_capability(), torch.cuda.device_count(),
                  torch.cuda.get_device_name(0), torch.version.hip)
        from sgl_kernel.moe import anything
        print(anything(1).more is not None)
    """)
    assert done.stdout.splitlines() == [
        "(10, 0) 4 NVIDIA B200 None",
        "(9, 5) 4 AMD Instinct MI355X 7.0",
        "True",
    ], done.stderr


# --- ending a server -------------------------------------------------------------------------

SERVER = """
import os, signal, sys, time
if os.fork() == 0:  # a child that does not want to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, f"child {{os.getpid()}}\\n".encode())
    time.sleep(60)
os.write(1, f"server {{os.getpid()}} {{os.environ['MARK']}}\\n".encode())
time.sleep({seconds})
sys.exit({code})
"""


def start(seconds: float, code: int = 0) -> subprocess.Popen[str]:
    """`recipe_server.run` in a process of its own, on a server with a stubborn child."""
    server = SERVER.format(seconds=seconds, code=code)
    program = textwrap.dedent(f"""
        import sys
        from sglang_glm53.commands import recipe_server
        from sglang_glm53.cookbook.command import Command
        command = Command("server", ("python",), ("-c", {server!r}), {{"MARK": "set"}})
        sys.exit(recipe_server.run(command, [sys.executable]))
    """)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def pids(process: subprocess.Popen[str]) -> list[int]:
    """The server's and its child's, once both run."""
    assert process.stdout is not None
    lines = sorted(process.stdout.readline().split() for _ in range(2))
    assert [line[0] for line in lines] == ["child", "server"]
    assert lines[1][2] == "set"
    return [int(line[1]) for line in lines]


def gone(found: list[int]) -> bool:
    """Whether none of them runs, within some seconds."""
    for _ in range(100):
        alive = [pid for pid in found if Path(f"/proc/{pid}/stat").exists()]
        if all(Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z" for pid in alive):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("ending", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_leaves_no_process(ending: signal.Signals, code: int) -> None:
    process = start(seconds=60)
    found = pids(process)
    process.send_signal(ending)
    assert process.wait(30) == code
    assert gone(found)


def test_the_servers_own_end_is_told_and_leaves_no_process() -> None:
    process = start(seconds=0.2, code=7)
    found = pids(process)
    assert process.wait(30) == 7
    assert gone(found)
