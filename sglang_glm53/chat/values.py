"""JSON that any reader takes: no NaN, no lone surrogate, no Python object."""

from __future__ import annotations

import json
from typing import Any


def to_json(value: Any, written: str) -> str:
    """`value` as JSON; the text that the model wrote, as a JSON string, where it has no JSON."""
    try:
        return _encodable(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return '"' + escaped(written) + '"'


def escaped(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return _encodable(json.dumps(text, ensure_ascii=False))[1:-1]


def _encodable(encoded: str) -> str:
    """Write lone surrogates, which UTF-8 does not have, as JSON escapes."""
    if encoded.isascii():
        return encoded
    return "".join(
        f"\\u{ord(char):04x}" if "\ud800" <= char <= "\udfff" else char for char in encoded
    )
