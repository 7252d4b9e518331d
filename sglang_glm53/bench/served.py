"""Which side's class serves; a time of the other side's would be worse than none."""

from __future__ import annotations

from sglang_glm53.errors import Glm53Error

OURS, STOCK = "ours", "stock"
SIDES = (STOCK, OURS)
_MODULES = {OURS: "sglang_glm53.", STOCK: "sglang."}


def check_side(side: str, model: str) -> None:
    """Raise Glm53Error unless `model`, a qualified class name, is of that side."""
    if not model.startswith(_MODULES[side]):
        raise Glm53Error(f"{model} serves where {side} was to be measured; the log says why")
