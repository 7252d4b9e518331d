"""A BF16 checkpoint written again with its projections in FP8: e4m3 and 128x128 block scales."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_glm53 import tiny
from sglang_glm53.errors import Glm53Error

DERIVED_FROM = "glm53_derived_from"  # field of config.json: the digest of what it was made from
WEIGHTS = ".safetensors"


def derive(source: Path, names: Sequence[str], target: str | Path) -> Path:
    """Write the checkpoint `source` in FP8 into `target`.

    Only matrices are quantised that GLM-5.3's FP8 checkpoint stores so: norms, router, embedding,
    head and `eh_proj` stay as they are. The folder appears whole or not at all, so that several
    processes may ask for the same one.

    Args:
        source: a BF16 checkpoint's folder.
        names: its files.
        target: a folder that does not exist, is empty, or holds an earlier FP8 variant, which is
            kept if it was made from the same bytes and replaced otherwise.

    Returns:
        `target`.

    Raises:
        Glm53Error: `target` holds something else, or cannot be written.
    """
    target = Path(target).expanduser()
    digest = source_digest(source, names)
    if _made_from(target) == digest:
        return target
    if target.is_dir() and any(target.iterdir()) and _made_from(target) is None:
        raise Glm53Error(f"{target} holds something else; name a new or an empty folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="making-") as scratch:
            made = Path(scratch) / "fp8"
            made.mkdir()
            _write(source, names, made, digest)
            _put(made, target, digest)
    except OSError as error:
        raise Glm53Error(
            f"cannot write to {target}: {error.strerror or error}; name another folder"
        ) from error
    return target


def source_digest(source: Path, names: Sequence[str]) -> str:
    """SHA-256 over the files of the source and over the code that quantises them."""
    code = (Path(__file__), Path(tiny.__file__).with_name("fp8.py"))
    digest = hashlib.sha256()
    for file in (*code, *(source / name for name in names)):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _made_from(target: Path) -> str | None:
    """The digest that the FP8 variant in `target` names; None if there is none."""
    try:
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config.get(DERIVED_FROM) if isinstance(config, dict) else None


def _write(source: Path, names: Sequence[str], target: Path, digest: str) -> None:
    from sglang_glm53.tiny.options import fp8_config

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = fp8_config(config)
    kept = set(config["quantization_config"]["modules_to_not_convert"])
    for name in names:
        if name.endswith(WEIGHTS):
            _quantise_file(source / name, target / name, kept)
        elif name != "config.json":
            shutil.copyfile(source / name, target / name)
    config[DERIVED_FROM] = digest
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _quantise_file(source: Path, target: Path, kept: set[str]) -> None:
    from safetensors.torch import load_file, save_file

    from sglang_glm53.checkpoint import SCALE_SUFFIX
    from sglang_glm53.tiny.fp8 import quantise

    stored: dict[str, Any] = {}
    for name, tensor in load_file(source).items():
        if tensor.dim() == 2 and name.removesuffix(".weight") not in kept:
            stored[name], stored[name + SCALE_SUFFIX] = quantise(tensor.float())
        else:
            stored[name] = tensor
    save_file(stored, target, metadata={"format": "pt"})


def _put(made: Path, target: Path, digest: str) -> None:
    """Give the finished folder its name; another process may have been first with the same."""
    if target.exists() and _made_from(target) != digest:
        shutil.rmtree(target)
    try:
        os.replace(made, target)
    except OSError:
        if _made_from(target) != digest:
            raise
