"""Turns planted faults on and off in a running server (see faults.py)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import faults


@dataclass(frozen=True)
class Switch:
    """The switch of the server that was started with `environment()`. folder: its own."""

    folder: Path
    _names: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def environment(self) -> dict[str, str]:
        """What the server needs to have the faults installed, all of them off."""
        place = self.folder / "plugin"
        metadata = place / "glm53_faults-1.0.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (place / "glm53_faults.py").write_text(Path(faults.__file__).read_text())
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: glm53-faults\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nglm53_faults = glm53_faults:install\n"
        )
        path = filter(None, [str(place), os.environ.get("PYTHONPATH", "")])
        return {"PYTHONPATH": os.pathsep.join(path), faults.FOLDER: str(self.folder)}

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """`name` is on inside the block; AssertionError if nothing ran through it there.

        No request may run at either end of the block.
        """
        assert name in faults.FAULTS, name
        for file in self.folder.glob("acted.*.json"):
            file.unlink()
        self._write(name)
        try:
            yield
        finally:
            acted = self.acted()
            self._write("")
        assert acted.get(name, 0) > 0, f"nothing ran through the fault {name}: {acted}"

    def acted(self) -> dict[str, int]:
        """How often each fault acted since the last one was turned on."""
        counts: dict[str, int] = {}
        for file in self.folder.glob("acted.*.json"):
            told = json.loads(file.read_text())
            counts[told["fault"]] = counts.get(told["fault"], 0) + told["acted"]
        return counts

    def _write(self, name: str) -> None:
        part = self.folder / "active.part"
        part.write_text(name)
        part.rename(self.folder / "active")

    def next_name(self) -> str:
        """A name that no request of this server had."""
        return str(next(self._names))

    def draft_cache(self, rid: str, seconds: float = 20) -> dict[str, torch.Tensor]:
        """latents [tokens, 576] and keys [tokens, 128], fp32, that a finished request left in the
        draft's cache; `rid` begins with `faults.DUMP`."""
        file = self.folder / f"{rid}.pt"
        until = time.monotonic() + seconds
        while not file.exists():
            assert time.monotonic() < until, f"the server left no {file.name} in {self.folder}"
            time.sleep(0.1)
        return torch.load(file, weights_only=True)
