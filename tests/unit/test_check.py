"""`glm53 check`: headers of safetensors files, whole and broken, and the command."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors

from sglang_glm53 import cli
from sglang_glm53.checks import findings, report, schemes
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.headers import INDEX, Headers, Tensor, read, scan
from sglang_glm53.checks.reading import architectures
from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger.glm53 import config_json


def write(path: Path, header: dict[str, object], size: int = 0) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))


def entry(dtype: str, shape: list[int], first: int, last: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


GOOD = {"__metadata__": {"format": "pt"}, "a": entry("BF16", [2, 3], 0, 12)}


def test_a_header_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", GOOD, 12)
    assert dict(read(tmp_path / "a.safetensors")) == {"a": Tensor("BF16", (2, 3), "a.safetensors")}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "no safetensors"),
        (b"version https://git-lfs.github.com/spec/v1", "no safetensors"),
        (struct.pack("<Q", 50) + b"{}", "truncated inside its header"),
        (struct.pack("<Q", 2) + b"[]", "not safetensors'"),
        (struct.pack("<Q", 2) + b"{]", "not safetensors'"),
        (struct.pack("<Q", 2) + b"{}abc", "longer than its header"),
    ],
    ids=["empty", "lfs", "cut header", "list", "no json", "too long"],
)
def test_a_file_that_is_none_is_told(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    found = scan(tmp_path)
    assert found is not None and len(found.problems) == 1
    assert found.problems[0].startswith("a.safetensors: ") and problem in found.problems[0]


def header(**changes: Any) -> dict[str, Any]:
    """Two tensors one after the other, the second changed."""
    second = {"dtype": "BF16", "shape": [2], "data_offsets": [4, 8]}
    first = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    return {"a": first, "b": {**second, **changes}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "XX9"}, "not safetensors'"),
        ({"dtype": None}, "not safetensors'"),
        ({"dtype": [1]}, "not safetensors'"),
        ({"shape": [2.0]}, "not safetensors'"),
        ({"shape": "ab"}, "not safetensors'"),
        ({"data_offsets": [4.0, 8.0]}, "not safetensors'"),
        ({"data_offsets": [-4, 0]}, "not safetensors'"),
        ({"data_offsets": [4, 8, 12]}, "not safetensors'"),
        ({"data_offsets": [None, None]}, "not safetensors'"),
        ({"data_offsets": [2, 6]}, "b overlaps what lies before it"),
        ({"data_offsets": [6, 10]}, "b lies behind a gap"),
    ],
)
def test_what_safetensors_refuses_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    write(tmp_path / "a.safetensors", header(), 8)
    assert scan(tmp_path).problems == ()
    write(tmp_path / "a.safetensors", header(**changes), 16)
    (told,) = scan(tmp_path).problems
    assert problem in told
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(tmp_path / "a.safetensors", "pt").__enter__()


def test_an_index_that_is_no_object_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    with pytest.raises(Glm53Error, match="weight_map must be an object"):
        scan(tmp_path)


def test_a_truncated_file_is_told_with_its_sizes(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", GOOD, 11)
    length = len(json.dumps(GOOD)) + 8
    found = scan(tmp_path)
    assert found is not None
    assert found.problems == (
        f"a.safetensors: truncated: {length + 11} of {length + 12} bytes, from a on",
    )


def test_a_shape_that_does_not_fit_its_bytes_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"a": entry("F32", [2, 3], 0, 12)}, 12)
    found = scan(tmp_path)
    assert found is not None and "a has 12 bytes for shape [2, 3]" in found.problems[0]


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", GOOD, 12)
    write(tmp_path / "old.safetensors", GOOD, 12)
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": "a.safetensors", "b": "a.safetensors"}})
    )
    found = scan(tmp_path)
    assert found is not None and found.twice == ()
    assert found.problems == () and found.strays == ("old.safetensors",)
    assert found.promised == {"a": "a.safetensors", "b": "a.safetensors"}
    (tmp_path / INDEX).unlink()
    found = scan(tmp_path)
    assert found is not None and found.twice == ("a",) and found.problems == ()


def test_a_missing_file_is_told_once(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors", "b": "gone.safetensors"}})
    )
    found = scan(tmp_path)
    assert found is not None
    assert found.problems == (
        "gone.safetensors: No such file or directory (by the index it holds 2 tensors, first a)",
    )
    assert found.lost("a") and found.broken == {"gone.safetensors"}


def test_a_folder_without_weights_has_no_headers(tmp_path: Path) -> None:
    assert scan(tmp_path) is None and scan(None) is None


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a tiny checkpoint, which the tests below break in turn."""
    return shutil.copytree(tiny_checkpoint(), tmp_path_factory.mktemp("check") / "model")


def said(capsys: pytest.CaptureFixture[str], folder: Path, code: int) -> str:
    assert cli.main(["check", str(folder)]) == code
    return capsys.readouterr().out


def test_a_whole_checkpoint_passes(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, whole, 0)
    assert "0 fail" in out and "checkpoint-missing" in out


def test_an_fp8_checkpoint_passes(
    tiny_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, tiny_checkpoint(fp8=True), 0)
    assert "pass  checkpoint-scales" in out


def test_another_config_is_seen(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every layer full, as in GLM-5: the shared layers' indexers are then missing."""
    folder = shutil.copytree(whole, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["indexer_types"] = ["full"] * config["num_hidden_layers"]
    config["index_topk_freq"] = config["index_topk_pattern"] = None
    (folder / "config.json").write_text(json.dumps(config))
    out = said(capsys, folder, 1)
    assert "fail  checkpoint-missing" in out and "indexer" in out


def test_another_architecture_is_not_called_garbage(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    (folder / "config.json").write_text('{"architectures": ["Glm5NextForConditionalGeneration"]}')
    out = said(capsys, folder, 0)
    assert "warn  other-architecture" in out and "fail  " not in out
    for nothing in ("{}", '{"architectures": []}', '{"architectures": null}'):
        (folder / "config.json").write_text(nothing)
        assert "fail  config-garbage" in said(capsys, folder, 1)
    (folder / "config.json").write_text('{"architectures": ["GlmMoeDsaForCausalLM"]}')
    assert "fail  config-garbage" in said(capsys, folder, 1)


def test_json_and_a_damaged_file(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    first = sorted(folder.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-1])
    assert cli.main(["check", "--json", str(folder)]) == 1
    content = json.loads(capsys.readouterr().out)
    failed = [result["id"] for result in content["results"] if result["status"] == "fail"]
    assert failed == ["checkpoint-files"], "what a damaged file lacks is not told again"


def test_a_folder_that_is_no_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wanted in ("no config.json", "no safetensors files"):
        assert cli.main(["check", str(tmp_path)]) == 1
        assert wanted in capsys.readouterr().err
        (tmp_path / "config.json").write_text("{}")


@pytest.mark.parametrize("where", ["../other/a.safetensors", "sub/a.safetensors", "/dev/zero"])
def test_an_index_that_leaves_the_folder_is_told(tmp_path: Path, where: str) -> None:
    """SGLang reads the folder's own files alone, whatever the index says."""
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": where}}))
    found = scan(tmp_path)
    assert found is not None and not found.tensors
    assert found.problems[0].startswith(f"{where}: lies elsewhere")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    found = scan(tmp_path)
    assert found is not None and found.problems == ("a.safetensors: no regular file",)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_header_is_utf8_as_safetensors_demands(tmp_path: Path, encoding: str) -> None:
    text = "{}".encode(encoding)
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    found = scan(tmp_path)
    assert found is not None and "not safetensors'" in found.problems[0]


def test_stacked_experts_without_bytes_are_not_counted_out(tmp_path: Path) -> None:
    """A shape costs no bytes where one side is zero: 10**12 experts kept the command busy."""
    name = "model.layers.3.mlp.experts.down_proj"
    there = {name: Tensor("BF16", (10**12, 0, 5), "a.safetensors")}
    facts = Facts.only(headers=Headers(there), config=Glm53Config.from_hf(config_json()))
    assert findings.tensors_of(facts) == there


def test_a_config_with_a_billion_experts_is_a_mistake() -> None:
    with pytest.raises(Glm53Error, match="n_routed_experts is 1000000000; GLM-5.3 has 256"):
        Glm53Config.from_hf({**config_json(), "n_routed_experts": 10**9})


def test_fields_of_another_type_leave_no_rule_unjudged() -> None:
    facts = Facts.only(
        headers=Headers({}),
        raw_config={
            "architectures": "GlmMoeDsaForCausalLM",
            "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": 5},
        },
    )
    assert architectures(facts) == ["GlmMoeDsaForCausalLM"]
    found = schemes.misfits(facts)
    assert isinstance(found, dict) and "must be a list of names" in str(found["details"])


@pytest.mark.timeout(60)
def test_numbers_of_any_length_are_no_shape(tmp_path: Path) -> None:
    numbers = ",".join(["9" * 4000] * 4000)  # to multiply them takes minutes
    header = f'{{"a": {{"dtype": "F32", "shape": [{numbers}], "data_offsets": [0, 0]}}}}'.encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match="its header is not safetensors'"):
        list(read(tmp_path / "a.safetensors"))


def test_names_do_not_reach_the_terminal_as_they_are() -> None:
    assert report.printable("a\nb\x1b[31m\0 é") == "a\\nb\\x1b[31m\\x00 é"
