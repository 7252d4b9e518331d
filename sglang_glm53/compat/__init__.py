"""The only place that names SGLang versions."""

from __future__ import annotations

from sglang_glm53.compat.versions import (
    GPU_TESTED,
    SUPPORTED,
    require_supported,
    sglang_version,
)

__all__ = ["GPU_TESTED", "SUPPORTED", "require_supported", "sglang_version"]
