"""Facts of a checkpoint's small files. No weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_glm53.errors import Glm53Error


def read_json(folder: Path | None, name: str) -> dict[str, Any] | None:
    """A JSON object of the checkpoint's folder; None where there is no such file.

    Raises:
        Glm53Error: the file cannot be read, or holds something else.
    """
    if folder is None or not (path := folder / name).is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise Glm53Error(
            f"{path}: {' '.join(str(error).split())}; take {name} from the model's own repository"
        ) from None
    if not isinstance(content, dict):
        raise Glm53Error(f"{path}: a JSON object is expected; take it from the model's repository")
    return content


def chat_template(folder: Path | None) -> str | None:
    """The template that lies beside the weights, in a file of its own or in the tokenizer's."""
    if folder is None:
        return None
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    inside = (read_json(folder, "tokenizer_config.json") or {}).get("chat_template")
    return inside if isinstance(inside, str) else None
