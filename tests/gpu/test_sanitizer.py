"""compute-sanitizer finds nothing in our own kernels (see sanitizer.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import sanitizer

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_clean(tool: str, results: Path) -> None:
    if reason := sanitizer.skip_reason():
        pytest.skip(reason)
    result = sanitizer.check(tool, results)
    assert result.passed, result.detail
