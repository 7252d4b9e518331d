"""Shared fixtures: tiny checkpoints and their references, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function of make_checkpoint's options; equal options give the same directory."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[Any, ...], Path] = {}

    def make(**options: Any) -> Path:
        from sglang_glm53.tiny import make_checkpoint

        key = tuple(sorted(options.items()))
        if key not in made:
            target = root / f"tiny{len(made)}"
            make_checkpoint(target, **options)
            made[key] = target
        return made[key]

    return make
