"""SGLang's arguments as written, read without its parser.

Good enough to know what the user set and to what; what SGLang makes of it, only its own resolution
knows (`glm53 doctor` asks it where it can).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from sglang_glm53.errors import Glm53Error

# Options whose field has another name.
ALIASES = {
    "model": "model_path",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "enable_hicache": "enable_hierarchical_cache",
    "speculative_draft_model": "speculative_draft_model_path",
}


def options(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option as written ("--page-size") with the values after it."""
    name: str | None = None
    values: list[str] = []
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            if name is not None:
                yield name, values
            name, equals, value = token.partition("=")
            values = [value] if equals else []
        elif name is not None:
            values.append(token)
    if name is not None:
        yield name, values


def with_config(argv: Sequence[str]) -> list[str]:
    """The arguments with those of `--config FILE` (SGLang's YAML) before them, which they override.

    Raises:
        Glm53Error: the file cannot be read, or holds no options.
    """
    words = list(argv)
    places = [i for i, word in enumerate(words) if word == "--config"]
    if not places:
        return words
    place = places[0]
    if len(places) > 1 or place + 1 == len(words):
        raise Glm53Error("--config: give one YAML file, once")
    path = words[place + 1]
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Glm53Error(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise Glm53Error(f"--config {path}: options with values are expected, one a line")
    found: list[str] = []
    for name, value in content.items():
        option = "--" + str(name).replace("_", "-")
        if value is True:
            found.append(option)
        elif isinstance(value, list):
            found += [option, *map(str, value)]
        elif value is not False and value is not None:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            found += [option, text]
    return found + words[:place] + words[place + 2 :]


def field_of(option: str) -> str:
    """The ServerArgs field of an option: "--page-size" is page_size."""
    name = option.removeprefix("--").replace("-", "_")
    return ALIASES.get(name, name)


def as_written(argv: Sequence[str]) -> dict[str, Any]:
    """Fields with the values that were written; the last one counts. An option without a value is
    True, one with several a list."""
    return {field_of(option): _value(values) for option, values in options(argv)}


def _value(values: list[str]) -> Any:
    if not values:
        return True
    if len(values) > 1:
        return [_value([value]) for value in values]
    try:
        return json.loads(values[0])  # numbers, true, false, JSON objects
    except ValueError:
        return values[0]
