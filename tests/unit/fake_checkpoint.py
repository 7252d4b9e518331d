"""A fake of GLM-5.3's FP8 checkpoint: every name, shape and dtype at full size, and no data.

The files are sparse: 750 GB by `ls`, megabytes on the disk. Names and sizes are written out here,
not taken from the package, so that `glm53 check` is held against something else than itself.

    python tests/unit/fake_checkpoint.py DIR
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sglang_glm53.ledger.glm53 import config_json

Entry = tuple[str, list[int]]  # safetensors' dtype, shape
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "U8": 1, "I16": 2}
HIDDEN, VOCAB, HEADS = 6144, 154_880, 64
FULL = {0, 1, 2, *range(6, 78, 4), 78}  # layers with an indexer; the last one is the MTP layer


@dataclass
class Fake:
    """What will be written.

    Attributes:
        config: config.json.
        shards: tensors of each file, in order.
        index: file of each tensor.
    """

    config: dict
    shards: dict[str, dict[str, Entry]]
    index: dict[str, str] = field(default_factory=dict)

    def file_of(self, name: str) -> str:
        return next(file for file, tensors in self.shards.items() if name in tensors)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "tokenizer.json").write_text("{}")
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": self.index})
        )
        for file, tensors in self.shards.items():
            write_file(folder / file, tensors)
        return folder


def write_file(path: Path, tensors: dict[str, Entry]) -> None:
    """One sparse safetensors file."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def fake(*, layers: int = 78, experts: int = 256, shards: int = 142) -> Fake:
    """GLM-5.3, or fewer layers and experts of it."""
    full = {n for n in FULL if n < layers}
    tensors = dict(_all(layers, experts, full | {layers}))
    total = sum(math.prod(shape) * BYTES[dtype] for dtype, shape in tensors.values())
    files: list[dict[str, Entry]] = [{}]
    room = size = -(-total // shards)
    for name, (dtype, shape) in tensors.items():
        if room <= 0 and len(files) < shards:
            files.append({})
            room = size
        files[-1][name] = (dtype, shape)
        room -= math.prod(shape) * BYTES[dtype]
    names = [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    by_file = dict(zip(names, files, strict=True))
    config = config_json()
    config["num_hidden_layers"], config["n_routed_experts"] = layers, experts
    config["num_experts_per_tok"] = min(8, experts)
    config["indexer_types"] = ["full" if n in full else "shared" for n in range(layers)]
    config["quantization_config"]["modules_to_not_convert"] = [
        name.removesuffix(".weight")
        for name, (dtype, _) in tensors.items()
        if dtype != "F8_E4M3" and not name.endswith("_scale_inv")
    ]
    return Fake(config, by_file, {name: file for file, held in by_file.items() for name in held})


def _all(layers: int, experts: int, full: set[int]) -> Iterator[tuple[str, Entry]]:
    yield "model.embed_tokens.weight", ("BF16", [VOCAB, HIDDEN])
    for layer in range(layers + 1):
        yield from _layer(f"model.layers.{layer}.", layer >= 3, layer in full, experts)
    mtp = f"model.layers.{layers}."
    yield mtp + "eh_proj.weight", ("BF16", [HIDDEN, 2 * HIDDEN])
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{mtp}{norm}.weight", ("BF16", [HIDDEN])
    yield "model.norm.weight", ("BF16", [HIDDEN])
    yield "lm_head.weight", ("BF16", [VOCAB, HIDDEN])


def _fp8(name: str, rows: int, columns: int) -> Iterator[tuple[str, Entry]]:
    yield f"{name}.weight", ("F8_E4M3", [rows, columns])
    yield f"{name}.weight_scale_inv", ("F32", [-(-rows // 128), -(-columns // 128)])


def _mlp(prefix: str, inner: int) -> Iterator[tuple[str, Entry]]:
    yield from _fp8(f"{prefix}gate_proj", inner, HIDDEN)
    yield from _fp8(f"{prefix}up_proj", inner, HIDDEN)
    yield from _fp8(f"{prefix}down_proj", HIDDEN, inner)


def _layer(prefix: str, sparse: bool, full: bool, experts: int) -> Iterator[tuple[str, Entry]]:
    attention = f"{prefix}self_attn."
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{norm}.weight", ("BF16", [HIDDEN])
    yield f"{attention}q_a_layernorm.weight", ("BF16", [2048])
    yield f"{attention}kv_a_layernorm.weight", ("BF16", [512])
    yield from _fp8(f"{attention}q_a_proj", 2048, HIDDEN)
    yield from _fp8(f"{attention}q_b_proj", HEADS * 256, 2048)
    yield from _fp8(f"{attention}kv_a_proj_with_mqa", 512 + 64, HIDDEN)
    yield from _fp8(f"{attention}kv_b_proj", HEADS * (192 + 256), 512)
    yield from _fp8(f"{attention}o_proj", HIDDEN, HEADS * 256)
    if full:
        yield from _fp8(f"{attention}indexer.wq_b", 32 * 128, 2048)
        yield from _fp8(f"{attention}indexer.wk", 128, HIDDEN)
        yield f"{attention}indexer.k_norm.weight", ("BF16", [128])
        yield f"{attention}indexer.k_norm.bias", ("BF16", [128])
        yield f"{attention}indexer.weights_proj.weight", ("BF16", [32, HIDDEN])
    if not sparse:
        yield from _mlp(f"{prefix}mlp.", 12288)
        return
    yield f"{prefix}mlp.gate.weight", ("BF16", [experts, HIDDEN])
    yield f"{prefix}mlp.gate.e_score_correction_bias", ("F32", [experts])
    yield from _mlp(f"{prefix}mlp.shared_experts.", 2048)
    for expert in range(experts):
        yield from _mlp(f"{prefix}mlp.experts.{expert}.", 2048)


if __name__ == "__main__":
    fake().write(Path(sys.argv[1]))
