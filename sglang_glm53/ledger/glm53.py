"""GLM-5.3's own config, for whoever has no checkpoint at hand."""

from __future__ import annotations

from typing import Any

from sglang_glm53.bench.rank_slice import slice_config

LAYERS, EXPERTS = 78, 256


def config_json() -> dict[str, Any]:
    """GLM-5.3's config.json, as far as this package reads it (FP8 checkpoint)."""
    return slice_config(layers=LAYERS, experts=EXPERTS)
