"""Random answers with tool calls, and two ways to know what is in them without our reader.

`well_formed` writes an answer from the calls that it is to hold. `chaotic` throws the grammar's
pieces together, and `expected` reads such a text as a whole, with regular expressions.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Function, Tool

Calls = list[tuple[str, dict[str, Any]]]

SCHEMAS: dict[str, dict[str, Any]] = {
    "now": {},
    "search": {"q": {"type": "string"}, "limit": {"type": "integer"}, "exact": {"type": "boolean"}},
    "write_file": {"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"enum": ["w"]}},
    "plan": {
        "steps": {"type": "array"},
        "options": {"type": "object"},
        "weight": {"type": "number"},
        "note": {"type": ["string", "null"]},
        "größe": {"type": "string"},
    },
}
TOOLS = [
    Tool(
        function=Function(
            name=name, parameters={"type": "object", "properties": properties, "required": []}
        )
    )
    for name, properties in SCHEMAS.items()
]
UNKNOWN = ("delete_all", "searc", "search2")
VALUE_END = "</arg_value>"

_WORDS = (
    *("a", "call", "the", "Zürich", "北京", "🙂", "e\u0301", "שלום", "\u200b", "C:\\new\\table"),
    *('"quoted"', "'single'", "{", "}", "[1, 2]", "null", "true", "12", "1e400", "NaN", "\\n"),
    *("\n", "  ", "\t", "<", ">", "</", "<tool", "&lt;", "\u2028", "\x00", "\ud800"),
)
_TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "<think>")


def _text(rng: random.Random, words: tuple[str, ...], most: int) -> str:
    return "".join(rng.choice(words) + rng.choice(("", " ")) for _ in range(rng.randint(0, most)))


def _string(rng: random.Random) -> str:
    """A value of any characters and tags, except the tag that would end it."""
    while True:
        value = _text(rng, _WORDS + _TAGS, 8)
        if (value + VALUE_END).index(VALUE_END) == len(value):
            return value


def _json(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [_json(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {_string(rng): _json(rng, depth + 1) for _ in range(rng.randrange(3))}
    return (None, True, rng.randint(-(10**20), 10**20), rng.uniform(-1e9, 1e9), _string(rng))[kind]


def _value(rng: random.Random, schema: dict[str, Any]) -> tuple[Any, str]:
    """An argument's value, and how a model writes it."""
    kind = schema.get("type")
    if "enum" in schema:
        return "w", "w"
    if kind == "string":
        value = _string(rng)
        return value, value
    if isinstance(kind, list):
        return rng.choice(((None, "null"), ("word", "word")))
    value = {
        "integer": lambda: rng.randint(-(10**30), 10**30),
        "number": lambda: rng.choice((rng.uniform(-9, 9), rng.randint(-9, 9))),
        "boolean": lambda: rng.random() < 0.5,
        "array": lambda: [_json(rng) for _ in range(rng.randrange(4))],
        "object": lambda: {_string(rng): _json(rng) for _ in range(rng.randrange(4))},
    }[kind]()
    return value, json.dumps(value, ensure_ascii=rng.random() < 0.5)


def _call(rng: random.Random) -> tuple[str, tuple[str, dict[str, Any]]]:
    name = rng.choice(list(SCHEMAS))
    keys = list(SCHEMAS[name])
    rng.shuffle(keys)
    gap = rng.choice(("", "\n"))
    written, arguments = f"<tool_call>{gap}{name}{gap}", {}
    for key in keys[: rng.randint(0, len(keys))]:
        value, text = _value(rng, SCHEMAS[name][key])
        arguments[key] = value
        written += f"<arg_key>{key}</arg_key>{gap}<arg_value>{text}{VALUE_END}{gap}"
    return written + "</tool_call>", (name, arguments)


def _unknown_call(rng: random.Random) -> str:
    inside = rng.choice((_string(rng), "<tool_call>now</tool_call>"))
    name = rng.choice(UNKNOWN)
    return f"<tool_call>{name}<arg_key>q</arg_key><arg_value>{inside}{VALUE_END}</tool_call>"


def well_formed(rng: random.Random) -> tuple[str, str, Calls]:
    """An answer, the text that is its content, and its calls."""
    written, runs, calls = "", [""], []
    for _ in range(rng.randint(1, 6)):
        kind = rng.random()
        if kind < 0.5:
            text, call = _call(rng)
            calls.append(call)
            runs.append("")
        else:
            if kind < 0.8:
                text = _text(rng, _WORDS, 6)
            elif kind < 0.9:
                text = rng.choice(
                    ("the <tool_call> tag", "<tool_call>: see </tool_call>", "<tool_")
                )
            else:
                text = _unknown_call(rng)
            runs[-1] += text
        written += text
    return written, content_of(runs, bool(calls)), calls


def content_of(runs: list[str], calls: bool) -> str:
    """The content: the runs of text between calls, without those of white space alone."""
    return "".join(run for run in runs if run.strip() or not calls)


def chaotic(rng: random.Random) -> str:
    """The grammar's pieces in any order."""
    pieces = (
        *(_TAGS + (VALUE_END,)) * 3,
        *("<arg_key>q</arg_key>", "<arg_value>v</arg_value>", "<tool_call>search") * 3,
        *("<tool_call>now</tool_call>", "<tool_call>search<arg_key>q</arg_key><arg_value>") * 3,
        *("search", "now", "q", "limit", "plan", " ", "\n", "\\n", "text", "7", "delete_all"),
        *_WORDS,
    )
    return "".join(rng.choice(pieces) for _ in range(rng.randint(1, 14)))


# --- the whole-text reading of any answer --------------------------------------------------------

_TAG = re.compile(r"(</?(?:tool_call|arg_key|arg_value)>)")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_STOPS = ("<arg_key>", "<tool_call>", "</tool_call>")


def expected(text: str) -> tuple[str, Calls]:
    """Content and calls, values as written, of any text by the rules of chat/stream.py.

    The text is cut at its tags first, and each decision looks ahead as far as it likes.
    """
    pieces = [piece for piece in _TAG.split(text) if piece]
    runs, calls, at = [""], [], 0
    while at < len(pieces):
        name = _name_at(pieces, at) if pieces[at] == "<tool_call>" else None
        if name is None:
            runs[-1] += pieces[at]
            at += 1
            continue
        end, said, arguments = _Call(pieces, at, name).read()
        if name in SCHEMAS:
            calls.append((name, arguments))
            runs.append(said)
        else:
            runs[-1] += "".join(pieces[at:end])
        at = end
    return content_of(runs, bool(calls)), calls


def _name_at(pieces: list[str], at: int) -> str | None:
    head, after = [*pieces[at + 1 : at + 3], "", ""][:2]
    if after in ("<arg_key>", "</tool_call>"):
        name = head.strip()
        return name if name in SCHEMAS or _NAME.fullmatch(name) else None
    if after == "</arg_key>":
        for name in sorted(SCHEMAS, key=len, reverse=True):
            head = head.lstrip()
            if head.startswith(name) and head[len(name) :].strip() in SCHEMAS[name]:
                return name
    return None


class _Call:
    """One call, from its tag on."""

    def __init__(self, pieces: list[str], at: int, name: str) -> None:
        self.pieces, self.at, self.name = pieces, at + 2, name
        self.said, self.arguments = "", {}
        self.schema = SCHEMAS.get(name, {})
        if self._piece() == "</arg_key>":  # the key stands beside the name
            self.pieces = [*pieces]
            self.at -= 1
            self.pieces[self.at] = pieces[self.at].lstrip()[len(name) :].lstrip()

    def read(self) -> tuple[int, str, dict[str, Any]]:
        """Where it ends, what of it is content, and its arguments."""
        while self.at < len(self.pieces):
            skip = self._piece().isspace()
            here = self._piece(skip)
            if here == "</tool_call>":
                self.at += skip + 1
                break
            if here == "<tool_call>":
                self.at += skip
                break
            if here == "<arg_key>":
                self.at += skip
                self._argument(["<arg_key>"])
            elif here.strip() in self.schema and self._piece(skip + 1) == "</arg_key>":
                self.at += skip
                self._argument([])
            elif not here:  # white space, then nothing
                self.at += skip
            else:
                self._astray()
        return self.at, self.said, self.arguments

    def _piece(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.pieces[at] if at < len(self.pieces) else ""

    def _astray(self) -> None:
        while self.at < len(self.pieces) and self._piece() not in _STOPS:
            self.said += self._piece()
            self.at += 1

    def _argument(self, written: list[str]) -> None:
        self.at += len(written)
        key = "" if _TAG.fullmatch(self._piece()) else self._piece()
        ahead = int(bool(key))
        if len(key) > 256 or self._piece(ahead) not in ("</arg_key>", "<arg_value>"):
            self.said += "".join(written)
            return self._astray()
        written.append(key)
        self.at += ahead
        if self._piece() == "</arg_key>":
            written.append("</arg_key>")
            self.at += 1
        space = self._piece() if re.fullmatch(r"(\\n|\s)+", self._piece()) else ""
        if self._piece(int(bool(space))) != "<arg_value>":
            self.said += "".join(written)
            if space and self.at + 1 == len(self.pieces):
                self.said += space
                self.at += 1
            return None
        written += [space, "<arg_value>"]
        self.at += int(bool(space)) + 1
        rest = self.pieces[self.at :]
        key = key.strip()
        if VALUE_END in rest:
            end = rest.index(VALUE_END)
            self.arguments[key] = "".join(rest[:end])
            self.at += end + 1
            return None
        self.said += "".join(written + rest)
        self.at = len(self.pieces)
        if self.schema.get(key, {}).get("type") == "string":
            self.arguments[key] = None  # given in part, and taken back
        return None
