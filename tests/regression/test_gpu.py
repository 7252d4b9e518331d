"""The miniature on a GPU: ours in bf16 and FP8 cache, with SGLang's own class beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from . import measure

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_on_a_gpu(tmp_path: Path) -> None:
    """Judges the results that `scripts/gpu_tests.sh` names, else measures."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    given = os.environ.get("GLM53_GPU_RESULTS")
    file = Path(given or tmp_path) / "regression.json"
    if given is None:
        measure.main(["--out", str(tmp_path), "--stock"])
    elif not file.exists():
        pytest.skip(f"{file.name} is not in {given}: that stage was not run")
    judged = json.loads(file.read_text())
    ours = [run for run in judged["runs"].values() if run["side"] == "ours"]
    assert {run["kv"] for run in ours} == set(measure.KV)
    assert sum(len(run["checks"]) for run in ours) >= 40
    assert len(judged["dense"]) == 6
    assert not judged["failures"]
