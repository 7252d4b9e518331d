"""A random FP8 checkpoint with GLM-5.3's dimensions, made on the GPU in seconds.

Random weights alone would test little: no token would have a margin, no draft would be accepted.
So the tiny checkpoint's idea (docs/architecture.md, "Small checkpoints") is carried to the real
sizes:

* ``successor`` is a permutation of the vocabulary. Row ``successor[t]`` of lm_head answers to the
  embedding of ``t``, and only on the first quarter of the residual stream (the choice entries);
  the rest of an embedding is random filler that attention and experts feed on.
* Where what the context adds to the stream makes another row of lm_head answer louder, the
  likeliest token is not the successor: about one time in six.
* The MTP layer passes on the embedding it is given, so it proposes the successor of the next token
  and is right unless the context turned the target's choice.

With s the standard deviation that all sublayers together add to an entry of the stream (an
embedding's is 1), a token's choice part has the length RATIO s: its successor's logit is then
``LOGIT`` on average, and the logits of all other tokens have the standard deviation
``LOGIT / RATIO``. The largest of V normal variables is near sqrt(2 ln V) - 0.5 standard deviations.

usage: python -m gpu.real_dims FOLDER [--layers 6] [--experts 16] [--vocab 154880] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_glm53.bench.rank_slice import VOCAB, slice_config, write_slice
from sglang_glm53.checkpoint import checkpoint_tensors
from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error
from sglang_glm53.tiny.fp8 import quantise

# Weights that GLM-5.3's FP8 checkpoint stores in e4m3: the projections, and nothing else.
QUANTISED = (
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("wq_b", "wk"),
    *("gate_proj", "up_proj", "down_proj"),
)
FLOAT32_NAMES = ("e_score_correction_bias",)
SHARD_BYTES = 2 << 30

CONTEXT = 0.8  # s
LOGIT = 10.0  # nats
ABOVE = 1.6  # of the successor above the likeliest other token, in standard deviations of logits
QUERY_GAIN = 1.6  # the standard deviation of attention scores is its square
MTP_CONTEXT = 0.4  # what the MTP layer's two sublayers add
HIDDEN_PART = 0.25  # of the previous hidden state in eh_proj's output


def successor_of(vocab: int, seed: int) -> torch.Tensor:
    """[vocab] int64: the likeliest token after each; one cycle through the whole vocabulary."""
    order = torch.randperm(vocab, generator=_seeded("successor", seed, "cpu"))
    successor = torch.empty_like(order)
    successor[order] = order.roll(-1)
    return successor


def prompt(vocab: int, length: int, seed: int, weights_seed: int = 0) -> list[int]:
    """`length` ids that walk along the permutation; every fourth token on average is random.

    The vocabulary's last id is left out: SGLang reports token 0's log-probability for it.
    """
    successor = successor_of(vocab, weights_seed).tolist()
    generator = torch.Generator().manual_seed(seed)
    randoms = torch.randint(0, vocab - 1, (length,), generator=generator).tolist()
    jumps = (torch.rand(length, generator=generator) < 0.25).tolist()
    tokens: list[int] = []
    for random, jump in zip(randoms, jumps, strict=True):
        following = successor[tokens[-1]] if tokens else random
        tokens.append(random if jump or following == vocab - 1 else following)
    return tokens


def write_checkpoint(
    folder: Path | str,
    *,
    layers: int = 6,
    experts: int = 16,
    vocab_size: int = VOCAB,
    seed: int = 0,
    device: str | None = None,
    **sizes: Any,
) -> Path:
    """Write config, FP8 shards with their index, and a tokenizer into `folder`.

    The same arguments on the same kind of device give the same bytes.

    Args:
        layers, experts, vocab_size: see `rank_slice.slice_config`.
        device: where the weights are made; the GPU where there is one.
        sizes: fields of config.json in place of GLM-5.3's own, for a small checkpoint.

    Returns:
        The folder.

    Raises:
        Glm53Error: the folder holds something else, or a size that no model can have.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "real_dims.json").exists():
        raise Glm53Error(f"{folder} holds something else; name a new or an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    write_slice(folder, layers=layers, experts=experts, vocab_size=vocab_size)
    config = {
        **slice_config(layers=layers, experts=experts, vocab_size=vocab_size),
        **sizes,
        "qk_head_dim": sizes.get("qk_nope_head_dim", 192) + sizes.get("qk_rope_head_dim", 64),
    }
    parsed = Glm53Config.from_hf(config)
    names = [name for name, _ in checkpoint_tensors(parsed)]
    quantisation = config["quantization_config"]
    quantisation["modules_to_not_convert"] = [
        name.removesuffix(".weight") for name in names if not is_quantised(name)
    ]
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    made = _Weights(parsed, seed, device).all()
    _write(folder, _stored(made), parsed)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "real_dims.json").write_text(json.dumps({"seed": seed, "device": device}) + "\n")
    return folder


def is_quantised(name: str) -> bool:
    """Whether a checkpoint tensor is stored as e4m3 with a scale for each 128 x 128 block."""
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and module.rpartition(".")[2] in QUANTISED


def _seeded(name: str, seed: int, device: str) -> torch.Generator:
    # 32 bits: the CPU generator takes no more of a seed.
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))


class _Weights:
    """Makes every tensor of the checkpoint, in float32 on one device."""

    def __init__(self, config: Glm53Config, seed: int, device: str) -> None:
        self.config, self.seed, self.device = config, seed, device
        ratio = (2 * math.log(config.vocab_size)) ** 0.5 - 0.5 + ABOVE
        own = (ratio * CONTEXT) ** 2
        self.choice = config.hidden_size // 4
        self.own_std = (own / self.choice) ** 0.5
        # The final norm divides by the stream's root mean square.
        square = 1 - self.choice / config.hidden_size + own / config.hidden_size + CONTEXT**2
        self.head_gain = LOGIT * square**0.5 / own
        self.gain = CONTEXT / (2 * config.num_hidden_layers) ** 0.5  # of one sublayer

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor), in the order of `checkpoint_tensors`."""
        config, layers = self.config, self.config.num_hidden_layers
        embedding, head = self._vocabulary()
        yield "model.embed_tokens.weight", embedding
        del embedding
        yield "model.norm.weight", self._norm("model.norm", config.hidden_size)
        yield "lm_head.weight", head
        del head
        for layer in range(layers):
            yield from self._layer(layer, self.gain)
        if config.num_nextn_predict_layers:
            yield from self._mtp(f"model.layers.{layers}")
            yield from self._layer(layers, MTP_CONTEXT / 2**0.5)

    def _normal(self, name: str, *shape: int) -> torch.Tensor:
        generator = _seeded(name, self.seed, self.device)
        return torch.randn(shape, generator=generator, device=self.device)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        return 1.0 + 0.05 * self._normal(f"{name}.weight", size)

    def _linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """[rows, columns]; inputs of mean square 1 give outputs of mean square `gain`^2."""
        return self._normal(f"{name}.weight", rows, columns) * (gain / columns**0.5)

    def _vocabulary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding and lm_head, [vocab, hidden] each."""
        vocab, hidden, choice = self.config.vocab_size, self.config.hidden_size, self.choice
        token = self._normal("embedding.token", vocab, choice) * self.own_std
        embedding = self._normal("embedding.filler", vocab, hidden)
        embedding[:, :choice] = token
        head = self._normal("lm_head.weight", vocab, hidden) * (0.05 / hidden**0.5)
        successor = successor_of(vocab, self.seed).to(self.device)
        head[successor, :choice] = token * self.head_gain
        return embedding, head

    def _layer(self, layer: int, gain: float) -> Iterator[tuple[str, torch.Tensor]]:
        config, prefix = self.config, f"model.layers.{layer}"
        hidden, is_mtp = config.hidden_size, layer == config.num_hidden_layers
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", self._norm(f"{prefix}.{norm}", hidden)
        yield from self._attention(f"{prefix}.self_attn", gain)
        if is_mtp or config.runs_indexer(layer):
            yield from self._indexer(f"{prefix}.self_attn.indexer")
        if is_mtp or config.is_sparse(layer):
            yield from self._moe(f"{prefix}.mlp", gain)
        else:
            yield from self._mlp(f"{prefix}.mlp", config.intermediate_size, gain)

    def _attention(self, prefix: str, gain: float) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.config
        heads, q_lora, kv_lora = c.num_attention_heads, c.q_lora_rank, c.kv_lora_rank
        nope, value = c.qk_nope_head_dim, c.v_head_dim
        yield f"{prefix}.q_a_proj.weight", self._linear(f"{prefix}.q_a_proj", q_lora, c.hidden_size)
        yield f"{prefix}.q_a_layernorm.weight", self._norm(f"{prefix}.q_a_layernorm", q_lora)
        q_b = self._linear(f"{prefix}.q_b_proj", heads * c.qk_head_dim, q_lora, QUERY_GAIN)
        yield f"{prefix}.q_b_proj.weight", q_b
        kv_a = self._linear(f"{prefix}.kv_a_proj_with_mqa", c.latent_dim, c.hidden_size)
        kv_a[kv_lora:] *= QUERY_GAIN
        yield f"{prefix}.kv_a_proj_with_mqa.weight", kv_a
        yield f"{prefix}.kv_a_layernorm.weight", self._norm(f"{prefix}.kv_a_layernorm", kv_lora)
        kv_b = self._linear(f"{prefix}.kv_b_proj", heads * (nope + value), kv_lora)
        kv_b.view(heads, nope + value, kv_lora)[:, :nope] *= QUERY_GAIN
        yield f"{prefix}.kv_b_proj.weight", kv_b
        # Softmax averages several values: about half of their size is left.
        o_proj = self._linear(f"{prefix}.o_proj", c.hidden_size, heads * value, 2.0 * gain)
        yield f"{prefix}.o_proj.weight", o_proj

    def _indexer(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.config
        heads, width = c.index_n_heads, c.index_head_dim
        yield f"{prefix}.wq_b.weight", self._linear(f"{prefix}.wq_b", heads * width, c.q_lora_rank)
        yield f"{prefix}.wk.weight", self._linear(f"{prefix}.wk", width, c.hidden_size)
        yield f"{prefix}.k_norm.weight", self._norm(f"{prefix}.k_norm", width)
        yield f"{prefix}.k_norm.bias", 0.1 * self._normal(f"{prefix}.k_norm.bias", width)
        gates = self._linear(f"{prefix}.weights_proj", heads, c.hidden_size)
        yield f"{prefix}.weights_proj.weight", gates

    def _mlp(self, prefix: str, inner: int, gain: float) -> Iterator[tuple[str, torch.Tensor]]:
        hidden = self.config.hidden_size
        for proj in ("gate_proj", "up_proj"):
            yield f"{prefix}.{proj}.weight", self._linear(f"{prefix}.{proj}", inner, hidden)
        # silu(a) * b of two standard normals has a root mean square of 0.6.
        down = self._linear(f"{prefix}.down_proj", hidden, inner, gain / 0.6)
        yield f"{prefix}.down_proj.weight", down

    def _moe(self, prefix: str, gain: float) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.config
        # Each chosen expert weighs about factor / count; the shared one weighs 1.
        gain /= (c.routed_scaling_factor**2 / c.num_experts_per_tok + 1) ** 0.5
        router = self._linear(f"{prefix}.gate", c.n_routed_experts, c.hidden_size)
        yield f"{prefix}.gate.weight", router
        name = f"{prefix}.gate.e_score_correction_bias"
        yield name, 0.1 * self._normal(name, c.n_routed_experts)
        for expert in range(c.n_routed_experts):
            yield from self._mlp(f"{prefix}.experts.{expert}", c.moe_intermediate_size, gain)
        inner = c.moe_intermediate_size * c.n_shared_experts
        yield from self._mlp(f"{prefix}.shared_experts", inner, gain)

    def _mtp(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        hidden = self.config.hidden_size
        eh_proj = self._linear(f"{prefix}.eh_proj", hidden, 2 * hidden, HIDDEN_PART * 2**0.5)
        eh_proj[:, :hidden] = torch.eye(hidden, device=self.device)
        yield f"{prefix}.eh_proj.weight", eh_proj
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{prefix}.{norm}.weight", self._norm(f"{prefix}.{norm}", hidden)


def _stored(
    tensors: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors as they are stored, on the CPU; a weight and its scale stay together."""
    for name, tensor in tensors:
        if is_quantised(name):
            weight, scale = quantise(tensor)
            yield [(name, weight.cpu()), (f"{name}_scale_inv", scale.cpu())]
        elif name.endswith(FLOAT32_NAMES):
            yield [(name, tensor.cpu())]
        else:
            yield [(name, tensor.to(torch.bfloat16).cpu())]


def _write(
    folder: Path, groups: Iterator[list[tuple[str, torch.Tensor]]], config: Glm53Config
) -> None:
    wanted = dict(checkpoint_tensors(config))
    shard: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    filled = total = number = 0

    def flush() -> None:
        nonlocal number, filled
        number += 1
        file = f"model-{number:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
        shard.clear()
        filled = 0

    for group in groups:
        for name, tensor in group:
            shape = wanted.pop(name, None)
            if shape is not None and tuple(tensor.shape) != shape:
                raise AssertionError(f"{name} is {tuple(tensor.shape)}, not {shape}")
            size = tensor.numel() * tensor.element_size()
            filled, total = filled + size, total + size
            shard[name] = tensor.contiguous()
        if filled > SHARD_BYTES:
            flush()
    if shard:
        flush()
    if wanted:
        raise AssertionError(f"{len(wanted)} tensors were not made, first {next(iter(wanted))}")
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def main() -> None:
    """Write one checkpoint and say how long it took."""
    parser = argparse.ArgumentParser(description="random FP8 checkpoint of GLM-5.3's dimensions")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    write_checkpoint(
        args.folder,
        layers=args.layers,
        experts=args.experts,
        vocab_size=args.vocab,
        seed=args.seed,
    )
    size = sum(file.stat().st_size for file in args.folder.iterdir())
    print(f"{args.folder}: {size / 2**30:.2f} GiB in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
