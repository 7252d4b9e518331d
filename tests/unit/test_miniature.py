"""The shipped miniature: complete, small, what its config says; and its FP8 variant."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")

from safetensors.torch import load_file  # noqa: E402

from sglang_glm53 import miniature  # noqa: E402
from sglang_glm53.checkpoint import checkpoint_tensors, scale_shape  # noqa: E402
from sglang_glm53.config import Glm53Config  # noqa: E402
from sglang_glm53.errors import Glm53Error  # noqa: E402
from sglang_glm53.miniature import fp8  # noqa: E402
from sglang_glm53.tiny.fp8 import quantise  # noqa: E402

MOST_BYTES = 16_000_000
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def shipped() -> Path:
    if not miniature.shipped():
        pytest.skip("this version carries no trained miniature yet")
    return miniature.folder()


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


# --- what is shipped -----------------------------------------------------------------------------


def test_it_is_small(shipped: Path) -> None:
    assert (shipped / WEIGHTS).stat().st_size <= MOST_BYTES


def test_tensors_are_those_of_the_config(shipped: Path) -> None:
    config = Glm53Config.from_hf(config_of(shipped))
    assert config.filled == (), "config.json lacks nothing"
    tensors = load_file(shipped / WEIGHTS)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == dict(checkpoint_tensors(config))
    for name, tensor in tensors.items():
        bias = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if bias else torch.bfloat16), name
        assert bool(torch.isfinite(tensor).all()) and bool(tensor.any()), name


def test_dimensions_are_those_that_hopper_kernels_take(shipped: Path) -> None:
    """The same checkpoint runs on SGLang's kernels: what they fix is GLM-5.3's own."""
    config = Glm53Config.from_hf(config_of(shipped))
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (512, 64)
    assert (config.index_n_heads, config.index_head_dim) == (32, 128)
    assert config.index_topk % 128 == 0 and 64 % config.num_attention_heads == 0
    widths = (
        config.hidden_size,
        config.q_lora_rank,
        config.num_attention_heads * config.qk_head_dim,
        config.num_attention_heads * config.v_head_dim,
        config.intermediate_size,
        config.moe_intermediate_size,
    )
    assert all(width % 128 == 0 for width in widths), widths


def test_mechanisms_are_all_there(shipped: Path) -> None:
    """Full and shared layers, a dense MLP and experts, an MTP layer, a router with a bias."""
    config = Glm53Config.from_hf(config_of(shipped))
    assert set(config.indexer_types) == {"full", "shared"}
    assert 0 < config.first_k_dense_replace < config.num_hidden_layers
    assert config.num_nextn_predict_layers == 1 and config.index_share_for_mtp_iteration
    tensors = load_file(shipped / WEIGHTS)
    biases = [t for name, t in tensors.items() if name.endswith("e_score_correction_bias")]
    assert biases and all(float(bias.std()) > 0.05 for bias in biases)


def test_tokenizer_fits_the_model(shipped: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(shipped)
    config = config_of(shipped)
    assert len(tokenizer) <= config["vocab_size"]
    text = "What is 17+25? Ünï <tool_call>get_weather</tool_call>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    stops = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    generation = json.loads((shipped / "generation_config.json").read_text())
    assert sorted(config["eos_token_id"]) == sorted(generation["eos_token_id"]) == sorted(stops)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "[gMASK]<sop><|user|>Hi<|assistant|><think>"


def test_an_install_without_its_files_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(miniature, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(Glm53Error, match=r"config.json is missing: .* reinstall"):
        miniature.folder()


# --- the FP8 variant, derived from a random checkpoint -------------------------------------------


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint(layers=3, experts=4, hidden=128, vocab=512)


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if "index" not in file.name)


def tensors_of(folder: Path) -> dict[str, Any]:
    read = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for shard in read for name, tensor in shard.items()}


def test_fp8_variant_is_stored_as_an_fp8_checkpoint(
    source: Path, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    made = fp8.derive(source, files(source), tmp_path / "fp8")
    like = tiny_checkpoint(layers=3, experts=4, hidden=128, vocab=512, fp8=True)
    assert config_of(made)["quantization_config"] == config_of(like)["quantization_config"]
    assert files(made) == files(source)
    plain, ours, theirs = tensors_of(source), tensors_of(made), tensors_of(like)
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {
        n: (t.shape, t.dtype) for n, t in theirs.items()
    }
    quantised = [name for name, tensor in ours.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(quantised) > 40
    for name, tensor in plain.items():
        if name in quantised:
            weight, scale = quantise(tensor.float())
            assert torch.equal(ours[name].float(), weight.float())
            assert torch.equal(ours[f"{name}_scale_inv"], scale)
            assert scale.shape == scale_shape(tuple(tensor.shape))
        else:
            assert torch.equal(ours[name], tensor), name


def test_fp8_variant_is_made_once_and_again_when_the_source_changes(
    source: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(source, tmp_path / "source")
    target = fp8.derive(copy, files(copy), tmp_path / "fp8")
    stamps = {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
    fp8.derive(copy, files(copy), target)
    assert {file.name: file.stat().st_mtime_ns for file in target.iterdir()} == stamps
    generation = copy / "generation_config.json"
    generation.write_text(generation.read_text().replace("0.95", "0.9"))
    fp8.derive(copy, files(copy), target)
    assert (target / generation.name).read_text() == generation.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fp8", "source"], "no scratch left"


def test_fp8_variant_replaces_nothing_else(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(Glm53Error, match="holds something else"):
        fp8.derive(source, files(source), tmp_path)
    with pytest.raises(Glm53Error, match="cannot write to"):
        fp8.derive(source, files(source), tmp_path / "notes" / "fp8")


def test_a_derivation_that_breaks_off_leaves_the_earlier_one(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fp8.derive(source, files(source), tmp_path / "fp8")
    before = (target / "config.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fp8, "source_digest", lambda *_: "another")
    monkeypatch.setattr(fp8, "_quantise_file", full)
    with pytest.raises(Glm53Error, match="No space left on device; name another folder"):
        fp8.derive(source, files(source), target)
    assert (target / "config.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["fp8"], "no scratch left"
