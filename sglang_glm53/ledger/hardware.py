"""Rates of a GPU: what its maker says, and what was measured. Data in `data/*.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sglang_glm53.errors import Glm53Error

FOLDER = Path(__file__).parent / "data"
RATES = (
    "memory_bytes",
    "bandwidth",
    "fp8_flops",
    "bf16_flops",
    "link",
    "launch_latency",
    "network",
)


@dataclass(frozen=True)
class Rate:
    """A rate with its origin; `measured` is None where nobody measured it here."""

    datasheet: float
    measured: float | None
    unit: str
    source: str

    @property
    def best_known(self) -> float:
        return self.datasheet if self.measured is None else self.measured

    @property
    def origin(self) -> str:
        return "datasheet" if self.measured is None else "measured"


@dataclass(frozen=True)
class Hardware:
    """One GPU of a machine, and its links.

    Attributes:
        memory_bytes: that the driver gives. bandwidth: of that memory, B/s.
        fp8_flops, bf16_flops: dense matrix products, FLOP/s.
        link: to the other GPUs of the machine, one direction, B/s.
        launch_latency: of one collective, seconds.
        network: to other machines, B/s a GPU.
    """

    name: str
    title: str
    memory_bytes: Rate
    bandwidth: Rate
    fp8_flops: Rate
    bf16_flops: Rate
    link: Rate
    launch_latency: Rate
    network: Rate


def available() -> list[str]:
    """Names of the data files."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def load(name: str) -> Hardware:
    """The GPU `name`, or the YAML file at that path.

    Raises:
        Glm53Error: no such GPU, or a file that is not a description of one.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    try:
        content = yaml.safe_load(path.read_text())
    except OSError:
        raise Glm53Error(
            f"no hardware {name!r}; use one of {', '.join(available())}, or a YAML file like them"
        ) from None
    except yaml.YAMLError as error:
        raise Glm53Error(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise Glm53Error(f"{path} does not describe a GPU; take {available()[0]}.yaml as a pattern")
    missing = [rate for rate in RATES if not isinstance(content.get(rate), dict)]
    if missing:
        raise Glm53Error(f"{path} lacks {', '.join(missing)}")
    return Hardware(
        name=path.stem,
        title=str(content.get("title", path.stem)),
        **{rate: _rate(path, rate, content[rate]) for rate in RATES},
    )


def _rate(path: Path, name: str, content: dict[str, Any]) -> Rate:
    values = {key: content.get(key) for key in ("datasheet", "measured")}
    for key, value in values.items():
        if value is not None and (not isinstance(value, int | float) or value < 0):
            raise Glm53Error(f"{path}: {name}.{key} is {value!r}; give a number (1.0e+12)")
    if values["datasheet"] is None:
        raise Glm53Error(f"{path}: {name}.datasheet is missing")
    measured = values["measured"]
    return Rate(
        float(values["datasheet"]),
        None if measured is None else float(measured),
        str(content.get("unit", "")),
        str(content.get("source", "")),
    )
