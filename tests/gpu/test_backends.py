"""Every DSA attention backend: ours does what stock does (see backends.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import backends
from .compare import failures

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_backends(results: Path) -> None:
    if not (results / "backends.json").exists():
        backends.main([str(results)])
    judged = json.loads((results / "backends.json").read_text())["checks"]
    assert len(judged) >= 4
    assert not failures(judged)
