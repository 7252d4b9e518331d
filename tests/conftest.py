"""Shared fixtures: tiny checkpoints and their references, made once a session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Threads that wait for each other on tensors this small make a busy machine fifty times slower.
# A server gets its share of the cores (server/harness.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores Ctrl-C in what it runs in the background, and children inherit that; tests send
# it to some.
signal.signal(signal.SIGINT, signal.default_int_handler)


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


# Where tests run in several processes, one takes all that name the same server
# (`pytest.mark.server(name)`), or all of a file that name none. A test that names the server ALONE
# has one of its own, and any process takes it.
ALONE = "alone"

# These are taken by one process a line, in this order. The first of a line is what the others'
# answers are compared with.
SHARED = (
    (
        *("plain", "eagle 3-1-4-share1", "eagle 1-1-2-share1", "eagle 5-1-6-share1"),
        *("eagle 3-1-4-share0", "eagle 5-1-6-share0"),
    ),
    (
        *("returned", "ranks tp2", "ranks tp2-eagle", "ranks tp2-dp2", "ranks tp2-dp2-eagle"),
        *("ranks pipeline", "ranks experts", "ranks split head", "ranks mixed chunks"),
    ),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of the same server together, and name the process that runs them."""
    place = {
        name: (line, position)
        for line, names in enumerate(SHARED)
        for position, name in enumerate(names)
    }
    others = len(SHARED)

    def order(item: pytest.Item) -> tuple[int, int]:
        name = _server_of(item)
        return place.get(name, (others, 0))

    items.sort(key=order)
    for item in items:
        name = _server_of(item)
        if name not in (None, ALONE):
            group = SHARED[place[name][0]][0] if name in place else name
            item.add_marker(pytest.mark.xdist_group(group))


def _server_of(item: pytest.Item) -> str | None:
    """The server that a test names, or its file; None for a test without a server."""
    marker = item.get_closest_marker("server")
    if marker is None:
        return None
    return marker.args[0] if marker.args else item.path.stem
