"""`glm53 check` on a sparse fake of the real checkpoint: whole it passes, and each of 20 planted
defects is named with its file and its tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_glm53 import cli
from tests.unit.fake_checkpoint import Fake, fake, write_file

LAYER = "model.layers.3."
EXPERT = f"{LAYER}mlp.experts.1."
ATTENTION = f"{LAYER}self_attn."
INDEXER = "model.layers.0.self_attn.indexer."


@dataclass(frozen=True)
class Defect:
    """What is planted, and what must be said of it.

    Attributes:
        plant: changes the fake before it is written; returns what to change in the folder after.
        rule: that fails.
        tensor: that is named; "{last}": the MTP layer's number.
        word: something else that is said of it.
    """

    plant: Callable[[Fake, int], Callable[[Path], None] | None]
    rule: str
    tensor: str
    word: str


def _take(name: str, *, index: bool = True) -> Callable[[Fake, int], None]:
    def plant(f: Fake, last: int) -> None:
        wanted = name.format(last=last)
        del f.shards[f.file_of(wanted)][wanted]
        if index:
            f.index.pop(wanted)

    return plant


def _become(name: str, dtype: str, shape: list[int] | None = None) -> Callable[[Fake, int], None]:
    def plant(f: Fake, last: int) -> None:
        held = f.shards[f.file_of(name)]
        held[name] = (dtype, shape or held[name][1])

    return plant


def _add(name: str, dtype: str, shape: list[int], beside: str) -> Callable[[Fake, int], None]:
    def plant(f: Fake, last: int) -> None:
        file = f.file_of(beside)
        f.shards[file][name] = (dtype, shape)
        f.index[name] = file

    return plant


def _configured(**changes: object) -> Callable[[Fake, int], None]:
    def plant(f: Fake, last: int) -> None:
        f.config["quantization_config"].update(changes)

    return plant


def _truncated(f: Fake, last: int) -> Callable[[Path], None]:
    file = f.file_of("lm_head.weight")

    def after(folder: Path) -> None:
        with (folder / file).open("rb+") as handle:
            handle.truncate((folder / file).stat().st_size - 1)

    return after


def _in_two_files(f: Fake, last: int) -> Callable[[Path], None]:
    file = f.file_of(f"{EXPERT}up_proj.weight")
    other = next(name for name in f.shards if name != file)
    f.shards[other][f"{EXPERT}up_proj.weight"] = f.shards[file][f"{EXPERT}up_proj.weight"]
    return lambda folder: None


def _gone(f: Fake, last: int) -> Callable[[Path], None]:
    file = f.file_of("model.embed_tokens.weight")
    return lambda folder: (folder / file).unlink()


def _in_another_file(f: Fake, last: int) -> None:
    name = f"{ATTENTION}o_proj.weight"
    f.index[name] = next(file for file in f.shards if file != f.file_of(name))


def _one_kept_too_few(f: Fake, last: int) -> None:
    f.shards[f.file_of(f"{ATTENTION}q_b_proj.weight")][f"{ATTENTION}q_b_proj.weight"] = (
        "BF16",
        [16384, 2048],
    )
    _take(f"{ATTENTION}q_b_proj.weight_scale_inv")(f, last)


def _stray(f: Fake, last: int) -> Callable[[Path], None]:
    return lambda folder: write_file(folder / "model-old.safetensors", {"a": ("BF16", [1])})


def _no_header(f: Fake, last: int) -> Callable[[Path], None]:
    file = f.file_of("model.embed_tokens.weight")
    return lambda folder: (folder / file).write_text("version https://git-lfs.github.com/spec/v1")


DEFECTS: dict[str, Defect] = {
    "a truncated file": Defect(_truncated, "files", "lm_head.weight", "truncated"),
    "a file that is not there": Defect(_gone, "files", "model.embed_tokens.weight", "No such file"),
    "a pointer in place of a file": Defect(
        _no_header, "files", "model.embed_tokens.weight", "Git LFS"
    ),
    "a tensor in two files": Defect(_in_two_files, "twice", f"{EXPERT}up_proj.weight", "also in"),
    "a file that the index does not name": Defect(_stray, "stray-files", "", "model-old"),
    "the index names another file": Defect(
        _in_another_file, "index", f"{ATTENTION}o_proj.weight", "says it is in"
    ),
    "a promise of the index": Defect(
        _take(f"{EXPERT}gate_proj.weight_scale_inv", index=False),
        "index",
        f"{EXPERT}gate_proj.weight_scale_inv",
        "says it is",
    ),
    "an expert's matrix is missing": Defect(
        _take(f"{EXPERT}down_proj.weight"), "missing", f"{EXPERT}down_proj.weight", "missing"
    ),
    "an index key's scale is missing": Defect(
        _take(f"{INDEXER}wk.weight_scale_inv"), "scales", f"{INDEXER}wk.weight", "without"
    ),
    "an index key without its weight": Defect(
        _take(f"{INDEXER}wk.weight"), "scales", f"{INDEXER}wk.weight_scale_inv", "not there"
    ),
    "an indexer's norm is missing": Defect(
        _take(f"{INDEXER}k_norm.bias"), "missing", f"{INDEXER}k_norm.bias", "missing"
    ),
    "an indexer on a shared layer": Defect(
        _add(f"{ATTENTION}indexer.k_norm.weight", "BF16", [128], f"{ATTENTION}o_proj.weight"),
        "shared-indexer",
        f"{ATTENTION}indexer.k_norm.weight",
        "shared layer",
    ),
    "the MTP layer's projection is missing": Defect(
        _take("model.layers.{last}.eh_proj.weight"),
        "missing",
        "model.layers.{last}.eh_proj.weight",
        "missing",
    ),
    "a matrix of another shape": Defect(
        _become(f"{ATTENTION}o_proj.weight", "F8_E4M3", [6144, 8192]),
        "shape",
        f"{ATTENTION}o_proj.weight",
        "[6144, 16384]",
    ),
    "a scale of another shape": Defect(
        _become(f"{EXPERT}up_proj.weight_scale_inv", "F32", [16, 24]),
        "shape",
        f"{EXPERT}up_proj.weight_scale_inv",
        "[16, 48]",
    ),
    "a tensor of another model": Defect(
        _add(f"{LAYER}mlp.experts.4096.w1", "BF16", [8], f"{EXPERT}up_proj.weight"),
        "unknown",
        f"{LAYER}mlp.experts.4096.w1",
        "not of this",
    ),
    "a quantised router": Defect(
        _become(f"{LAYER}mlp.gate.weight", "I8"), "precision", f"{LAYER}mlp.gate.weight", "I8"
    ),
    "bytes under another dtype": Defect(
        _become("model.embed_tokens.weight", "I16"), "dtype", "model.embed_tokens.weight", "I16"
    ),
    "a matrix that stayed in BF16": Defect(
        _one_kept_too_few, "quantisation", f"{ATTENTION}q_b_proj.weight", "does not name it"
    ),
    "an FP8 matrix that the config excludes": Defect(
        _configured(modules_to_not_convert=[f"{ATTENTION}kv_b_proj"]),
        "quantisation",
        f"{ATTENTION}kv_b_proj.weight",
        "names it",
    ),
    "blocks of another size": Defect(
        _configured(weight_block_size=[64, 128]), "quantisation", "quantization_config", "[64, 128]"
    ),
    "a config of another precision": Defect(
        _configured(quant_method="w4afp8"), "quantisation", "", "says w4afp8, and no matrix is"
    ),
}
# What cannot be planted beside the others: it hides them, or is in the same place.
ALONE = {
    "a file that is not there",
    "a pointer in place of a file",
    "an index key without its weight",
    "an FP8 matrix that the config excludes",
    "blocks of another size",
    "a config of another precision",
    "a matrix of another shape",
    "a scale of another shape",
}


def judged(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    code = cli.main(["check", "--json", str(folder)])
    results = {r["id"]: r for r in json.loads(capsys.readouterr().out)["results"]}
    assert code == any(result["status"] == "fail" for result in results.values())
    return results


def assert_told(defect: Defect, results: dict[str, dict], last: int) -> None:
    result = results[f"checkpoint-{defect.rule}"]
    assert result["status"] in ("fail", "warn")
    tensor = defect.tensor.format(last=last)
    lines = [line for line in (result["message"], *result["details"]) if tensor in line]
    lines = [line for line in lines if defect.word in line]
    assert lines, result
    if tensor:
        named = re.compile(r"model-\d{5}-of-\d{5}\.safetensors|no file|config\.json")
        assert any(named.search(line) for line in lines), lines


def planted(f: Fake, names: list[str], folder: Path, last: int) -> Path:
    later = [DEFECTS[name].plant(f, last) for name in names]
    f.write(folder)
    for change in later:
        if change is not None:
            change(folder)
    return folder


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_named_with_file_and_tensor(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On eight layers of four experts; the names and shapes are the real ones."""
    folder = planted(fake(layers=8, experts=4, shards=5), [name], tmp_path / "model", 8)
    assert_told(DEFECTS[name], judged(folder, capsys), 8)


def test_the_small_fake_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = judged(fake(layers=8, experts=4, shards=5).write(tmp_path / "model"), capsys)
    assert not [r for r in results.values() if r["status"] in ("fail", "warn")]


def test_the_whole_model_at_full_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """756 GB of 142 files, first whole, then with 14 defects at a time."""
    whole = fake()
    assert len(DEFECTS) >= 20 and len(whole.shards) == 142
    folder = whole.write(tmp_path / "model")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 750e9 < size < 760e9
    results = judged(folder, capsys)
    assert not [r for r in results.values() if r["status"] in ("fail", "warn")]
    names = [name for name in DEFECTS if name not in ALONE]
    assert len(names) == 14
    results = judged(planted(whole, names, folder, 78), capsys)
    for name in names:
        assert_told(DEFECTS[name], results, 78)


def test_a_numbering_with_a_gap_without_an_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fake(layers=8, experts=4, shards=5).write(tmp_path / "model")
    (folder / "model.safetensors.index.json").unlink()
    second = sorted(folder.glob("*.safetensors"))[1]
    second.unlink()
    results = judged(folder, capsys)
    assert f"{second.name}: No such" in results["checkpoint-files"]["message"]
    assert results["checkpoint-missing"]["status"] == "pass", "told with the file"
