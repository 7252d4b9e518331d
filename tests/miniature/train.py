"""Trains the miniature: dense, indexers by KL, sparse, draft layer (see plan.py).

    python tests/miniature/train.py --out DIR [--preset full] [--resume DIR] [--minutes N]

Reproducible by its seed on one kind of machine; every step draws its batch from (seed, step), so
that a run which is stopped and resumed takes the same steps as one which is not. DIR gets the
state (resume from it, or export it with export.py) and evaluation.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

if __package__ in (None, ""):  # run as a file
    here = Path(__file__).resolve()
    sys.path[:0] = [str(here.parents[1]), str(here.parents[2])]
    __package__ = "miniature"
    import miniature  # noqa: F401

from miniature import steps
from miniature.batches import Batch, Batches, ChatPool
from miniature.evaluate import Size, evaluate, table
from miniature.export import make_model
from miniature.optimiser import Optimiser
from miniature.plan import DENSE, DRAFT, INDEX, PRESETS, SPARSE, Preset, Stage
from miniature.tasks import Tasks
from miniature.tokenizer import build_tokenizer

LEARNS = {
    DENSE: {"main", "draft"},
    INDEX: {"index"},
    SPARSE: {"main", "draft", "index"},
    DRAFT: {"draft", "index"},
}
REPORT_SECONDS = 5.0
PROMOTE_EVERY = 10  # steps between two looks at the accuracy
SMALL = Size(2, (160,), 2, (12,), 8, 2, 512)


@dataclass
class Progress:
    """Where a run stands; what is saved beside the weights.

    Attributes:
        seed, preset: of the run.
        stage, step: the stage, and steps done in it.
        done: steps done in all.
        right: running accuracy that stages end by.
        seconds: spent so far, over all runs.
    """

    seed: int
    preset: str
    stage: int = 0
    step: int = 0
    done: int = 0
    right: float = 0.0
    seconds: float = 0.0


class Trainer:
    """One run on one device."""

    def __init__(self, progress: Progress, device: str, plan: Preset | None = None) -> None:
        self.progress = progress
        self.plan = plan or PRESETS[progress.preset]
        self.device = torch.device(device)
        dtype = getattr(torch, self.plan.compute)
        self.tasks = Tasks(build_tokenizer())
        # Masters begin in fp32 also where the model computes in bf16.
        model = make_model(progress.seed).to(self.device)
        self.optimiser = Optimiser(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.model = model
        self.batches = Batches(self.tasks, self.device)
        self.chats = ChatPool(self.tasks, self.plan.pool, progress.seed, self.device)
        self.sums = steps.Sums()
        self.shown = steps.Sums()

    def run(self, deadline: float, say: Callable[[str], None] = print) -> bool:
        """Train until the end (True) or the deadline (False), a `time.monotonic` value."""
        progress = self.progress
        began = reported = time.monotonic()
        seconds = progress.seconds
        tokens = 0
        while progress.stage < len(self.plan.stages):
            stage = self.plan.stages[progress.stage]
            self.optimiser.learn(LEARNS[stage.phase])
            while progress.step < stage.steps:
                if time.monotonic() > deadline:
                    return False
                context = self.one_step(stage)
                tokens += stage.tokens
                progress.step += 1
                progress.done += 1
                now = time.monotonic()
                progress.seconds = seconds + now - began
                if stage.promote is not None and progress.step % PROMOTE_EVERY == 0:
                    if self._promoted(stage):
                        break
                if now - reported > REPORT_SECONDS:
                    say(self._line(stage, context, tokens / (now - reported)))
                    reported, tokens = now, 0
            say(self._line(stage, stage.contexts[-1], None))
            progress.stage += 1
            progress.step, progress.right = 0, 0.0
        return True

    def one_step(self, stage: Stage) -> int:
        """Forward, backward, update; returns the context that was drawn."""
        progress, plan = self.progress, self.plan
        layout = np.random.default_rng((progress.seed, progress.done))
        generator = torch.Generator(self.device)
        generator.manual_seed(int(layout.integers(1 << 62)))
        context = stage.contexts[-1]
        if stage.phase == DENSE and stage.window is not None:
            if len(stage.contexts) > 1 and layout.random() < 0.3:
                context = stage.contexts[int(layout.integers(len(stage.contexts) - 1))]
        else:
            context = stage.contexts[int(layout.integers(len(stage.contexts)))]
        count = max(2, stage.tokens // context)
        copies = max(1, round(count * plan.copy_share))
        group = progress.done % 2
        chat = self.chats.draw(group, plan.chat[group], layout)
        copying = self.batches.copying(copies, context, generator, layout)
        if stage.phase == DRAFT:
            copying = self.batches.copying(count, context, generator, layout)
            loss = steps.draft_step(
                self.model,
                copying,
                chat,
                generator,
                self.sums,
                watch=plan.watch,
                steps=plan.draft_steps,
            )
        else:
            recall = self.batches.recall(count - copies, context, generator, layout)
            loss = self._trunk_step(stage, recall, copying, chat, generator, layout)
        loss.backward()
        rate = self._rate(stage)
        rates = {"main": rate, "draft": rate, "index": rate * plan.index_rate}
        self.sums.add("norm", self.optimiser.step(rates))
        self.sums.add("loss", loss)
        return context

    def _trunk_step(
        self,
        stage: Stage,
        recall: Batch,
        copying: Batch,
        chat: Batch,
        generator: torch.Generator,
        layout: np.random.Generator,
    ) -> torch.Tensor:
        plan = self.plan
        if stage.phase == INDEX:
            return steps.index_step(
                self.model,
                recall,
                copying,
                chat,
                generator,
                self.sums,
                watch=plan.watch,
                draft_steps=plan.draft_steps,
            )
        sparse = stage.phase == SPARSE and layout.random() >= stage.dense_share
        return steps.language_step(
            self.model,
            recall,
            copying,
            chat,
            generator,
            self.sums,
            sparse=sparse,
            window=stage.window if stage.phase == DENSE else None,
            draft_weight=plan.draft_weight,
            watch=plan.watch if stage.phase == SPARSE else 0,
        )

    def _rate(self, stage: Stage) -> float:
        share = self.progress.step / max(1, stage.steps - 1)
        rate = stage.rates[0] * (stage.rates[1] / stage.rates[0]) ** share
        warm = (self.progress.done + 1) / self.plan.warmup if stage.phase == DENSE else 1.0
        return rate * min(1.0, warm)

    def _promoted(self, stage: Stage) -> bool:
        means = self.sums.means()
        self.shown_means = means
        progress = self.progress
        progress.right = 0.5 * progress.right + 0.5 * means.get("recall", 0.0)
        return progress.right >= stage.promote

    def _line(self, stage: Stage, context: int, rate: float | None) -> str:
        means = self.sums.means() or getattr(self, "shown_means", {})
        self.shown_means = means
        values = " ".join(f"{name}={value:.3g}" for name, value in means.items())
        speed = f" {rate / 1000:.0f}K tok/s" if rate else " (stage done)"
        progress = self.progress
        place = f"{progress.stage} {stage.phase} {progress.step}/{stage.steps} ctx {context}"
        rates = f"lr {self._rate(stage):.1e}{speed}"
        return f"[{progress.seconds:6.1f}s] {place} {rates} {values}"

    def save(self, folder: Path) -> None:
        """Write the state; the run goes on from exactly what was written."""
        self.optimiser.save(folder)
        progress = self.progress
        about = {
            "seed": progress.seed,
            "preset": progress.preset,
            "stage": progress.stage,
            "step": progress.step,
            "done": progress.done,
            "right": progress.right,
            "seconds": progress.seconds,
        }
        (folder / "state.json").write_text(json.dumps(about, indent=2) + "\n")

    @classmethod
    def resumed(cls, folder: Path, device: str, plan: Preset | None = None) -> Trainer:
        """Go on from a saved state."""
        about = json.loads((folder / "state.json").read_text())
        trainer = cls(Progress(**about), device, plan)
        trainer.optimiser.load(folder)
        return trainer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the state")
    parser.add_argument("--preset", default="full", choices=sorted(PRESETS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--resume", type=Path, help="folder of an earlier state")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop and save after so long")
    parser.add_argument("--no-evaluation", action="store_true")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    if options.device == "cuda" and not torch.cuda.is_available():
        print("train: no CUDA device; use --device cpu --preset cpu", file=sys.stderr)
        return 1
    try:
        if options.resume:
            trainer = Trainer.resumed(options.resume, options.device)
        else:
            trainer = Trainer(Progress(options.seed, options.preset), options.device)
    except (OSError, KeyError, TypeError, ValueError) as error:
        print(f"train: cannot read {options.resume}: {error!r}", file=sys.stderr)
        return 1

    def say(line: str) -> None:
        print(line, flush=True)

    say(f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters on {options.device}")
    finished = trainer.run(deadline, say)
    trainer.save(options.out)
    say(f"{'finished' if finished else 'stopped'}: {options.out}")
    if not options.no_evaluation:
        size = SMALL if trainer.progress.preset == "smoke" else Size()
        began = time.monotonic()
        result = evaluate(trainer.model, trainer.tasks, 12345, size)
        (options.out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
        say(table(result))
        say(f"evaluated in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
