"""SGLang's memory on this GPU beside the ledger's estimate (see memory.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import memory

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_memory(results: Path) -> None:
    if not (results / "memory.json").exists():
        memory.main([str(results)])
    rows = json.loads((results / "memory.json").read_text())
    assert len(rows) >= 3
    wrong = {row["name"]: row["misses"] or row["error"] for row in rows}
    assert not {name: why for name, why in wrong.items() if why}
