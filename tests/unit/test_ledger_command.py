"""`glm53 ledger`: tables, JSON, explanations, comparison, and errors in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sglang_glm53 import cli
from sglang_glm53.bench.rank_slice import slice_config
from sglang_glm53.ledger import report


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["ledger", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert code == 0 and not err
    for expected in (
        "743.38 billion",
        "53,940 B",
        "3,452,160 B",
        "0, 1, 2, 6, 10",
        "158 collectives",
        "layers 0-77",
        "sparse attention over latents",
        "bound of the step",
        "Prefill of 8,192 tokens",
        "--mem-fraction-static 0.85",
        "4, 131,072 tokens",
        "decode only, without prefill",
    ):
        assert expected in out, expected
    assert "NOT FIT" not in out
    assert max(map(len, out.splitlines())) < 200


def test_json_has_what_scripts_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "tp8", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["parameters_total"] == 743_377_019_904
    assert found["parameters_active"] == pytest.approx(40.3e9, rel=0.001)
    assert found["kv_bytes_per_token"] == 53940 and found["page_bytes"] == 3_452_160
    assert found["full_indexer_layers"] == len(found["full_indexer_layer_ids"]) == 21
    assert found["collectives_per_step"] == 158
    assert found["step_bytes_per_rank"] / 4.237e12 * 1e3 == pytest.approx(found["bound_ms"])
    rows = found["step"]["passes"][0]["collectives"]
    assert sum(row["count"] for row in rows) == 158
    assert all(row["formula"] and row["source"] for row in rows)
    assert len(found["figures"]) > 80 and set(found["operators"]) == {"dense", "full", "shared"}


def test_json_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    code, out, _ = run(capsys, "tp8", "--json", str(file))
    assert (code, out) == (0, "")
    assert json.loads(file.read_text())["topology"]["tp"] == 8


def test_options_change_the_first_word(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "dp8-deepep",
        "--kv",
        "bf16",
        "--batch",
        "256",
        "--context",
        "8192",
        "--mtp",
        "5-1-6",
    )
    _, out, _ = run(capsys, *options, "--accept", "3.5", "--json")
    found = json.loads(out)
    assert found["kv_bytes_per_token"] == 92628 + 1152 + 132
    assert found["topology"]["a2a"] == "deepep" and found["workload"]["tokens"] == 6
    assert 1 < found["break_even_accept"] < 1.2
    _, out, _ = run(capsys, "--tp", "4", "--ep", "4", "--json")
    assert json.loads(out)["topology"] | {"tp": 4, "ep": 4} == json.loads(out)["topology"]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--explain", "latent_token")
    assert code == 0
    assert "656 B" in out and "kv_lora + kv_lora // 128 * 4 + rope * 2" in out
    assert "512 + 512 // 128 * 4 + 64 * 2" in out and "kv_cache_configurator.py" in out
    _, out, _ = run(capsys, "--batch", "32", "--explain", "logits: all-gather")
    assert "32 * 154880 * 2" in out and "logits_processor.py" in out
    _, out, _ = run(capsys, "--explain", "all", "--mtp", "5-1-6")
    assert len(re.findall(r"^  = ", out, re.M)) > 300


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--compare", "tp8", "dp8-deepep")
    assert code == 0
    assert re.search(r"ranks that hold a request's cache\s+8\s+1\n", out)
    assert re.search(r"heads of a rank\s+8\s+64\n", out)
    assert "dispatch" in out and "Collectives of a decode step, tp=8\n" in out
    _, out, _ = run(capsys, "--compare", "tp8", "dp8", "--json")
    assert [each["topology"]["dp"] for each in json.loads(out)] == [1, 8]


def test_a_batch_that_does_not_fit_says_so_beside_its_throughput(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = run(capsys, "tp8", "--batch", "32")
    (line,) = (line for line in out.splitlines() if line.startswith("tokens a second, none"))
    assert "32 requests of 131,072 tokens DO NOT FIT: 4 do" in line
    _, out, _ = run(capsys, "--compare", "tp8", "dp8-deepep", "--batch", "8")
    assert re.search(r"the batch fits\s+NO: 4 do\s+yes\n", out)
    assert re.search(r"of decode, none hidden\s+\d+ \(does not fit\)\s+\d+\n", out)
    _, out, _ = run(capsys, "tp8", "--batch", "32", "--json")
    assert json.loads(out)["fits"] is False
    _, out, _ = run(capsys, "--compare", "tp8", "dp8-deepep", "--json")
    assert [(each["workload"]["batch"], each["fits"]) for each in json.loads(out)] == [
        (4, True)
    ] * 2
    _, out, _ = run(capsys, "tp8", "--context", "8192", "--json")
    assert json.loads(out)["workload"]["batch"] == 32 and json.loads(out)["fits"]
    _, out, _ = run(capsys, "tp1", "--json")  # the weights alone do not fit
    assert json.loads(out)["workload"]["batch"] == 1 and not json.loads(out)["fits"]


def test_mtp_without_an_accept_length_has_no_tokens_a_second(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("dp8-deepep", "--context", "8192", "--mtp", "5-1-6")
    _, out, _ = run(capsys, *arguments)
    assert "breaks even" in out and "give --accept" in out and "tokens a second, " not in out
    _, out, _ = run(capsys, *arguments, "--json")
    found = json.loads(out)
    assert found["tokens_per_second"] is None and found["break_even_accept"] > 1
    _, out, _ = run(capsys, *arguments, "--accept", "3.5", "--json")
    found = json.loads(out)
    assert found["tokens_per_second"] == pytest.approx(32 * 3.5 / found["bound_ms"] * 1e3)


@pytest.mark.parametrize(
    ("kv", "gpu", "says"),
    [
        ("fp8", "h200", "needs --kv-cache-dtype fp8_e4m3: SGLang's own choice on this GPU is bf16"),
        ("bf16", "h200", ""),
        ("fp8", "b200", "(kv=fp8-raw), 576 B a token and layer, 47,700 B a token"),
        ("fp8-raw", "b200", ""),
        ("bf16", "b200", "needs --kv-cache-dtype bfloat16"),
    ],
)
def test_the_option_that_a_form_of_the_cache_needs(
    capsys: pytest.CaptureFixture[str], kv: str, gpu: str, says: str
) -> None:
    _, out, _ = run(capsys, "tp8", "--kv", kv, "--hardware", gpu)
    assert says in out if says else "needs " not in out
    _, out, _ = run(capsys, "tp8", "--kv", kv, "--hardware", gpu, "--json")
    assert says in json.loads(out)["kv_note"]


def test_what_fits_and_the_bound_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "tp1")
    titles = [out.index(text) for text in ("What fits", "Bound of", "Collectives", "Operators of")
              if text in out]  # fmt: skip
    assert titles == sorted(titles) and out.index("Parameters") < out.index("Operators of")
    # One rank cannot hold the weights: less than nothing is free, in the unit of the other rows.
    assert re.search(r"free after loading\s+-\d+\.\d\d GB \(-\d+\.\d\d GiB\)", out)


def test_notes_are_wrapped_to_the_terminal() -> None:
    table = report.Table("t", ("", ""), [("a", "1")], "word " * 40)
    lines = report.render([table], 50).splitlines()
    assert max(map(len, lines)) <= 50 and " ".join(lines[3 - 1 :]).count("word") == 40
    assert report.render([table]).count("\n") == 3


def test_a_chunk_is_one_groups(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "dp8-deepep", "--chunk", "2048")
    assert "4 passes of at most 2,048 tokens of an attention group" in out
    assert "--chunked-prefill-size 16384:" in out


def test_another_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    content = slice_config(layers=6, experts=16, vocab_size=4096)
    del content["quantization_config"]
    content["max_position_embeddings"] = 4096
    (tmp_path / "config.json").write_text(json.dumps(content))
    _, out, _ = run(capsys, "--model", str(tmp_path), "--json")
    found = json.loads(out)
    assert found["topology"]["tp"] == 1 and found["topology"]["weights"] == "bf16"
    assert found["full_indexer_layer_ids"] == [0, 1, 2]
    assert found["workload"]["context"] == found["workload"]["prompt"] == 4096


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tp", "3"), "does not divide the 64 attention heads"),
        (("--tp", "8", "--ep", "3"), "ep 3 does not divide tp 8"),
        (("--tp", "4", "--dp", "8"), "dp 8 exceeds tp 4"),
        (("tp9",), "neither a preset"),
        (("--context", "2000000"), "exceeds the model's 1048576 positions"),
        (("--mtp", "5"), "write steps-1-tokens"),
        (("--mtp", "5-4-20"), "a tree of drafts"),
        (("--mtp", "5-1-5"), "use 5-1-6"),
        (("--explain", "kv_bytes_a_token"), "kv_bytes_per_token"),
        (("--hardware", "abacus"), "use one of b200, b300"),
        (("--model", "/nowhere"), "cannot read /nowhere"),
        (("--mem-fraction", "1.5"), "between 0 and 1"),
        (("tp8", "--compare", "tp8", "dp8"), "leave the first word out"),
        (("--compare", "tp8", "dp8", "--html", "x"), "are for one topology"),
        (("--json", "/nowhere/x"), "cannot write /nowhere/x"),
        (("--html", "/nowhere/x"), "cannot write /nowhere/x"),
    ],
)
def test_what_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 1 and not out
    assert says in err and err.startswith("glm53 ledger: ") and err.count("\n") == 1


def test_a_file_that_is_no_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for content, says in (("[1]", "holds no object"), ("{", "is no JSON"), ("{}", "is missing")):
        (tmp_path / "config.json").write_text(content)
        code, _, err = run(capsys, "--model", str(tmp_path))
        assert code == 1 and says in err and err.count("\n") == 1
