"""transformers in FP32 over an FP8 checkpoint: the log-probability of every token of some prompts.

The weights are dequantised while they are read (e4m3 times its block's scale, exact in FP32), TF32
is off, and a prompt is prefilled in chunks through transformers' own cache, so that 20,000 tokens
fit. A process of its own: its memory is free again when it ends.

usage: python -m gpu.reference CHECKPOINT REQUESTS OUT.npz [--chunk 512]
REQUESTS is the file that `prompts.write_requests` writes; OUT holds an array [n - 1] for each
prompt, named by its group and its place in it.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from sglang_glm53.checkpoint import FP8_BLOCK, SCALE_SUFFIX

from .prompts import AGAIN, read_requests

_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def load(checkpoint: Path, device: str) -> torch.nn.Module:
    """The checkpoint's target as `GlmMoeDsaForCausalLM` in FP32, eager attention and experts.

    Raises:
        AssertionError: a parameter that the checkpoint does not fill, or a tensor without a place.
    """
    from reference.hf import prepare_attention
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    config = GlmMoeDsaConfig.from_pretrained(checkpoint)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.device(device):
        model = GlmMoeDsaForCausalLM(config).float().eval().requires_grad_(False)
    for layer in model.model.layers:
        prepare_attention(layer.self_attn, config.rms_norm_eps)
    places = dict(model.state_dict(keep_vars=True))
    missing = dict.fromkeys(places, 0)
    mtp = f"model.layers.{config.num_hidden_layers}."
    for name, tensor in dequantised(checkpoint, device):
        if name.startswith(mtp):
            continue
        match = _EXPERT.match(name)
        if match:
            experts, index, kind = match.groups()
            name = f"{experts}.{'down_proj' if kind == 'down' else 'gate_up_proj'}"
            place = places[name].data[int(index)]
            if kind != "down":
                place = place.chunk(2, dim=0)[kind == "up"]
        else:
            place = places[name].data
        assert place.shape == tensor.shape, f"{name}: {list(tensor.shape)}, {list(place.shape)}"
        place.copy_(tensor)
        missing[name] += tensor.numel()
    wrong = [name for name, count in missing.items() if count != places[name].numel()]
    assert not wrong, f"{len(wrong)} parameters are not filled, first {wrong[0]}"
    return model


def dequantised(checkpoint: Path, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, FP32 tensor) of the whole checkpoint; a weight stands beside its scale in a shard."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt", device=device) as stored:
            names = set(stored.keys())
            for name in sorted(names):
                if name.endswith(SCALE_SUFFIX):
                    continue
                tensor = stored.get_tensor(name).float()
                if name + SCALE_SUFFIX in names:
                    rows, columns = tensor.shape
                    scale = stored.get_tensor(name + SCALE_SUFFIX)
                    scale = scale.repeat_interleave(FP8_BLOCK, 0)[:rows]
                    tensor *= scale.repeat_interleave(FP8_BLOCK, 1)[:, :columns]
                yield name, tensor


@torch.no_grad()
def logprobs(model: torch.nn.Module, tokens: list[int], chunk: int) -> torch.Tensor:
    """[n - 1] FP32 on the CPU: log p(token i + 1 | tokens 0..i) in nats, prefilled by `chunk`."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=model.config)
    device = model.lm_head.weight.device
    ids = torch.tensor([tokens], device=device)
    following = ids[0, 1:]
    parts = []
    for start in range(0, len(tokens), chunk):
        hidden = model.model(
            input_ids=ids[:, start : start + chunk], past_key_values=cache, use_cache=True
        ).last_hidden_state
        wanted = following[start : start + chunk]
        scores = torch.log_softmax(model.lm_head(hidden[0, : len(wanted)]), dim=-1)
        parts.append(scores.gather(1, wanted[:, None])[:, 0].cpu())
    return torch.cat(parts)


def main() -> None:
    """Compute every prompt of a request file that asks for its log-probabilities."""
    parser = argparse.ArgumentParser(description="transformers' FP32 log-probabilities")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("requests", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    began = time.monotonic()
    model = load(args.checkpoint, args.device)
    print(f"transformers: loaded in {time.monotonic() - began:.1f} s", flush=True)
    results: dict[str, np.ndarray] = {}
    for group in read_requests(args.requests):
        if not group.prompt_logprobs or group.name.endswith(AGAIN):
            continue
        for number, tokens in enumerate(group.prompts):
            began = time.monotonic()
            values = logprobs(model, tokens, args.chunk).numpy()
            results[f"{group.name}.{number}"] = values
            print(
                f"transformers: {group.name}.{number}, {len(tokens)} tokens, mean log-probability "
                f"{values.mean():.3f}, {time.monotonic() - began:.1f} s",
                flush=True,
            )
            with args.out.open("wb") as out:  # as it goes: a killed run keeps what it has
                np.savez(out, **results)


if __name__ == "__main__":
    main()
