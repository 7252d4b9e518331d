"""The form of a checkpoint's weights: by its config, or by its name where it is elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_glm53.ledger.glm53 import config_json

BF16, FP8 = "bf16", "fp8"
COUNTED = (BF16, FP8)  # by the ledger
# GLM-5.3 as its makers publish it. Another name says nothing for certain.
PUBLISHED = {"zai-org/GLM-5.3": FP8, "zai-org/GLM-5.3-BF16": BF16}


def of(raw_config: Mapping[str, Any], asked: Any) -> str:
    """Quantization method of the weights; `asked`: --quantization, or None."""
    declared = raw_config.get("quantization_config") or {}
    return str(asked or declared.get("quant_method") or BF16)


def published(model: str) -> tuple[dict[str, Any], str | None]:
    """For a checkpoint that is not on this machine: the config.json to assume, and its weights'
    form where the name is one that is known."""
    config, form = config_json(), PUBLISHED.get(model)
    if form == BF16:
        del config["quantization_config"]
    return config, form
