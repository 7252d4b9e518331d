"""Ours beside stock and transformers at GLM-5.3's dimensions (see parity.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import parity
from .compare import failures

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_parity(results: Path) -> None:
    if not (results / "parity.json").exists():
        parity.main([str(results)])
    judged = json.loads((results / "parity.json").read_text())["checks"]
    assert len(judged) > 10
    assert not failures(judged)
