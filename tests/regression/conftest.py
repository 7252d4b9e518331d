"""Fixtures: the miniature, its tasks, how much is asked, and one server at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server.harness import Server

from . import settings
from .settings import Amount, Setting
from .switch import Switch


@pytest.fixture(scope="package")
def miniature() -> Path:
    """The checkpoint: the shipped one, or the folder that GLM53_REGRESSION_CHECKPOINT names."""
    given = os.environ.get("GLM53_REGRESSION_CHECKPOINT")
    if given:
        return Path(given)
    from sglang_glm53.miniature import folder, shipped

    if not shipped():
        pytest.skip("this version carries no trained miniature yet")
    return folder()


@pytest.fixture(scope="package")
def config(miniature: Path) -> dict[str, Any]:
    return json.loads((miniature / "config.json").read_text())


@pytest.fixture(scope="package")
def tasks(miniature: Path) -> Any:
    """The tasks over the checkpoint's own tokenizer."""
    from miniature.tasks import Tasks
    from tokenizers import Tokenizer

    return Tasks(Tokenizer.from_file(str(miniature / "tokenizer.json")))


@pytest.fixture(scope="package")
def amount() -> Amount:
    """GLM53_REGRESSION_PROMPTS recall prompts a context: 10 in CI, 60 in a full run."""
    return settings.amount(int(os.environ.get("GLM53_REGRESSION_PROMPTS", "10")))


@pytest.fixture(scope="package")
def start(
    miniature: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., tuple[Server, Switch]]]:
    """A function of a setting to its running server; the one before is stopped.

    The faults are installed, and off, where `switchable`.
    """
    running: dict[str, tuple[Server, Switch]] = {}
    root = tmp_path_factory.mktemp("regression")

    def stop() -> None:
        for server, _ in running.values():
            died = server.process.poll() is not None
            code = server.stop()
            assert code == 0 and not died, f"the server ended with {code}\n{server.tail()}"
        running.clear()

    def get(setting: Setting, switchable: bool = False) -> tuple[Server, Switch]:
        if setting.name not in running:
            stop()
            running[setting.name] = settings.launch(
                setting, miniature, root / setting.name, switchable=switchable
            )
        return running[setting.name]

    yield get
    stop()
