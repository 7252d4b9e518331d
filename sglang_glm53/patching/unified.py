"""Unified diffs, applied to the letter: each hunk at its line, no fuzz and no offset."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """Lines with their ends; `before` stood from line `start` on (from 1), `after` stands from
    line `new_start` on."""

    start: int
    before: tuple[bytes, ...]
    new_start: int
    after: tuple[bytes, ...]


def parse(text: bytes) -> dict[str, tuple[Hunk, ...]]:
    """Hunks by path (without "a/").

    Raises:
        ValueError: the text is no unified diff, or a hunk's counts are wrong.
    """
    files: dict[str, list[Hunk]] = {}
    lines, at, path = text.splitlines(keepends=True), 0, None
    while at < len(lines):
        line = lines[at]
        if line.startswith(b"--- "):
            path = line[4:].split(b"\t")[0].strip().decode().removeprefix("a/")
            files[path] = []
            at += 2
            continue
        match = _HUNK.match(line)
        if match is None or path is None:
            raise ValueError(f"line {at + 1} is no part of a unified diff")
        old, new = (int(match[n]) if match[n] is not None else 1 for n in (2, 4))
        before, after = [], []
        at += 1
        while len(before) < old or len(after) < new:
            if at >= len(lines) or lines[at][:1] not in (b" ", b"-", b"+"):
                raise ValueError(f"line {at + 1}: the hunk has fewer lines than it says")
            sign, rest = lines[at][:1], lines[at][1:]
            if sign != b"+":
                before.append(rest)
            if sign != b"-":
                after.append(rest)
            at += 1
        files[path].append(Hunk(int(match[1]), tuple(before), int(match[3]), tuple(after)))
    return {name: tuple(hunks) for name, hunks in files.items()}


def reverse(hunks: tuple[Hunk, ...]) -> tuple[Hunk, ...]:
    return tuple(Hunk(h.new_start, h.after, h.start, h.before) for h in hunks)


def apply(content: bytes, hunks: tuple[Hunk, ...]) -> bytes | None:
    """The content with every hunk applied; None where one does not fit its lines."""
    lines = content.splitlines(keepends=True)
    result: list[bytes] = []
    at = 0
    for hunk in hunks:
        start = hunk.start - 1
        if start < at or tuple(lines[start : start + len(hunk.before)]) != hunk.before:
            return None
        result += lines[at:start]
        result += hunk.after
        at = start + len(hunk.before)
    return b"".join([*result, *lines[at:]])
