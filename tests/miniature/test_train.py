"""The trainer on a CPU, a few steps of it: it learns, stops, resumes, and says what is wrong."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from . import steps, train
from .evaluate import _accepted
from .export import read_state
from .indexer import loss
from .model import Watch
from .plan import DENSE, DRAFT, INDEX, SMOKE, SPARSE, Preset, Stage
from .train import LEARNS, Progress, Trainer

FOREVER = 1e12


def preset(*stages: Stage) -> Preset:
    return dataclasses.replace(SMOKE, stages=stages, chat=(2, 1), warmup=1, pool=20, watch=4)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def quiet(_: str) -> None:
    pass


def test_loss_falls() -> None:
    stage = Stage(DENSE, 6, (48,), tokens=192, window=16)
    trainer = Trainer(Progress(1, "smoke"), "cpu", preset(stage))
    trainer.optimiser.learn(LEARNS[DENSE])
    values = []
    for _ in range(6):
        trainer.one_step(stage)
        trainer.progress.step += 1  # and not `done`: the same batch each time
        values.append(trainer.sums.means()["loss"])
    assert values[-1] < 0.8 * values[0]


def test_index_loss_falls() -> None:
    """The indexers learn the attention of a frozen model, and nothing else changes."""
    stage = Stage(INDEX, 5, (160,), tokens=320)
    trainer = Trainer(Progress(1, "smoke"), "cpu", preset(stage))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.optimiser.learn(LEARNS[INDEX])
    values = []
    for _ in range(5):
        trainer.one_step(stage)
        values.append(trainer.sums.means())
    for name in ("index 0", "index 1", "index mtp"):
        assert values[-1][name] < values[0][name], name
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]) != (".indexer." in name), name


def test_index_loss_is_a_divergence() -> None:
    """Zero where the attention is the softmax of the scores, positive elsewhere."""
    trainer = Trainer(Progress(1, "smoke"), "cpu", preset(Stage(DENSE, 1, (64,))))
    model = trainer.model
    rows = torch.tensor([[3, 40], [20, 63]])
    watch = Watch(rows)
    tokens = torch.randint(0, 600, (2, 64), generator=torch.Generator().manual_seed(1))
    model.requires_grad_(False)
    model(tokens, watch=watch)
    indexer, inputs, rope = model.indexers()["1"], watch.inputs[1], model.rope(64)
    even = (torch.arange(64) <= rows[..., None]).float()
    even = even / even.sum(-1, keepdim=True)
    assert float(loss(indexer, inputs, rope, rows, even)) > 0
    indexer.weights_proj.weight.zero_()  # all scores are equal
    assert abs(float(loss(indexer, inputs, rope, rows, even))) < 1e-5


def test_resumed_run_is_the_whole_run(tmp_path: Path) -> None:
    """Stopped in the middle of each kind of phase and resumed: the same weights, to the bit."""
    plan = preset(
        Stage(DENSE, 2, (40,), tokens=80, window=16),
        Stage(SPARSE, 2, (40,), tokens=80, dense_share=0.5),
        Stage(DRAFT, 2, (40,), tokens=80),
    )
    whole = Trainer(Progress(2, "smoke"), "cpu", plan)
    for stage in range(3):
        for step in range(2):
            whole.optimiser.learn(LEARNS[plan.stages[stage].phase])
            whole.one_step(plan.stages[stage])
            whole.progress.step, whole.progress.done = step + 1, whole.progress.done + 1
            if step == 0:
                whole.save(tmp_path / f"at{stage}")
                # A run that is stopped here would go on from what is written now.
                if stage < 2:
                    continue
        whole.progress.stage, whole.progress.step = stage + 1, 0
    stopped = Trainer.resumed(tmp_path / "at0", "cpu", plan)
    for stage in range(3):
        while stopped.progress.stage == stage and stopped.progress.step < 2:
            stopped.optimiser.learn(LEARNS[plan.stages[stage].phase])
            stopped.one_step(plan.stages[stage])
            stopped.progress.step += 1
            stopped.progress.done += 1
            if stage and stopped.progress.step == 1:
                stopped.save(tmp_path / "again")
                stopped = Trainer.resumed(tmp_path / "again", "cpu", plan)
        stopped.progress.stage, stopped.progress.step = stage + 1, 0
    for (name, a), b in zip(
        whole.model.named_parameters(), stopped.model.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    stopped.save(tmp_path / "end")
    read = dict(read_state(tmp_path / "end").named_parameters())
    for name, parameter in stopped.model.named_parameters():
        assert ((parameter - read[name]).abs() <= parameter.abs() * 2**-8).all(), name


def test_deadline(tmp_path: Path) -> None:
    """No step is begun after the deadline; what is saved says where to go on."""
    plan = preset(Stage(DENSE, 50, (40,), tokens=80, window=16))
    trainer = Trainer(Progress(2, "smoke"), "cpu", plan)
    assert trainer.run(time.monotonic() - 1, quiet) is False
    trainer.save(tmp_path)
    assert Trainer.resumed(tmp_path, "cpu", plan).progress.done == 0


def test_accept_length() -> None:
    """Rows propose 5 tokens: all right, none right, two right."""
    sequence = list(range(100, 130))
    right = [[sequence[(p + 2 + j) % 30] for j in range(5)] for p in range(30)]
    assert _accepted(right, sequence, 5) == (24, 4)
    wrong = [[0] * 5 for _ in range(30)]
    written, rounds = _accepted(wrong, sequence, 5)
    assert written == rounds > 10
    two = [row[:2] + [0] * 3 for row in right]
    written, rounds = _accepted(two, sequence, 5)
    assert written == 3 * rounds


def test_sums_are_weighted_means() -> None:
    sums = steps.Sums()
    sums.add("a", torch.tensor(1.0), torch.tensor(3.0))
    sums.add("a", torch.tensor(5.0), torch.tensor(1.0))
    assert sums.means() == {"a": 2.0} and sums.means() == {}


def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", "--out", str(tmp_path), "--resume", str(tmp_path / "none")]
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(sys, "argv", [*command, "--device", device])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert train.main() == 1
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    """Every phase, evaluation and export, from the command line."""
    command = [sys.executable, train.__file__, "--device", "cpu", "--preset", "smoke"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout and "accept length" in done.stdout
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 62e6
    assert read_state(tmp_path) is not None
