"""GLM53_WATCH: what is watched, from which figure on, and what an alarm does."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

from sglang_glm53.errors import Glm53Error

VARIABLE = "GLM53_WATCH"
_WORDS = "off, abort, debug, no-probe"


@dataclass(frozen=True)
class Options:
    """What GLM53_WATCH says; each field is a word, or a number as `name=value`.

    Attributes:
        off: nothing is watched, and nothing is changed in SGLang for it.
        abort: a request with an alarm is ended, with an error to its client.
        debug: cache slots are checked before and after each pass (slow: the device waits).
        probe: a server with speculation is asked a fixed prompt before it is ready.
        accept: an accept length below this, tokens a target pass, is an alarm.
        rate: a share of accepted drafts above this is one if the text repeats itself too.
        after: tokens that an accept length or rate is taken of.
        repeat: tokens that must repeat one block to be an alarm by themselves.
    """

    off: bool = False
    abort: bool = False
    debug: bool = False
    probe: bool = True
    accept: float = 1.4
    rate: float = 0.96
    after: int = 128
    repeat: int = 256


_LEAST: dict[str, float] = {"accept": 0, "rate": 0, "after": 16, "repeat": 32}


def parse(text: str) -> Options:
    """The options of a value of GLM53_WATCH; an empty one gives the defaults.

    Raises:
        Glm53Error: an unknown word, or a number that is none or too small.
    """
    options = Options()
    kinds = {field.name: type(field.default) for field in fields(Options)}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign and name in ("off", "abort", "debug"):
            options = replace(options, **{name: True})
        elif part == "no-probe":
            options = replace(options, probe=False)
        elif sign and name in _LEAST:
            options = replace(options, **{name: _number(part, value, kinds[name], _LEAST[name])})
        else:
            raise Glm53Error(
                f"{VARIABLE}={text}: {part!r} is unknown; it takes {_WORDS}, and "
                f"{', '.join(f'{name}=NUMBER' for name in _LEAST)}, separated by commas"
            )
    return options


def from_environment() -> Options:
    """The options that GLM53_WATCH asks for in this process."""
    return parse(os.environ.get(VARIABLE, ""))


def _number(part: str, value: str, kind: type, least: float) -> float | int:
    try:
        number = kind(value)
    except ValueError:
        number = None
    if number is None or not least <= number < 1e9:
        what = "a whole number" if kind is int else "a number"
        raise Glm53Error(f"{VARIABLE}: {part!r} needs {what} of {least:g} or more")
    return number
