"""Entry point of SGLang's plugin group while `glm53 trace` runs (see run.py)."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "GLM53_TRACE_DIR"


def install() -> None:
    """Record this process's passes into the folder that the variable names."""
    from sglang_glm53.trace.recorder import Recorder

    Recorder(Path(os.environ[FOLDER])).install()
