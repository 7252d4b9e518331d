"""From checkpoint tensors to parameters, with the proof that every one was written exactly once.

A checkpoint tensor fills one shard of one parameter: q_a and kv_a are rows of one fused
projection, gate and up are halves of another, experts are slices of a stacked tensor. ``locate``
is that table. The first load has to be whole; later ones (weight updates, expert rebalancing) may
bring any part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from sglang.srt.model_loader.utils import maybe_executor_submit, should_async_load
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_glm53.checkpoint import (
    FP8_BLOCK,
    SCALE_SUFFIX,
    Shape,
    checkpoint_tensors,
    layer_prefix,
    layer_tensors,
    model_tensors,
    mtp_duplicates,
    scale_shape,
)
from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error, fatal
from sglang_glm53.kernels.fp8 import dequantise_blocks

MERGED = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
EXPERT = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}
INDEX_PROJECTIONS = (".indexer.wk", ".indexer.weights_proj")
MTP_ONLY = ("eh_proj.", "enorm.", "hnorm.", "shared_head.norm.")
# Written by quantisation methods themselves, from defaults where the checkpoint has none.
OPTIONAL_LEAVES = (".k_scale", ".v_scale", ".input_scale")

_EXPERT_NAME = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(\w+)\.(\w+)$")
_STACKED_NAME = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes: a parameter, and a shard of it if it holds several.

    Attributes:
        param: the parameter's name in our module tree.
        shard: what the parameter's loader calls the shard (0 and 1, or w1, w2, w3), if any.
        expert: the routed expert's index in the checkpoint, if any.
        rows: first row inside the parameter, where several tensors are stacked by rows.
    """

    param: str
    shard: int | str | None = None
    expert: int | None = None
    rows: int | None = None


def layer_quant_config(quant_config: Any) -> Any:
    """The quantisation that the layers are built with: none where FP8 is dequantised at load."""
    return None if dequantizes_fp8(quant_config) else quant_config


def dequantizes_fp8(quant_config: Any) -> bool:
    """Whether block-scaled FP8 weights become the activation dtype at load: where no GPU is."""
    return (
        quant_config is not None
        and quant_config.get_name() == "fp8"
        and torch.get_default_device().type == "cpu"
    )


def locate(
    name: str,
    config: Glm53Config,
    fused_shared_experts: int = 0,
    joins_index_projections: bool = False,
) -> Slot:
    """The slot of checkpoint tensor ``name`` (weight, bias or block scale) of a target layer."""
    if fused_shared_experts:
        name = name.replace(".mlp.shared_experts.", f".mlp.experts.{config.n_routed_experts}.")
    if match := _EXPERT_NAME.match(name):
        experts, index, proj, leaf = match.groups()
        stacked, shard = EXPERT[proj]
        return Slot(f"{experts}.{stacked}_{leaf}", shard, int(index))
    module, _, leaf = name.rpartition(".")
    parent, _, proj = module.rpartition(".")
    if proj in ("q_a_proj", "kv_a_proj_with_mqa"):
        first = 0 if proj == "q_a_proj" else config.q_lora_rank
        if leaf.endswith(SCALE_SUFFIX):
            first = -(-first // FP8_BLOCK)
        return Slot(f"{parent}.fused_qkv_a_proj_with_mqa.{leaf}", proj, rows=first)
    if joins_index_projections and module.endswith(INDEX_PROJECTIONS):
        # Rows of one matrix on a GPU (layers/indexer.py).
        first = 0 if proj == "wk" else config.index_head_dim
        return Slot(f"{parent}.wk_weights_proj.{leaf}", proj, rows=first)
    if proj in MERGED:
        merged, shard = MERGED[proj]
        return Slot(f"{parent}.{merged}.{leaf}", shard)
    return Slot(name)


def to_mtp_module(name: str, config: Glm53Config) -> str:
    """Our name of an MTP tensor: its own parts in ``model``, its layer in ``model.decoder``."""
    rest = name.removeprefix(layer_prefix(config.num_hidden_layers))
    return f"model.{rest}" if rest.startswith(MTP_ONLY) else f"model.decoder.{rest}"


_whole_checkpoint: ContextVar[bool] = ContextVar("whole_checkpoint", default=False)


@contextmanager
def whole_checkpoint() -> Iterator[None]:
    """Loads in the body bring a whole checkpoint: an FP8 weight without its scale is refused."""
    token = _whole_checkpoint.set(True)
    try:
        yield
    finally:
        _whole_checkpoint.reset(token)


class CheckpointLoader:
    """Loads one model (the target, or the MTP draft) and keeps account of what was written."""

    def __init__(self, model: nn.Module, config: Glm53Config, *, is_nextn: bool = False) -> None:
        self.model = model
        self.config = config
        self.is_nextn = is_nextn
        self.dequantize = dequantizes_fp8(model.quant_config)
        self.dtype = torch.get_default_dtype()  # the served one, while the model is built
        self.joins_index_projections = any(
            name.endswith(".wk_weights_proj.weight") for name, _ in model.named_parameters()
        )
        self.loaded_once = False
        # Halves of FP8 pairs (a weight, or its scale) that an update brought alone.
        self.waiting: dict[str, torch.Tensor] = {}
        self.known: dict[str, Shape] = dict(checkpoint_tensors(config))
        self.ignored = set(mtp_duplicates(config))
        if config.tie_word_embeddings:
            self.ignored.add("lm_head.weight")

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write ``(checkpoint name, tensor)`` pairs.

        Anything wrong ends the process while the server starts; later it raises, and the server
        goes on with what it has.

        Raises:
            Glm53Error: an update holds a tensor that the model does not have, or of another shape.
        """
        try:
            self._load(weights)
        except Glm53Error as error:
            if self.loaded_once:
                raise  # SGLang answers the request that asked for an update
            fatal(str(error))
        except (SafetensorError, OSError) as error:
            if self.loaded_once:
                raise
            file = _damaged_file(getattr(self.model.config, "_name_or_path", ""))
            fatal(
                f"checkpoint: {file} cannot be read ({error}); it is truncated or damaged, "
                "download it again"
            )

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.model.named_parameters(remove_duplicate=False))
        seen: set[str] = set()
        written: set[Slot] = set()
        with ThreadPoolExecutor() as executor:
            futures: list[Future] = []
            for name, tensor in self._wanted(weights, seen):
                slot = self._slot(name)
                if slot in written:
                    raise Glm53Error(
                        f"checkpoint: {name} is there twice; remove the duplicate shard file"
                    )
                written.add(slot)
                if slot.param not in params:
                    raise Glm53Error(
                        f"checkpoint: {name} has no place in the model ({slot.param}); its "
                        "quantisation does not fit this build"
                    )
                maybe_executor_submit(
                    executor=executor,
                    futures=futures,
                    use_async=should_async_load(tensor),
                    func=_write,
                    func_args=(params[slot.param], slot, tensor),
                )
            for future in as_completed(futures):
                future.result()
        if not self.loaded_once:
            self._check_complete(params, seen, written)
            self.loaded_once = True

    def _wanted(
        self, weights: Iterable[tuple[str, torch.Tensor]], seen: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that this rank's model takes, shape-checked, dequantised where needed."""
        # A checkpoint is whole; what a trainer sends is cut into buckets anywhere.
        update = self.loaded_once and not _whole_checkpoint.get()
        pending = self.waiting if update else {}
        for name, tensor in _unstack_experts(weights):
            if not self._is_ours(name, tensor):
                continue
            if name in seen:
                raise Glm53Error(
                    f"checkpoint: {name} is there twice; remove the duplicate shard file"
                )
            seen.add(name)
            base = name.removesuffix(SCALE_SUFFIX)
            is_scale = base != name
            if not is_scale and tensor.dtype != torch.float8_e4m3fn:
                yield name, tensor
                continue
            joined = self.joins_index_projections and base.endswith(".indexer.wk.weight")
            if update and not (self.dequantize or joined):
                yield name, tensor  # two parameters: each half is written as it comes
                continue
            other = base if is_scale else base + SCALE_SUFFIX
            if other not in pending:
                # An update's memory is the sender's, and a newer half replaces one left over.
                pending[name] = tensor.clone() if update else tensor
                continue
            first = pending.pop(other)
            pending.pop(name, None)
            weight, scale = (first, tensor) if is_scale else (tensor, first)
            if weight.dtype != torch.float8_e4m3fn:
                raise Glm53Error(f"checkpoint: {base} has a scale but is {weight.dtype}, not FP8")
            if self.dequantize or joined:
                yield base, dequantise_blocks(weight, scale, self.dtype)
            else:
                yield base, weight
                yield base + SCALE_SUFFIX, scale
        if update:
            return
        for name, tensor in sorted(pending.items()):
            if tensor.dtype == torch.float8_e4m3fn:
                raise Glm53Error(
                    f"checkpoint: {name} is FP8 without {name}{SCALE_SUFFIX}; the shard that holds "
                    "its scale is missing"
                )
            raise Glm53Error(f"checkpoint: {name} scales a weight that is not FP8 or not there")

    def _is_ours(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether this model takes ``name``; refuses names and shapes that the architecture does
        not have, those of other stages of a pipeline too: all stages refuse, or none."""
        base = name.removesuffix(SCALE_SUFFIX)
        if name.endswith("rotary_emb.inv_freq") or base in self.ignored:
            return False
        if base not in self.known:
            raise Glm53Error(
                f"checkpoint: {name} is not a tensor of this configuration; check that config.json "
                "and the shards are of one model"
            )
        self._check_shape(name, tensor)
        mtp = base.startswith(layer_prefix(self.config.num_hidden_layers))
        if self.is_nextn or mtp:
            return self.is_nextn and mtp
        return base in self._expected()

    def _expected(self) -> dict[str, Shape]:
        """Checkpoint tensors of this rank's model."""
        if not hasattr(self, "_expected_tensors"):
            self._expected_tensors = self._list_expected()
        return self._expected_tensors

    def _list_expected(self) -> dict[str, Shape]:
        config = self.config
        if self.is_nextn:
            return layer_tensors(config, config.num_hidden_layers)
        params = dict(self.model.named_parameters(remove_duplicate=False))
        expected = {name: shape for name, shape in model_tensors(config).items() if name in params}
        for layer_id in range(self.model.start_layer, self.model.end_layer):
            expected.update(layer_tensors(config, layer_id))
        return expected

    def _check_shape(self, name: str, tensor: torch.Tensor) -> None:
        base = name.removesuffix(SCALE_SUFFIX)
        wanted = self.known[base] if base == name else scale_shape(self.known[base])
        if tuple(tensor.shape) != wanted:
            raise Glm53Error(
                f"checkpoint: {name} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(wanted)}; the shards are of another model or a damaged conversion"
            )

    def _slot(self, name: str) -> Slot:
        if self.is_nextn:
            layer = self.model.model.decoder
            name = to_mtp_module(name, self.config)
        else:
            match = re.match(r"model\.layers\.(\d+)\.", name)
            layer = self.model.model.layers[int(match.group(1))] if match else None
        fused = getattr(getattr(layer, "mlp", None), "num_fused_shared_experts", 0)
        return locate(name, self.config, fused, self.joins_index_projections)

    def _check_complete(
        self, params: dict[str, nn.Parameter], seen: set[str], written: set[Slot]
    ) -> None:
        missing = [name for name in self._expected() if name not in seen]
        if missing:
            raise Glm53Error(
                f"checkpoint: {len(missing)} tensors are missing, first {missing[0]}; a shard was "
                "not downloaded or config.json is of another model"
            )
        filled = {slot.param for slot in written}
        shared = {"model.embed_tokens.weight", "lm_head.weight"} if self.is_nextn else set()
        if self.config.tie_word_embeddings:
            shared.add("lm_head.weight")
        unwritten = [
            name
            for name in params
            if name not in filled and name not in shared and not name.endswith(OPTIONAL_LEAVES)
        ]
        if unwritten:
            raise Glm53Error(
                f"checkpoint: nothing was written to {len(unwritten)} parameters, first "
                f"{unwritten[0]}; the checkpoint's quantisation does not fit this build"
            )


def _damaged_file(folder: str) -> str:
    """The shard that does not open; safetensors' own errors do not name it."""
    for file in sorted(Path(folder).glob("*.safetensors")) if folder else ():
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError):
            return str(file)
    return "a shard"


def _unstack_experts(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Split experts that transformers stacked: [E, 2 * inner, hidden] and [E, hidden, inner]."""
    for name, tensor in weights:
        match = _STACKED_NAME.match(name)
        if not match:
            yield name, tensor
            continue
        experts, proj = match.groups()
        for index, matrix in enumerate(tensor):
            if proj == "down_proj":
                yield f"{experts}.{index}.down_proj.weight", matrix
                continue
            gate, up = matrix.chunk(2, dim=0)
            yield f"{experts}.{index}.gate_proj.weight", gate
            yield f"{experts}.{index}.up_proj.weight", up


def _write(param: nn.Parameter, slot: Slot, tensor: torch.Tensor) -> None:
    loader = getattr(param, "weight_loader", default_weight_loader)
    if slot.rows is not None:
        param.data.narrow(0, slot.rows, tensor.shape[0]).copy_(tensor)
    elif slot.expert is not None:
        loader(param, tensor, slot.param, shard_id=slot.shard, expert_id=slot.expert)
    elif slot.shard is not None:
        loader(param, tensor, slot.shard)
    else:
        loader(param, tensor)
