"""SGLang's arguments as written, read without its parser.

Good enough to know what the user set and to what; what SGLang makes of it, only its own resolution
knows (`glm53 doctor` asks it where it can).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

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
