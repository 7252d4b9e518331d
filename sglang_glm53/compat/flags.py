"""SGLang's flags by version: one spelling for recipes, and what others call the same.

Recipes are written in the newest spelling. A row of the table says what older versions, and
published commands, write instead; `translate` rewrites arguments for a version, in either
direction. What a version's parser really has is read from the parser (cookbook/resolve.py); tests
hold the table against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sglang_glm53.compat.versions import SUPPORTED

# A flag's value: a text or number, True for a switch, several for a list.
Value = str | int | float | bool | tuple[str | int | float, ...]
Arguments = dict[str, Value]

GONE, DEPRECATED = "gone", "deprecated"


@dataclass(frozen=True)
class Renamed:
    """One row: `old` flags, all of them together, are written as `new` ones today.

    Attributes:
        old, new: flags without their dashes.
        to_new: the new flags' values from the old ones'.
        state: of the old spelling in `versions`: GONE (the parser refuses it) or DEPRECATED.
        note: what a reader of an old command should know.
        to_old: the old flags' values from the new ones', for a version before `since`.
        since: the first version with the new spelling, where a supported one lacks it.
        when: whether the row applies to the old flags' values; default: always.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    to_new: Callable[[Mapping[str, Value]], Arguments]
    state: str
    note: str
    to_old: Callable[[Mapping[str, Value]], Arguments] | None = None
    since: str | None = None
    when: Callable[[Mapping[str, Value]], bool] = lambda values: True


def _same(old: str, new: str, state: str, note: str, **more: str) -> Renamed:
    """A row of one flag that only changed its name."""
    return Renamed(
        (old,),
        (new,),
        lambda values: {new: values[old]},
        state,
        note,
        to_old=lambda values: {old: values[new]},
        **more,
    )


_CP_LAYOUTS: dict[Value, Value] = {"round-robin-split": "interleave", "in-seq-split": "zigzag"}

RENAMED: tuple[Renamed, ...] = (
    Renamed(
        ("dp-size", "enable-dp-attention"),
        ("attn-dp-size",),
        lambda values: {"attn-dp-size": values["dp-size"]},
        DEPRECATED,
        "SGLang announces that it will refuse the old spelling after 2026-12-31",
        to_old=lambda values: {"dp-size": values["attn-dp-size"], "enable-dp-attention": True},
    ),
    _same(
        "enable-hierarchical-cache",
        "enable-hicache",
        "",
        "both spellings work in 0.5.23",
        since="0.5.23",
    ),
    _same(
        "cuda-graph-max-bs",
        "cuda-graph-max-bs-decode",
        GONE,
        "argparse calls the old name ambiguous: -decode and -prefill are two flags now",
    ),
    _same(
        "cuda-graph-bs",
        "cuda-graph-bs-decode",
        GONE,
        "argparse calls the old name ambiguous: -decode and -prefill are two flags now",
    ),
    Renamed(
        ("disable-cuda-graph",),
        ("cuda-graph-backend-decode", "cuda-graph-backend-prefill"),
        lambda values: {
            "cuda-graph-backend-decode": "disabled",
            "cuda-graph-backend-prefill": "disabled",
        },
        DEPRECATED,
        "one flag for each phase now",
    ),
    Renamed(
        ("enable-flashinfer-allreduce-fusion",),
        ("flashinfer-allreduce-fusion-backend",),
        lambda values: {"flashinfer-allreduce-fusion-backend": "auto"},
        DEPRECATED,
        "SGLang chooses it by itself where it engages for this model",
    ),
    _same(
        "enable-dsa-prefill-context-parallel",
        "enable-prefill-cp",
        GONE,
        "the layout is --cp-strategy",
    ),
    _same(
        "enable-nsa-prefill-context-parallel",
        "enable-prefill-cp",
        GONE,
        "the layout is --cp-strategy",
    ),
    *(
        Renamed(
            (old,),
            ("cp-strategy",),
            lambda values, old=old: {"cp-strategy": _CP_LAYOUTS.get(values[old], values[old])},
            GONE,
            "round-robin-split is interleave now, in-seq-split is zigzag",
        )
        for old in ("dsa-prefill-cp-mode", "nsa-prefill-cp-mode")
    ),
    _same("nsa-prefill-backend", "dsa-prefill-backend", GONE, "NSA is called DSA now"),
    _same("nsa-decode-backend", "dsa-decode-backend", GONE, "NSA is called DSA now"),
    _same("tp", "tp-size", "", "argparse takes the beginning of a flag's name"),
    _same("dp", "dp-size", "", "argparse takes the beginning of a flag's name"),
    _same("pp", "pp-size", "", "argparse takes the beginning of a flag's name"),
    _same("ep", "ep-size", "", "both spellings work"),
    Renamed(
        ("tool-call-parser",),
        ("tool-call-parser",),
        lambda values: {"tool-call-parser": "glm47"},
        "",
        "glm45 reads the tool calls of GLM-4.5; those of GLM-5 stay as text in the answer",
        when=lambda values: values.get("tool-call-parser") == "glm45",
    ),
)


def modern(arguments: Mapping[str, Value]) -> tuple[Arguments, list[Renamed]]:
    """The arguments in the newest spelling, and the rows that were applied.

    Args:
        arguments: flags without their dashes, and their values.
    """
    current, applied = dict(arguments), []
    # Prefixes first: `dp` becomes `dp-size`, which with `enable-dp-attention` is another row.
    for row in sorted(RENAMED, key=lambda row: len(row.old)):
        if row.since is not None or not all(flag in current for flag in row.old):
            continue
        values = {flag: current[flag] for flag in row.old}
        if row.when(values):
            current = _replaced(current, row.old, row.to_new(values))
            applied.append(row)
    return current, applied


def translate(arguments: Mapping[str, Value], version: str) -> Arguments:
    """The arguments in the spelling of `version`, one of the supported ones."""
    current, _ = modern(arguments)
    for row in RENAMED:
        if row.since is None or row.to_old is None or not _before(version, row.since):
            continue
        if all(flag in current for flag in row.new):
            values = {flag: current[flag] for flag in row.new}
            current = _replaced(current, row.new, row.to_old(values))
    return current


def _before(version: str, other: str) -> bool:
    from packaging.version import Version

    return Version(version) < Version(other)


def _replaced(arguments: Arguments, old: tuple[str, ...], new: Arguments) -> Arguments:
    """`arguments` with `new` where the first of `old` stood."""
    result: Arguments = {}
    for flag, value in arguments.items():
        if flag == old[0]:
            result.update(new)
        elif flag not in old:
            result[flag] = value
    return result


def newest() -> str:
    """The newest supported version of SGLang."""
    return SUPPORTED[-1]
