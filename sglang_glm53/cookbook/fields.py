"""Reads the fields of a YAML file, each with a one-line error that names file and field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sglang_glm53.compat.flags import Arguments
from sglang_glm53.errors import Glm53Error


@dataclass(frozen=True)
class Hardware:
    """Where one server runs: `nodes` machines of `gpus` GPUs each."""

    gpu: str
    gpus: int
    nodes: int = 1


class Fields:
    """The fields of a mapping in a file; what is wrong with one is told with file and name."""

    def __init__(self, path: Path, prefix: str, content: dict[str, Any]) -> None:
        self.path, self.prefix, self.content = path, prefix, content

    def _wrong(self, name: str, what: str) -> Glm53Error:
        return Glm53Error(f"{self.path}: {self.prefix}{name} {what}")

    def only(self, *allowed: str) -> None:
        for name in self.content:
            if name not in allowed:
                raise self._wrong(name, f"is no field; there are {', '.join(allowed)}")

    def text(self, name: str) -> str:
        value = self.content.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self._wrong(name, "is missing; give a text")
        return " ".join(value.split())

    def texts(self, name: str, *, needed: bool = True) -> list[str]:
        value = self.content.get(name, None if needed else [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(name, "must be a list of texts")
        return [" ".join(each.split()) for each in value]

    def mapping(self, name: str) -> dict[str, Any]:
        return as_mapping(self.path, f"{self.prefix}{name}", self.content.get(name) or {})

    def named_texts(self, name: str) -> dict[str, str]:
        values = self.mapping(name)
        for key, value in values.items():
            if not isinstance(value, str):
                raise self._wrong(f"{name}.{key}", "must be a text")
        return {key: " ".join(value.split()) for key, value in values.items()}

    def arguments(self, name: str = "arguments") -> Arguments:
        result: Arguments = {}
        for flag, value in self.mapping(name).items():
            if isinstance(value, list):
                value = tuple(value)
            if not isinstance(value, str | int | float | tuple) or value is False:
                raise self._wrong(
                    f"{name}.{flag}", f"is {value!r}; give a value, a list, or true for a switch"
                )
            result[flag] = value
        return result

    def environment(self) -> dict[str, str]:
        values = self.mapping("environment")
        for key, value in values.items():
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise self._wrong(f"environment.{key}", f'is {value!r}; quote it ("1")')
        return {key: str(value) for key, value in values.items()}

    def hardware(self) -> Hardware:
        fields = self.mapping("hardware")
        unknown = set(fields) - {"gpu", "gpus", "nodes"}
        if unknown or not isinstance(fields.get("gpu"), str):
            raise self._wrong("hardware", "must have gpu, gpus and, for several machines, nodes")
        numbers = {name: fields.get(name, 1) for name in ("gpus", "nodes")}
        if not all(isinstance(number, int) and number >= 0 for number in numbers.values()):
            raise self._wrong("hardware", "gpus and nodes are numbers: GPUs a machine, machines")
        return Hardware(fields["gpu"], **numbers)

    def rows(self, name: str, kind: type) -> list[dict[str, str]]:
        expected = set(kind.__annotations__)
        value = self.content.get(name) or []
        if not isinstance(value, list):
            raise self._wrong(name, "must be a list")
        for index, row in enumerate(value):
            if not isinstance(row, dict) or set(row) != expected:
                fields = ", ".join(kind.__annotations__)
                raise self._wrong(f"{name}[{index}]", f"must have exactly {fields}")
        return [{key: " ".join(str(text).split()) for key, text in row.items()} for row in value]


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file that holds named values.

    Raises:
        Glm53Error: it cannot be read, is no YAML, or holds something else.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Glm53Error(f"cannot read {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Glm53Error(f"{path}: {' '.join(str(error).split())}") from None
    return as_mapping(path, "the file", content)


def as_mapping(path: Path, what: str, value: Any) -> dict[str, Any]:
    """`value`, which the file has under `what`, as a mapping from names."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Glm53Error(f"{path}: {what} must hold named values (name: value)")
    return dict(value)
