"""Writes the trained miniature as a checkpoint under GLM-5.3's tensor names.

    python -m miniature.export STATE FOLDER

STATE is what train.py saves; FOLDER gets config.json, generation_config.json, model.safetensors,
tokenizer.json, tokenizer_config.json and chat_template.jinja.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GlmMoeDsaConfig

from sglang_glm53.tiny.options import stop_token_ids
from sglang_glm53.tiny.tokenizer import special_token_ids, write_tokenizer

from .model import LAYERS, Miniature, config_fields
from .start import initialise
from .tokenizer import VOCAB, build_tokenizer

LIMIT = 16_000_000  # bytes of model.safetensors
FLOAT32 = "e_score_correction_bias"


def make_model(seed: int) -> Miniature:
    """The miniature with its first weights, fp32 on the CPU."""
    fields = config_fields(VOCAB, special_token_ids(build_tokenizer()))
    config = GlmMoeDsaConfig(**fields)
    config._attn_implementation = "eager"
    model = Miniature(config)
    initialise(model, seed)
    return model


def checkpoint_tensors(model: Miniature) -> dict[str, torch.Tensor]:
    """Every tensor under the name that GLM-5.3's checkpoints give it; bf16, gate biases fp32."""
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("target."):
            name = name.removeprefix("target.")
        elif name.startswith("mtp.layer."):
            name = f"model.layers.{LAYERS}." + name.removeprefix("mtp.layer.")
        elif name.startswith("mtp.norm."):
            name = f"model.layers.{LAYERS}.shared_head.norm." + name.removeprefix("mtp.norm.")
        else:
            name = f"model.layers.{LAYERS}." + name.removeprefix("mtp.")
        dtype = torch.float32 if name.endswith(FLOAT32) else torch.bfloat16
        tensor = tensor.detach().to("cpu", dtype)
        stored.update(_split_experts(name, tensor))
    return {name: tensor.contiguous() for name, tensor in stored.items()}


def _split_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Stacked experts to one matrix each."""
    head, _, kind = name.rpartition(".")
    if not head.endswith(".experts"):
        return {name: tensor}
    split = {}
    for expert, matrix in enumerate(tensor):
        if kind == "gate_up_proj":
            gate, up = matrix.chunk(2)
            split[f"{head}.{expert}.gate_proj.weight"] = gate
            split[f"{head}.{expert}.up_proj.weight"] = up
        else:
            split[f"{head}.{expert}.down_proj.weight"] = matrix
    return split


def write_checkpoint(model: Miniature, folder: Path) -> int:
    """Write all files; returns the size of model.safetensors in bytes.

    Raises:
        ValueError: it would be larger than `LIMIT`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    special = special_token_ids(tokenizer)
    fields = config_fields(VOCAB, special)
    weights = folder / "model.safetensors"
    save_file(checkpoint_tensors(model), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors leaves it to its owner alone
    size = weights.stat().st_size
    if size > LIMIT:
        weights.unlink()
        raise ValueError(f"the weights take {size:,} bytes; at most {LIMIT:,} are shipped")
    write_tokenizer(tokenizer, folder, max_length=fields["max_position_embeddings"])
    generation = {
        "_from_model_config": False,
        "do_sample": True,
        "eos_token_id": stop_token_ids(special),
        "pad_token_id": fields["pad_token_id"],
        "temperature": 0.5,
        "top_p": 0.95,
    }
    for name, content in (("config", fields), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return size


def read_state(folder: Path) -> Miniature:
    """The model of a state that train.py saved."""
    about = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    model = make_model(about["seed"])
    high = load_file(folder / "high.safetensors")
    for name, parameter in model.named_parameters():
        parameter.data.copy_(high[name])
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("state", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        size = write_checkpoint(read_state(options.state), options.folder)
    except (OSError, KeyError, ValueError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    print(f"{options.folder}: {size:,} bytes of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
