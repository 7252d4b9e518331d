"""What the table of features says runs on a GPU does (see features.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import features
from .compare import failures

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_features(results: Path) -> None:
    if not (results / "features.json").exists():
        features.main([str(results)])
    judged = json.loads((results / "features.json").read_text())["checks"]
    assert len(judged) > 10
    assert not failures(judged)
