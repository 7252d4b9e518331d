"""`glm53 trace` without SGLang: what torch's hooks see, and recordings beside the ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_glm53 import cli
from sglang_glm53.commands.trace import render
from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger.collectives import Rows, collectives
from sglang_glm53.ledger.topology import Topology
from sglang_glm53.tiny.options import TinyOptions, config_json
from sglang_glm53.trace import run as running
from sglang_glm53.trace.compare import compare, outside, read
from sglang_glm53.trace.run import Run, Traced, server_arguments

SPECIAL = dict.fromkeys(("<|endoftext|>", "<|user|>", "<|observation|>"), 0)
CONFIG = Glm53Config.from_hf(config_json(TinyOptions(), SPECIAL))
TP2 = Topology(tp=2, weights="bf16", kv="bf16", device="cpu")
DP2 = Topology(tp=2, dp=2, weights="bf16", kv="bf16", device="cpu")


# --- the recorder --------------------------------------------------------------------------------

TWO_RANKS = """
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
from sglang_glm53.trace.recorder import Recorder

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
alone = [dist.new_group([each]) for each in range(2)][rank]
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

class Body(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(8, 6, bias=False)

    def forward(self, ids, batch):
        y = self.projection(torch.ones(4, 8))
        dist.all_reduce(y)
        dist.all_reduce(y, group=alone)  # of one rank: nothing is sent
        gather(torch.empty(8, 6), y)
        dist.all_gather([torch.empty(4, 6) for _ in range(2)], y)
        scatter(torch.empty(2, 6), y)
        return y

class LogitsProcessor(torch.nn.Module):
    def forward(self, x):
        dist.all_reduce(x)
        return x

Recorder(folder).install()
batch = SimpleNamespace(
    forward_mode=SimpleNamespace(name="DECODE"), input_ids=torch.ones(4), batch_size=4,
    seq_lens_cpu=torch.tensor([3, 9]), global_num_tokens_cpu=[4, 4],
)
body, head = Body(), LogitsProcessor()
dist.all_reduce(torch.ones(5))  # before the first pass: the recorder sleeps
for _ in range(2):
    head(body(torch.ones(4), batch))
    dist.all_reduce(torch.ones(3))
dist.barrier()
dist.destroy_process_group()
"""


def test_the_recorder_sees_what_two_ranks_send(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", TWO_RANKS]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    found = read(tmp_path)
    assert [passes[0]["rank"] for passes in found] == [0, 1]
    for first, second in found:
        kinds = [(each["kind"], each["shape"], each["bytes"]) for each in first["collectives"]]
        assert kinds == [
            ("all-reduce", [4, 6], 96),
            ("all-gather", [8, 6], 192),
            ("all-gather", [8, 6], 192),
            ("reduce-scatter", [4, 6], 96),
            ("all-reduce", [4, 6], 96),
        ]
        assert all(each["ranks"] == [0, 1] for each in first["collectives"])
        assert first["products"] == [["projection", 4, 8, 6]]
        assert (first["mode"], first["rows"], first["longest"]) == ("DECODE", 4, 9)
        assert first["outside"] == [] and second["collectives"] == first["collectives"]
    assert outside(found) == {"all-reduce 3 float32, 12 B": 2}


# --- recordings beside the ledger ----------------------------------------------------------------


def recorded(
    topology: Topology, kind: str, rows: tuple[int, ...], *, rank: int = 0, **changes: Any
) -> dict[str, Any]:
    """A pass as it would be recorded if the ledger were right."""
    counted = collectives(CONFIG, topology, kind, Rows(rows, rows))  # type: ignore[arg-type]
    mode, model = {"decode": ("DECODE", "GlmModel"), "draft": ("DECODE", "GlmNextNModel")}[kind]
    return {
        "model": model,
        "mode": mode,
        "rows": max(rows),
        "requests": max(rows),
        "longest": 300,
        "rows_by_rank": list(rows) if topology.dp > 1 else None,
        "logits_by_rank": list(rows) if topology.dp > 1 else None,
        "rank": rank,
        "collectives": [
            {
                "kind": row.kind,
                "ranks": list(range(row.ranks)),
                "shape": list(row.shape),
                "dtype": "bfloat16",
                "bytes": row.bytes.value,
            }
            for row in counted
            for _ in range(row.count)
        ],
        "products": [],
        "outside": [],
        **changes,
    }


def sent(compared: Any) -> list[Any]:
    return [row for row in compared.collectives if not row.equal]


@pytest.mark.parametrize(("topology", "rows"), [(TP2, (3,)), (DP2, (3, 2))])
@pytest.mark.parametrize("kind", ["decode", "draft"])
def test_what_the_ledger_counts_is_equal(
    topology: Topology, rows: tuple[int, ...], kind: str
) -> None:
    ranks = [[recorded(topology, kind, rows, rank=rank)] * 2 for rank in range(2)]
    (found,) = compare(ranks, CONFIG, topology)
    assert (found.kind, found.rows, found.times) == (kind, rows, 2)
    assert found.collectives and not sent(found)


def test_what_is_missing_or_added_differs() -> None:
    one = recorded(TP2, "decode", (3,))
    missing = {**one, "collectives": one["collectives"][1:]}
    (found,) = compare([[missing], [one]], CONFIG, TP2)
    (row,) = sent(found)
    assert row.counted == row.ran + 1 and "embedding" in row.what
    more = {"kind": "broadcast", "ranks": [0, 1], "shape": [7], "dtype": "int64", "bytes": 56}
    (found,) = compare([[{**one, "collectives": [*one["collectives"], more]}]], CONFIG, TP2)
    (row,) = sent(found)
    assert (row.counted, row.ran) == (0, 1) and "not in the ledger" in row.what
    smaller = [{**each, "bytes": each["bytes"] // 2} for each in one["collectives"]]
    (found,) = compare([[{**one, "collectives": smaller}]], CONFIG, TP2)
    assert not any(row.equal for row in found.collectives)


def test_matrix_products_are_compared_by_shape() -> None:
    products = []
    for layer in range(8):
        names = ["fused_qkv_a_proj_with_mqa", "q_b_proj", "o_proj"]
        sizes = [(256, 128 + 512 + 64), (128, 2 * 128), (2 * 64, 256)]
        products += [
            [f"layers.{layer}.self_attn.{name}", 3, *size]
            for name, size in zip(names, sizes, strict=True)
        ]
    one = recorded(TP2, "decode", (3,), products=products)
    (found,) = compare([[one]], CONFIG, TP2)
    ran = {row.what: row for row in found.products}
    assert all(ran[name].equal for name in ("A projections", "q_b: queries", "o_proj"))
    assert ran["A projections"].ran == 8 and ran["A projections"].detail == "3 x 256 -> 704"
    assert ran["router"].ran == 0 and not ran["router"].equal
    products[0][3] += 64
    (found,) = compare([[recorded(TP2, "decode", (3,), products=products)]], CONFIG, TP2)
    wide = [row for row in found.products if row.what == "A projections"]
    assert sorted((row.counted, row.ran) for row in wide) == [(0, 1), (8, 7)]


@pytest.mark.parametrize(
    ("model", "device", "longest", "form"),
    [
        ("GlmModel", "cpu", 64, "expanded"),
        ("GlmModel", "cpu", 65, "absorbed"),
        ("GlmNextNModel", "cpu", 64, "absorbed"),
        ("GlmNextNModel", "cuda", 64, "expanded"),
    ],
)
def test_the_form_of_a_prefill_is_the_backends(
    model: str, device: str, longest: int, form: str
) -> None:
    topology = Topology(weights="bf16", kv="bf16", device=device)
    one = recorded(TP2, "decode", (3,), model=model, mode="EXTEND", longest=longest)
    (found,) = compare([[one]], CONFIG, topology)
    assert found.form == form


def test_an_idle_rank_takes_the_pass_from_the_others() -> None:
    busy = recorded(DP2, "decode", (1, 0))
    idle = {**busy, "mode": "IDLE", "rank": 1}
    (found,) = compare([[busy], [idle]], CONFIG, DP2)
    assert found.kind == "decode" and not sent(found)


def test_ranks_of_different_groups_may_prefill_and_decode_together() -> None:
    """They move their rows as in a prefill."""
    busy = recorded(DP2, "decode", (5, 1))
    moved = [row for row in collectives(CONFIG, DP2, "prefill", Rows((5, 1), (1, 1)))]
    sent_ = [
        {
            "kind": row.kind,
            "ranks": [0, 1],
            "shape": list(row.shape),
            "dtype": "bfloat16",
            "bytes": row.bytes.value,
        }
        for row in moved
        for _ in range(row.count)
    ]
    both = {**busy, "collectives": sent_, "logits_by_rank": [1, 1]}
    (found,) = compare([[{**both, "mode": "EXTEND"}], [{**both, "rank": 1}]], CONFIG, DP2)
    assert (found.kind, found.rows) == ("prefill", (5, 1)) and not sent(found)


def test_recordings_that_make_no_sense_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(Glm53Error, match="no pass was recorded"):
        read(tmp_path)
    one = recorded(TP2, "decode", (3,))
    (tmp_path / "1.jsonl").write_text(json.dumps(one) + "\n")
    (tmp_path / "2.jsonl").write_text((json.dumps({**one, "rank": 1}) + "\n") * 2)
    with pytest.raises(Glm53Error, match=r"ran \[1, 2\] passes"):
        read(tmp_path)
    with pytest.raises(Glm53Error, match="no pass MIXED"):
        compare([[{**one, "mode": "MIXED"}]], CONFIG, TP2)
    with pytest.raises(Glm53Error, match="no pass in which ranks run"):
        compare([[one], [{**one, "model": "GlmNextNModel"}]], CONFIG, TP2)


# --- the command ---------------------------------------------------------------------------------


def test_the_arguments_of_a_topology() -> None:
    run = Run(Path("/m"), DP2, (4,), 2, 3, 4, "cpu", ("--log-level", "error"))
    arguments = " ".join(server_arguments(run))
    for part in (
        "--model-path /m --device cpu",
        "--tp-size 2 --ep-size 1",
        "--dp-size 2 --enable-dp-attention",
        "--speculative-num-steps 3 --speculative-num-draft-tokens 4",
        "--log-level error",
    ):
        assert part in arguments
    assert "--cuda-graph" not in arguments
    on_gpu = Run(Path("/m"), Topology(), (4,), 2, 0, 0, "cuda")
    assert "--cuda-graph-backend-decode disabled" in " ".join(server_arguments(on_gpu))


def test_the_report_says_which_rows_differ() -> None:
    one = recorded(TP2, "decode", (3,))
    found = compare([[one]], CONFIG, TP2)
    text = render(Traced(found, {"broadcast 1 int64, 8 B": 4}, "ours"), "tp=2")
    assert "decode, rows 3: ran 1 times" in text and "DIFFERS" in text  # no products were recorded
    assert "rows differ" in text and "4 x broadcast 1 int64" in text
    for each in found:
        each.products.clear()
    assert "all equal" in render(Traced(found, {}, "ours"), "tp=2")


def test_the_recorder_is_there_only_while_tracing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin lies in the run's own folder, and an allow-list of the user keeps its entries."""
    monkeypatch.setenv("SGLANG_PLUGINS", "glm53")
    environment = running._environment(tmp_path)
    assert environment["SGLANG_PLUGINS"] == "glm53,glm53_trace"
    assert environment["PYTHONPATH"].startswith(str(tmp_path / "plugin"))
    points = (tmp_path / "plugin/glm53_trace-1.0.dist-info/entry_points.txt").read_text()
    assert "[sglang.srt.plugins]\nglm53_trace = sglang_glm53.trace.hooks:install" in points
    root = Path(__file__).resolve().parents[2]
    assert "trace.hooks" not in (root / "pyproject.toml").read_text()


def test_why_an_engine_did_not_start(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("INFO x\nsglang-glm53: config.json: no\nTraceback\nValueError: y\n")
    assert running._why(log, 1, 9) == "config.json: no"
    log.write_text("INFO x\nValueError: y\nlast\n")
    assert "ended with 3: ValueError: y" in running._why(log, 3, 9)
    assert "not done after 9 s" in running._why(log, None, 9)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tp=3",), "3 does not divide the 4 attention heads"),
        (("tp=2,ep=3",), "ep 3 does not divide tp 2"),
        (("tp=2,dp=4",), "dp 4 exceeds tp 2"),
        (("--mtp", "3-1-3"), "use 3-1-4"),
        (("--prompts", "0"), "1 token or more"),
        (("--model", "/nowhere"), "cannot read /nowhere"),
    ],
)
def test_what_cannot_be_traced_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert cli.main(["trace", *arguments]) == 1
    err = capsys.readouterr().err
    assert says in err and err.startswith("glm53 trace: ") and err.count("\n") == 1
