"""Writes the tiny checkpoint: config, weights, tokenizer, chat template."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_glm53.errors import Glm53Error
from sglang_glm53.tiny.options import TinyOptions, config_json, stop_token_ids

MADE_BY = "glm53_tiny"  # field of config.json: the options the checkpoint was made with
SHARD_BYTES = 16 << 20  # small, so that the index has more than one file to name
SCRATCH = ".making-"


def make_checkpoint(folder: str | Path, options: TinyOptions | None = None, **sizes: Any) -> Path:
    """Write a tiny GLM-5.3 checkpoint into `folder`; files of an earlier one are replaced.

    The same options give the same bytes. Whatever goes wrong while it is made, an earlier one
    stays as it was.

    Args:
        folder: made if it is not there.
        options: the sizes; or give fields of `TinyOptions` as keywords.

    Returns:
        The folder.

    Raises:
        Glm53Error: an option that cannot be, a folder that holds something else or cannot be
            written, or torch, safetensors or tokenizers missing.
    """
    options = dataclasses.replace(options or TinyOptions(), **sizes)
    options.check()
    folder = Path(folder).expanduser()
    _require_libraries()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_replaceable(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as scratch:
            _write_checkpoint(Path(scratch), options)
            _move(Path(scratch), folder)
    except OSError as error:
        raise Glm53Error(
            f"cannot write to {folder}: {error.strerror or error}; name another folder"
        ) from error
    return folder


def _write_checkpoint(folder: Path, options: TinyOptions) -> None:
    from sglang_glm53.tiny.tokenizer import build_tokenizer, special_token_ids, write_tokenizer
    from sglang_glm53.tiny.weights import target_and_mtp

    tokenizer = build_tokenizer(options.vocab)
    special = special_token_ids(tokenizer)
    config = config_json(options, special)
    config[MADE_BY] = dataclasses.asdict(options)
    _write_weights(folder, _stored(target_and_mtp(config, options, tokenizer), config, options))
    write_tokenizer(tokenizer, folder, max_length=config["max_position_embeddings"])
    generation = {
        "_from_model_config": False,
        "do_sample": True,
        "eos_token_id": stop_token_ids(special),
        "pad_token_id": config["pad_token_id"],
        "temperature": 0.5,  # the likeliest token is well apart then
        "top_p": 0.95,
    }
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "config.json", config)


def _stored(
    tensors: Iterator[tuple[str, Any]], config: dict[str, Any], options: TinyOptions
) -> Iterator[tuple[str, Any]]:
    """The tensors as they are stored: cast, or quantised with a scale beside each."""
    import torch

    from sglang_glm53.tiny.fp8 import quantise
    from sglang_glm53.tiny.weights import FLOAT32_NAMES

    dtype = getattr(torch, options.dtype)
    kept = set(config.get("quantization_config", {}).get("modules_to_not_convert", ()))
    for name, tensor in tensors:
        module = name.removesuffix(".weight")
        if name.endswith(FLOAT32_NAMES):
            yield name, tensor
        elif options.fp8 and tensor.dim() == 2 and module not in kept:
            weight, scale = quantise(tensor)
            yield name, weight
            yield f"{name}_scale_inv", scale
        else:
            yield name, tensor.to(dtype).contiguous()


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Any]]) -> None:
    from safetensors.torch import save

    shards: list[dict[str, Any]] = [{}]
    filled = total = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
        total += size
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / file).write_bytes(save(shard, metadata={"format": "pt"}))
        where.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _require_libraries() -> None:
    for library in ("torch", "safetensors", "tokenizers"):
        try:
            __import__(library)
        except ImportError as error:
            raise Glm53Error(
                f"cannot import {library} ({error}); "
                "use the environment that SGLang is installed in"
            ) from error


def made_with(folder: Path) -> dict[str, Any] | None:
    """The options of the tiny checkpoint in `folder`; None if there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config.get(MADE_BY) if isinstance(config, dict) else None


def _check_replaceable(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier tiny checkpoint."""
    held = [file for file in folder.iterdir() if not file.name.startswith(SCRATCH)]
    if held and made_with(folder) is None:
        raise Glm53Error(
            f"{folder} holds something else than a tiny checkpoint; name a new or an empty folder"
        )


def _move(made: Path, folder: Path) -> None:
    """Put the finished files in the place of an earlier checkpoint's."""
    for file in (folder / "config.json", *folder.glob("model*.safetensors*")):
        file.unlink(missing_ok=True)
    # config.json last: with it the folder is a checkpoint
    for file in sorted(made.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, folder / file.name)
