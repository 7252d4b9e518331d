"""What is trained when: stages of the phases, and the presets.

The phases: dense attention with windows in the first two layers, at growing contexts; dense
attention as it is; the indexers on the attention of the frozen model; sparse attention; the draft
layer on its own hidden states.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

DENSE, INDEX, SPARSE, DRAFT = "dense", "index", "sparse", "draft"


@dataclass(frozen=True)
class Stage:
    """Some steps of one phase.

    Attributes:
        phase: dense, index, sparse or draft.
        steps: at most so many.
        contexts: tokens of a sequence; the last is what the stage is about, the earlier ones are
            drawn less often.
        tokens: of recall and copying a step; sequences are as many as fit.
        window: of the first two layers, None for none.
        rates: learning rate at the stage's start and end.
        promote: share of right answers (recall) from which the next stage begins.
        dense_share: of the steps of a sparse stage run with dense attention.
    """

    phase: str
    steps: int
    contexts: tuple[int, ...]
    tokens: int = 65536
    window: int | None = 64
    rates: tuple[float, float] = (2e-3, 2e-3)
    promote: float | None = None
    dense_share: float = 0.0


@dataclass(frozen=True)
class Preset:
    """All that a training run is made of.

    Attributes:
        warmup: steps until the learning rate is reached, at the very beginning.
        index_rate: learning rate of the indexers, as a multiple of the others'.
        copy_share: of the long sequences that are copies.
        chat: conversations a step, short ones and ones with tools (alternately).
        draft_weight: of the draft layer's loss beside the target's.
        watch: rows a sequence that the indexers learn from.
        draft_steps: tokens ahead in the last phase.
        pool: conversations rendered at the start.
        compute: dtype of the model's weights; their masters are fp32.
    """

    stages: tuple[Stage, ...]
    warmup: int = 100
    index_rate: float = 1.0
    copy_share: float = 0.35
    chat: tuple[int, int] = (256, 64)
    draft_weight: float = 0.3
    watch: int = 48
    draft_steps: int = 5
    pool: int = 24000
    compute: str = "bfloat16"


ALL = (256, 512, 1024, 2048, 4096, 8192)

FULL = Preset(
    stages=(
        Stage(DENSE, 400, (128,), promote=0.97),
        Stage(DENSE, 200, (128, 256), promote=0.97),
        Stage(DENSE, 200, (128, 256, 512), promote=0.97),
        Stage(DENSE, 200, (256, 512, 1024), promote=0.97),
        Stage(DENSE, 200, (256, 1024, 2048), promote=0.97),
        Stage(DENSE, 250, (512, 2048, 4096), promote=0.97),
        Stage(DENSE, 250, (512, 2048, 4096, 8192), promote=0.98),
        Stage(DENSE, 600, ALL, window=None, rates=(2e-3, 6e-4)),
        Stage(INDEX, 400, ALL, tokens=32768, rates=(2e-3, 1e-3)),
        Stage(SPARSE, 700, ALL, tokens=32768, rates=(6e-4, 5e-5), dense_share=0.2),
        Stage(DRAFT, 500, (256, 512, 1024, 2048, 4096), tokens=32768, rates=(1e-3, 5e-5)),
    )
)

SMOKE = Preset(
    stages=(
        Stage(DENSE, 3, (64,), tokens=256, window=32),
        Stage(DENSE, 1, (160,), tokens=320, window=None),
        Stage(INDEX, 2, (160,), tokens=320),
        Stage(SPARSE, 2, (160,), tokens=320, rates=(6e-4, 5e-5), dense_share=0.3),
        Stage(DRAFT, 2, (64, 160), tokens=320),
    ),
    warmup=2,
    chat=(2, 1),
    watch=8,
    draft_steps=3,
    pool=60,
    compute="float32",
)


def _small(phase: str, steps: int, contexts: tuple[int, ...], rates: tuple[float, float], **more):
    """A stage of steps that two cores take in one to three seconds."""
    return Stage(phase, steps, contexts, rates=rates, **{"tokens": 4096, **more})


HIGH = (2e-3, 2e-3)

CPU = Preset(
    stages=(
        _small(DENSE, 150, (64, 128), HIGH),
        _small(DENSE, 60, (128, 256), HIGH),
        _small(DENSE, 60, (128, 512), HIGH),
        _small(DENSE, 60, (256, 1024), HIGH),
        _small(DENSE, 60, (512, 2048), HIGH),
        _small(DENSE, 40, (512, 2048, 4096), HIGH, tokens=8192),
        _small(DENSE, 30, (512, 2048, 8192), (1.5e-3, 1.5e-3), tokens=8192),
        _small(DENSE, 700, (128, 256, 512, 1024), (1.5e-3, 8e-4), window=None),
        _small(DENSE, 100, (1024, 2048, 4096, 8192), (1e-3, 6e-4), window=None),
        _small(INDEX, 120, ALL, (2e-3, 1e-3)),
        _small(SPARSE, 250, (256, 512, 1024, 2048), (6e-4, 2e-4), dense_share=0.2),
        _small(SPARSE, 40, (1024, 4096, 8192), (2e-4, 5e-5)),
        _small(DRAFT, 150, (128, 256, 512, 1024), (1e-3, 1e-4)),
    ),
    warmup=50,
    chat=(40, 10),
    watch=32,
)


def _with_steps(preset: Preset, *steps: int) -> Preset:
    stages = zip(preset.stages, steps, strict=True)
    return dataclasses.replace(
        preset, stages=tuple(dataclasses.replace(stage, steps=count) for stage, count in stages)
    )


def _scaled(preset: Preset, factor: float) -> Preset:
    stages = tuple(
        dataclasses.replace(s, rates=(s.rates[0] * factor, s.rates[1] * factor))
        for s in preset.stages
    )
    return dataclasses.replace(preset, stages=stages)


PRESETS = {
    "full": FULL,
    "short": _with_steps(FULL, 250, 100, 100, 100, 100, 100, 120, 600, 250, 450, 350),
    "fast": _scaled(FULL, 1.75),
    "slow": _scaled(FULL, 0.5),
    "cpu": CPU,
    "smoke": SMOKE,
}
