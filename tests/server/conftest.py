"""Fixtures of the server tests: one server at a time, references, and the plain runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .harness import Answer, Recording, ServerPool

if TYPE_CHECKING:
    import torch
    from reference.hf import Reference

FLOAT32 = ("--dtype", "float32")
RETURNED = ("--enable-return-hidden-states", "--enable-return-routed-experts")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """The pool of (one) running servers."""
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def reference() -> Callable[..., Reference]:
    """A function of a checkpoint directory and a dtype to its transformers model."""
    import torch
    from reference.hf import Reference

    torch.set_num_threads(1)  # the server needs the cores more
    loaded: dict[Any, Reference] = {}

    def load(path: Path, dtype: torch.dtype = torch.float32) -> Reference:
        if (path, dtype) not in loaded:
            loaded[path, dtype] = Reference(path, dtype)
        return loaded[path, dtype]

    return load


@pytest.fixture(scope="session")
def plain_runs(
    servers: ServerPool, tiny_checkpoint: Callable[..., Path]
) -> Callable[..., tuple[list[Answer], list[Recording]]]:
    """Answers and recordings of the float32 server without speculation, kept for the session.

    The server that can return more does as well, if it is the one that runs.
    """
    kept: dict[Any, tuple[list[Answer], list[Recording]]] = {}

    def run(prompts: list[list[int]], new: int) -> tuple[list[Answer], list[Recording]]:
        key = (tuple(map(tuple, prompts)), new)
        if key not in kept:
            returned = servers.running(tiny_checkpoint(), *FLOAT32, *RETURNED)
            server = returned or servers.get(tiny_checkpoint(), *FLOAT32)
            server.flush()
            answers = [server.generate([prompt], new)[0] for prompt in prompts]
            kept[key] = (answers, [server.recording(answer.rid) for answer in answers])
        return kept[key]

    return run
