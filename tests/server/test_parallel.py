"""Two processes (gloo) compute what one computes: TP 2, attention DP 2, with EAGLE and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .comparing import largest_difference, settled_prompt
from .conftest import FLOAT32
from .harness import ServerPool
from .test_eagle import eagle_arguments

pytestmark = pytest.mark.server

SEEDS = {1: 2001, 65: 2065, 200: 2200, 700: 22_700}  # of a settled prompt a length
NEW = 32
TP = ("--tp", "2")
DP = (*TP, "--dp", "2", "--enable-dp-attention")
EAGLE = eagle_arguments(3, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(arguments, marks=pytest.mark.server(f"ranks {name}"), id=name)
        for name, arguments in {
            "tp2": TP,
            "tp2-eagle": (*TP, *EAGLE),
            "tp2-dp2": DP,
            "tp2-dp2-eagle": (*DP, *EAGLE),
        }.items()
    ],
)
def test_two_processes(
    arguments: tuple[str, ...],
    servers: ServerPool,
    plain_runs: Callable,
    tiny_checkpoint: Callable[..., Path],
    reference: Callable,
) -> None:
    """Same tokens, log-probabilities within 1e-5; alone and several prompts at once."""
    model = reference(tiny_checkpoint())
    prompts = [settled_prompt(model, length, NEW, seed) for length, seed in SEEDS.items()]
    expected, _ = plain_runs(prompts, NEW)
    server = servers.get(tiny_checkpoint(), *FLOAT32, *arguments)
    server.flush()
    answers = [server.generate([prompt], NEW)[0] for prompt in prompts]
    server.flush()
    together = server.generate(prompts, NEW)
    worst = 0.0
    for one, batched, plain in zip(answers, together, expected, strict=True):
        worst = max(worst, largest_difference(one, plain), largest_difference(batched, plain))
    print(f"largest |delta log-probability| {worst:.2e}")
    assert worst <= 1e-5
    if EAGLE[0] in arguments:
        assert all(answer.meta["spec_verify_ct"] < NEW - 1 for answer in answers)
