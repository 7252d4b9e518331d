"""200,000 tokens of context: selections and memory (see long_context.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import long_context
from .compare import failures

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_long_context(results: Path) -> None:
    if not (results / "long.json").exists():
        long_context.main([str(results)])
    judged = json.loads((results / "long.json").read_text())["checks"]
    assert len(judged) >= 8
    assert not failures(judged)
