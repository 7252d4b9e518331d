"""models/weights.py: where each checkpoint tensor goes, and that nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")

from safetensors import safe_open
from safetensors.torch import save_file

from sglang_glm53.checkpoint import checkpoint_tensors, layer_prefix, scale_shape
from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error
from sglang_glm53.kernels.fp8 import dequantise_blocks
from sglang_glm53.models.weights import CheckpointLoader, Slot, locate, whole_checkpoint

CONFIG = Glm53Config.from_hf(
    {
        "vocab_size": 96,
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "num_attention_heads": 2,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "index_n_heads": 2,
        "index_head_dim": 128,
        "index_topk": 64,
        "indexer_types": ["full", "shared", "full"],
        "rope_theta": 8e6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024,
    }
)


def numbered(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, each with values of its own."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in checkpoint_tensors(CONFIG)
    }


class FakeModel:
    """The parameters that our modules make for CONFIG, with loaders like theirs."""

    def __init__(self, *, is_nextn: bool = False, quant_config: object = None) -> None:
        self.quant_config = quant_config
        self.params: dict[str, nn.Parameter] = {}
        layer = SimpleNamespace(mlp=SimpleNamespace(num_fused_shared_experts=0))
        self.start_layer, self.end_layer = 0, CONFIG.num_hidden_layers
        self.model = SimpleNamespace(layers=[layer] * 3, decoder=layer)
        mtp = layer_prefix(CONFIG.num_hidden_layers)
        shapes: dict[str, dict[Slot, tuple[int, ...]]] = {}
        for name, shape in checkpoint_tensors(CONFIG):
            if name.startswith(mtp) != is_nextn:
                continue
            if is_nextn:
                rest = name.removeprefix(mtp)
                own = rest.startswith(("eh_proj", "enorm", "hnorm", "shared_head"))
                name = f"model.{rest}" if own else f"model.decoder.{rest}"
            slot = locate(name, CONFIG)
            shapes.setdefault(slot.param, {})[slot] = shape
        for param, parts in shapes.items():
            self._add(param, parts)

    def _add(self, name: str, parts: dict[Slot, tuple[int, ...]]) -> None:
        first, shape = next(iter(parts.items()))
        if first.expert is not None:
            experts = 1 + max(slot.expert for slot in parts)
            rows = shape[0] * (2 if "w13" in name else 1)
            full: tuple[int, ...] = (experts, rows, shape[1])
        else:
            full = (sum(part[0] for part in parts.values()), *shape[1:])
        param = nn.Parameter(torch.full(full, float("nan")), requires_grad=False)

        def load(target, tensor, shard_or_name=None, *, shard_id=None, expert_id=None):
            if expert_id is not None:
                half = tensor.shape[0] if shard_id == "w3" else 0
                target.data[expert_id, half : half + tensor.shape[0]].copy_(tensor)
            elif shard_or_name is not None:
                size = tensor.shape[0]
                target.data[shard_or_name * size : (shard_or_name + 1) * size].copy_(tensor)
            else:
                target.data.copy_(tensor)

        param.weight_loader = load
        self.params[name] = param

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.params.items())


def fails(model: FakeModel, tensors: dict | Iterable, capsys, **kwargs: bool) -> str:
    loader = CheckpointLoader(model, CONFIG, **kwargs)
    items = tensors.items() if isinstance(tensors, dict) else tensors
    with pytest.raises(SystemExit) as stop:
        loader.load(items)
    assert stop.value.code == 1
    line = capsys.readouterr().err.strip()
    assert line.startswith("sglang-glm53: ") and "\n" not in line
    return line


def test_every_parameter_is_written_and_holds_what_the_checkpoint_held() -> None:
    model, tensors = FakeModel(), numbered()
    CheckpointLoader(model, CONFIG).load(tensors.items())
    assert not any(param.isnan().any() for param in model.params.values())
    attn = "model.layers.0.self_attn."
    fused = model.params[f"{attn}fused_qkv_a_proj_with_mqa.weight"]
    assert torch.equal(fused[:128], tensors[f"{attn}q_a_proj.weight"])
    assert torch.equal(fused[128:], tensors[f"{attn}kv_a_proj_with_mqa.weight"])
    w13 = model.params["model.layers.2.mlp.experts.w13_weight"]
    assert torch.equal(w13[3, :128], tensors["model.layers.2.mlp.experts.3.gate_proj.weight"])
    assert torch.equal(w13[3, 128:], tensors["model.layers.2.mlp.experts.3.up_proj.weight"])


def test_the_draft_takes_only_the_mtp_layer() -> None:
    model, tensors = FakeModel(is_nextn=True), numbered()
    duplicate = torch.zeros(CONFIG.vocab_size, CONFIG.hidden_size)
    tensors["model.layers.3.embed_tokens.weight"] = duplicate
    tensors["model.layers.3.shared_head.head.weight"] = duplicate
    CheckpointLoader(model, CONFIG, is_nextn=True).load(tensors.items())
    assert not any(param.isnan().any() for param in model.params.values())
    assert torch.equal(
        model.params["model.eh_proj.weight"], tensors["model.layers.3.eh_proj.weight"]
    )
    assert torch.equal(
        model.params["model.decoder.self_attn.indexer.wk.weight"],
        tensors["model.layers.3.self_attn.indexer.wk.weight"],
    )


def test_experts_stacked_by_transformers_load_the_same() -> None:
    one, two, tensors = FakeModel(), FakeModel(), numbered()
    CheckpointLoader(one, CONFIG).load(tensors.items())
    stacked = {name: t for name, t in tensors.items() if ".mlp.experts." not in name}
    for layer in (1, 2, 3):
        prefix = f"model.layers.{layer}.mlp.experts."

        def stack(proj: str, prefix: str = prefix) -> torch.Tensor:
            return torch.stack([tensors[f"{prefix}{e}.{proj}.weight"] for e in range(4)])

        stacked[f"{prefix}gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
        stacked[f"{prefix}down_proj"] = stack("down_proj")
    CheckpointLoader(two, CONFIG).load(stacked.items())
    for name, param in one.params.items():
        assert torch.equal(param, two.params[name]), name


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.experts.2.up_proj.weight",
        "model.layers.2.self_attn.indexer.k_norm.bias",
        "model.layers.2.mlp.gate.e_score_correction_bias",
    ],
)
def test_a_missing_tensor_is_named(name: str, capsys) -> None:
    tensors = numbered()
    del tensors[name]
    assert name in fails(FakeModel(), tensors, capsys)


def test_a_draft_without_its_layer_is_refused(capsys) -> None:
    tensors = {n: t for n, t in numbered().items() if not n.startswith("model.layers.3.")}
    assert "model.layers.3." in fails(FakeModel(is_nextn=True), tensors, capsys, is_nextn=True)


def test_an_unexpected_tensor_is_named(capsys) -> None:
    # a shared layer has no indexer
    name = "model.layers.1.self_attn.indexer.wk.weight"
    assert name in fails(FakeModel(), {**numbered(), name: torch.zeros(128, 256)}, capsys)


def test_a_wrong_shape_is_named(capsys) -> None:
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    line = fails(FakeModel(), {**numbered(), name: torch.zeros(1, 128)}, capsys)
    assert name in line and "[1, 128]" in line and "[256, 128]" in line


def test_a_tensor_that_is_there_twice_is_named(capsys) -> None:
    items = [*numbered().items(), ("model.norm.weight", torch.zeros(256))]
    assert "model.norm.weight is there twice" in fails(FakeModel(), items, capsys)


def test_a_truncated_shard_is_named(capsys, tmp_path: Path) -> None:
    model, whole, cut = FakeModel(), tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    model.config = SimpleNamespace(_name_or_path=str(tmp_path))
    for file in (whole, cut):
        save_file({"x": torch.zeros(64)}, file)
    cut.write_bytes(cut.read_bytes()[:-100])

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for file in (whole, cut):
            with safe_open(file, framework="pt") as shard:
                yield "model.norm.weight", torch.zeros(256) + len(shard.keys())

    line = fails(model, read(), capsys)
    assert f"{cut} cannot be read" in line and "download it again" in line


def test_later_loads_may_be_partial_but_not_wrong(capsys) -> None:
    model, tensors = FakeModel(), numbered()
    loader = CheckpointLoader(model, CONFIG)
    loader.load(tensors.items())
    loader.load([("model.norm.weight", torch.full((256,), 7.0))])
    assert model.params["model.norm.weight"][0] == 7
    # an update that is wrong fails; it does not end the server
    with pytest.raises(Glm53Error, match="model.norm.weight has shape"):
        loader.load([("model.norm.weight", torch.zeros(3))])


class Fp8:
    def get_name(self) -> str:
        return "fp8"


def quantized(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = dict(checkpoint_tensors(CONFIG))[name]
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    return weight, torch.rand(scale_shape(shape), generator=generator) + 0.5


@pytest.mark.parametrize("scale_first", [False, True])
def test_fp8_blocks_are_dequantised_on_a_cpu(scale_first: bool) -> None:
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"  # 192 rows: a partial block
    weight, scale = quantized(name)
    tensors = numbered()
    pair = [(name, weight), (name + "_scale_inv", scale)]
    del tensors[name]
    items = [*tensors.items(), *(reversed(pair) if scale_first else pair)]
    model = FakeModel(quant_config=Fp8())
    CheckpointLoader(model, CONFIG).load(items)
    loaded = model.params["model.layers.1.self_attn.fused_qkv_a_proj_with_mqa.weight"][128:]
    expected = weight.float()
    for row in range(192):
        for block in range(2):
            expected[row, block * 128 : (block + 1) * 128] *= scale[row // 128, block]
    assert torch.equal(loaded, expected)
    assert torch.equal(dequantise_blocks(weight, scale, torch.float32), expected)


@pytest.mark.parametrize("scale_first", [False, True])
def test_an_update_may_cut_a_weight_from_its_scale(scale_first: bool) -> None:
    """A trainer's buckets are cut by bytes; the memory of a bucket is its sender's."""
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    model = FakeModel(quant_config=Fp8())
    loader = CheckpointLoader(model, CONFIG)
    loader.load(numbered().items())
    weight, scale = quantized(name)
    halves = [(name, weight.clone()), (name + "_scale_inv", scale.clone())]
    first, second = reversed(halves) if scale_first else halves
    param = model.params["model.layers.1.self_attn.fused_qkv_a_proj_with_mqa.weight"]
    before = param[128:].clone()
    loader.load([first])
    first[1].view(torch.uint8).zero_()
    assert torch.equal(param[128:], before)  # half a weight changes nothing
    loader.load([("model.norm.weight", torch.full((256,), 7.0))])
    loader.load([second])
    assert torch.equal(param[128:], dequantise_blocks(weight, scale, torch.float32))
    # a whole checkpoint has both
    with whole_checkpoint(), pytest.raises(Glm53Error, match="is FP8 without"):
        loader.load([(name, weight)])
    assert not loader.waiting


def test_a_newer_half_takes_the_place_of_one_that_waits() -> None:
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    model = FakeModel(quant_config=Fp8())
    loader = CheckpointLoader(model, CONFIG)
    loader.load(numbered().items())
    weight, scale = quantized(name)
    loader.load([(name, torch.zeros_like(weight.float()).to(weight.dtype))])
    loader.load([(name, weight)])
    loader.load([(name + "_scale_inv", scale)])
    param = model.params["model.layers.1.self_attn.fused_qkv_a_proj_with_mqa.weight"]
    assert torch.equal(param[128:], dequantise_blocks(weight, scale, torch.float32))


def test_fp8_without_its_scale_is_refused(capsys) -> None:
    name = "model.layers.0.self_attn.indexer.wk.weight"
    tensors = {**numbered(), name: quantized(name)[0]}
    assert f"{name} is FP8 without" in fails(FakeModel(quant_config=Fp8()), tensors, capsys)


def test_a_scale_without_an_fp8_weight_is_refused(capsys) -> None:
    name = "model.layers.0.self_attn.indexer.wk.weight"
    tensors = {**numbered(), name + "_scale_inv": quantized(name)[1]}
    assert "_scale_inv" in fails(FakeModel(quant_config=Fp8()), tensors, capsys)
