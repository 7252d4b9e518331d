"""Page-major pages on a GPU (see pool.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import pool
from .compare import failures

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_pool(results: Path) -> None:
    if not (results / "pool.json").exists():
        pool.main([str(results), "--only", "kernels", "hicache"])
    judged = json.loads((results / "pool.json").read_text())["checks"]
    assert len(judged) > 10
    assert not failures(judged)
