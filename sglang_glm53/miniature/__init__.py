"""The miniature: a small GLM-5.3 that has learned something, shipped with the package.

A complete checkpoint in BF16 (docs/miniature.md): recall, copying, sums and tool calls in the GLM
chat format. It serves wherever GLM-5.3 does.
"""

from __future__ import annotations

from pathlib import Path

from sglang_glm53.errors import Glm53Error
from sglang_glm53.miniature.fp8 import derive

__all__ = ["FILES", "derive_fp8", "folder", "shipped"]

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def shipped() -> bool:
    """Whether this version carries the trained weights at all."""
    return (Path(__file__).resolve().parent / "model.safetensors").exists()


def folder() -> Path:
    """The checkpoint's folder, to be read only.

    Raises:
        Glm53Error: a file of it is missing, which is a broken install.
    """
    place = Path(__file__).resolve().parent
    for name in FILES:
        if not (place / name).is_file():
            raise Glm53Error(
                f"{place / name} is missing: the install is incomplete; "
                "reinstall with `pip install --force-reinstall sglang-glm53`"
            )
    return place


def derive_fp8(target: str | Path) -> Path:
    """Write the miniature in FP8 into `target`, as GLM-5.3's own FP8 checkpoint is stored.

    See `fp8.derive`: whole or not at all, and nothing is done where `target` holds it already.
    """
    return derive(folder(), FILES, target)
