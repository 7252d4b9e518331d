"""The headers of a checkpoint's safetensors files: names, dtypes, shapes. No weight is read."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_glm53.checks.files import read_json
from sglang_glm53.errors import Glm53Error

INDEX = "model.safetensors.index.json"
_LONGEST = 100 * 2**20  # bytes of a header; what safetensors itself accepts
_PREFIX = 8  # bytes before it: its length
_BITS = {
    **{name: 64 for name in ("F64", "I64", "U64")},
    **{name: 32 for name in ("F32", "I32", "U32")},
    **{name: 16 for name in ("F16", "BF16", "I16", "U16")},
    **{name: 8 for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL")},
    **{name: 6 for name in ("F6_E2M3", "F6_E3M2")},
    "F4": 4,
    "C64": 64,
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: safetensors' dtype name ("BF16", "F8_E4M3"), shape, file name."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Headers:
    """All tensors of a checkpoint.

    Attributes:
        tensors: by name.
        problems: files that are missing, truncated or no safetensors, and names that the index
            promises and no file has; one line each.
        twice: names that two files have.
    """

    tensors: dict[str, Tensor]
    problems: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()


def scan(folder: Path | None) -> Headers | None:
    """The headers of the files that SGLang would load; None where there are none.

    With an index, those are the files that it names.

    Raises:
        Glm53Error: the index is no JSON.
    """
    if folder is None:
        return None
    index = (read_json(folder, INDEX) or {}).get("weight_map")
    if index is not None and not isinstance(index, dict):
        raise Glm53Error(
            f"{folder / INDEX}: weight_map must be an object of tensor names and files; take it "
            "from the model's own repository"
        )
    named = {str(name): str(file) for name, file in index.items()} if index else {}
    files = sorted(set(named.values())) or sorted(p.name for p in folder.glob("*.safetensors"))
    if not files:
        return None
    tensors: dict[str, Tensor] = {}
    problems, twice, broken = [], [], set()
    for file in files:
        try:
            for name, tensor in read(folder / file):
                if name in tensors:
                    twice.append(name)
                tensors[name] = tensor
        except (OSError, ValueError) as error:
            problems.append(f"{file}: {error.strerror if isinstance(error, OSError) else error}")
            broken.add(file)
    absent = [n for n, file in named.items() if n not in tensors and file not in broken]
    if absent:
        problems.append(f"{INDEX} promises {len(absent)} tensors that no file has: {absent[0]}")
    return Headers(tensors, tuple(problems), tuple(twice))


def read(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of one file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is truncated, or no safetensors file; the message says which.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_PREFIX)
        length = struct.unpack("<Q", start)[0] if len(start) == _PREFIX else None
        if length is None or length > _LONGEST:
            raise ValueError("no safetensors file (a Git LFS pointer, or an aborted download)")
        text = file.read(length)
    if len(text) < length:
        raise ValueError("truncated inside its header")
    try:
        header = json.loads(text)
        entries = [_entry(name, entry) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("its header is not safetensors'") from None
    _check_partition(entries, _PREFIX + length, size)
    for name, dtype, shape, first, last in entries:
        if math.prod(shape) * _BITS[dtype] != 8 * (last - first):
            raise ValueError(f"{name} has {last - first:,} bytes for shape {list(shape)}")
        yield name, Tensor(dtype, shape, path.name)


def _entry(name: str, entry: dict[str, Any]) -> tuple[str, str, tuple[int, ...], int, int]:
    """Name, dtype, shape, first byte and the one after the last; any error of a wrong entry."""
    shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
    numbers = (*shape, first, last)
    if entry["dtype"] not in _BITS or not isinstance(entry["shape"], list):
        raise ValueError
    if not all(type(number) is int and number >= 0 for number in numbers) or last < first:
        raise ValueError
    return name, entry["dtype"], shape, first, last


def _check_partition(
    entries: list[tuple[str, str, tuple[int, ...], int, int]], start: int, size: int
) -> None:
    """Tensors lie one after the other and fill the file, as safetensors demands.

    start: bytes before the tensors; size: of the file.

    Raises:
        ValueError: they do not; one line.
    """
    reached = 0
    for name, _, _, first, last in sorted(entries, key=lambda entry: entry[3:]):
        if first != reached:
            where = "overlaps what lies before it" if first < reached else "lies behind a gap"
            raise ValueError(f"{name} {where}; safetensors refuses such a file")
        reached = last
    end = start + reached
    if size != end:
        what = f"truncated: {size:,} of {end:,} bytes" if size < end else "longer than its header"
        raise ValueError(what)
