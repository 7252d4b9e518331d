"""Rates of a GPU: what its maker says, and what was measured. Data in `data/*.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sglang_glm53.errors import Glm53Error

FOLDER = Path(__file__).parent / "data"
MEASURED = "h200"  # what the others take where nobody measured them
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
class Before:
    """Bytes of a GPU that are not free when a rank begins to load: the driver's, the process's CUDA
    context, and what communication set up.

    Attributes:
        alone: of a rank that has no others. together: of a rank among others.
    """

    alone: float
    together: float
    source: str

    def of(self, ranks: int) -> float:
        """Of one of so many ranks."""
        return self.alone if ranks == 1 else self.together


@dataclass(frozen=True)
class Hardware:
    """One GPU of a machine, and its links.

    Attributes:
        memory_bytes: that the driver gives. bandwidth: of that memory, B/s.
        fp8_flops, bf16_flops: dense matrix products, FLOP/s.
        link: to the other GPUs of the machine, one direction, B/s.
        launch_latency: of one collective, seconds.
        network: to other machines, B/s a GPU.
        auto_kv: form of the cache that SGLang takes without --kv-cache-dtype; "" if not known.
        gpus: that reach each other over `link`; beyond them the network begins.
        before_loading: what of the memory is gone before weights are loaded; an H200's where the
            data file does not say.
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
    before_loading: Before
    gpus: int = 8
    auto_kv: str = ""


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
        before_loading=_before(path, content),
        gpus=_gpus(path, content),
        auto_kv=str(content.get("auto_kv", "")),
    )


def _gpus(path: Path, content: dict[str, Any]) -> int:
    value = content.get("linked_gpus", 8)
    if not isinstance(value, int) or value < 1:
        raise Glm53Error(f"{path}: linked_gpus is {value!r}; give a number (8)")
    return value


def _is_number(value: Any) -> bool:
    """A number that is finite and that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300


def _before(path: Path, content: dict[str, Any]) -> Before:
    given = content.get("before_loading")
    if given is None:
        if path.stem == MEASURED:
            raise Glm53Error(f"{path} lacks before_loading")
        other = load(MEASURED)
        return replace(
            other.before_loading, source=f"as on {other.title}: {other.before_loading.source}"
        )
    if not isinstance(given, dict) or not all(
        _is_number(given.get(key)) and given[key] >= 0 for key in ("alone", "together")
    ):
        raise Glm53Error(
            f"{path}: before_loading needs the numbers alone and together, in bytes (0.72e+9)"
        )
    return Before(
        float(given["alone"]), float(given["together"]), " ".join(str(given.get("source")).split())
    )


def _rate(path: Path, name: str, content: dict[str, Any]) -> Rate:
    values = {key: content.get(key) for key in ("datasheet", "measured")}
    for key, value in values.items():
        if value is not None and not (_is_number(value) and value > 0):
            raise Glm53Error(
                f"{path}: {name}.{key} is {value!r:.60}; give a number above 0 (1.0e+12)"
            )
    if values["datasheet"] is None:
        raise Glm53Error(f"{path}: {name}.datasheet is missing")
    measured = values["measured"]
    return Rate(
        float(values["datasheet"]),
        None if measured is None else float(measured),
        str(content.get("unit", "")),
        str(content.get("source", "")),
    )
