"""How the GPU run of the features judges what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("torch")

from gpu import features  # noqa: E402

CONFIG = {"num_experts_per_tok": 2, "index_topk": 4}


def answer(*tokens: int, gap: float = 1.0) -> dict[str, Any]:
    """A greedy answer whose second-best token is one above, `gap` nats behind."""
    top = [[[-1.0, token], [-1.0 - gap, token + 1]] for token in tokens]
    return {"tokens": list(tokens), "logprobs": [-1.0] * len(tokens), "top": top}


def test_same_and_other_answers() -> None:
    first, other, near = [answer(1, 2)], [answer(1, 9)], [answer(1, 3, gap=1e-4)]
    assert features.same_answers("x", first, first, same=True).passed
    assert not features.same_answers("x", first, other, same=True).passed
    assert features.same_answers("x", first, other, same=False).passed
    assert not features.same_answers("x", first, first, same=False).passed
    close = [answer(1, 2, gap=1e-4)]  # its second best is what the other side chose
    assert features.same_answers("x", close, near, same=True).passed
    assert not features.same_answers("x", [], [], same=True).passed


def test_hidden_states_come_in_three_nestings() -> None:
    rows = [[1.0, 2.0], [3.0, 4.0]]
    for nested in (rows, [rows], [rows[:1], rows[1]]):
        assert features.rows_of(nested).tolist() == rows
    assert features.rows_of(rows[0]).tolist() == rows[:1]


def test_share_of_equal_ids() -> None:
    left = np.array([[3, 1, -1, -1], [5, 6, 7, 8]])
    assert features.equal_share(left, left[:, ::-1]) == 1.0
    assert features.equal_share(left, np.array([[1, 3, -1, -1], [5, 6, 1, 2]])) == 0.75


def test_returned_tensors_of_another_layer_do_not_pass() -> None:
    generator = np.random.default_rng(0)
    ours = {
        "hidden.0": generator.normal(size=(3, 64)).astype(np.float32),
        "routed_experts.0": generator.integers(0, 99, 20).astype(np.int32),
        "indexer_topk.0": generator.integers(0, 99, 40).astype(np.int32),
    }
    assert all(c.passed for c in features.judge_returned("x", ours, dict(ours), CONFIG))
    other = {key: generator.permutation(value) for key, value in ours.items()}
    checks = features.judge_returned("x", ours, other, CONFIG)
    assert [c.passed for c in checks] == [True, False, False, False]


def updates(**changed: Any) -> dict[str, Any]:
    first, other = [answer(1, 2)], [answer(8, 9)]
    by_step = {"same": first, "other": other, "misfit": other, "back": first}
    by_step |= {"turned": [answer(5, 6)], "restored": first} | changed
    steps = {k: {"success": k != "misfit", "message": "", "answers": v} for k, v in by_step.items()}
    return {"answers": first, "updates": steps}


def test_weight_updates() -> None:
    assert all(c.passed for c in features.judge_updates("x", updates()))
    for step, wrong in (
        ("same", [answer(8, 9)]),
        ("other", [answer(1, 2)]),
        ("misfit", [answer(1, 2)]),
        ("turned", [answer(1, 2)]),
        ("restored", [answer(5, 6)]),
    ):
        failed = [c for c in features.judge_updates("x", updates(**{step: wrong})) if not c.passed]
        assert len(failed) == 1 or step == "other", (step, failed)
        assert failed


def test_what_is_only_tried_is_told_and_not_failed(tmp_path: Path) -> None:
    run = features.Run("a-ours", "ours", like="a-stock", tried=True)
    stock = features.Run("a-stock", "stock", tried=True)
    record = {"complete": True, "answers": [answer(1, 2)]}
    (tmp_path / "feature-a-stock.json").write_text(json.dumps(record))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "feature-a-ours.failed").write_text("RuntimeError: no")
    (check,) = features.judge(tmp_path, [stock, run], CONFIG)
    assert check.passed and check.detail == "does not run: RuntimeError: no"
    promised = features.Run("a-ours", "ours", like="a-stock")
    assert not features.judge(tmp_path, [promised], CONFIG)[0].passed


def test_runs_are_named_once_and_compared_with_one_that_is_there() -> None:
    names = [run.name for run in features.RUNS]
    assert len(set(names)) == len(names)
    for run in features.RUNS:
        assert run.like is None or run.like in names
        assert set(run.asks) <= features.ASKS.keys() and run.name.endswith(run.side)
