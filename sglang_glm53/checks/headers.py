"""The headers of a checkpoint's safetensors files: names, dtypes, shapes. No weight is read."""

from __future__ import annotations

import json
import math
import re
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_glm53.checks.files import read_json
from sglang_glm53.errors import Glm53Error

INDEX = "model.safetensors.index.json"
_LONGEST = 100 * 2**20  # bytes of a header; what safetensors itself accepts
_MOST_SHARDS = 10_000  # a number beyond it is no numbering of shards
_MOST = 2**64  # a number beyond it is none of safetensors', and a product of many takes minutes
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
_NUMBERED = re.compile(r"^(.*)-(\d+)-of-(\d+)\.safetensors$")
Progress = Callable[[int, int], None]  # files read, files in all


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
        problems: files that are missing, truncated or no safetensors; one line each.
        twice: names that two files have.
        also: the earlier file of each of those; `tensors` has the later one.
        promised: file of each name, by the index; empty without one.
        broken: files that `problems` tells of: their tensors are not in `tensors`.
        strays: safetensors files of the folder that the index does not name.
    """

    tensors: dict[str, Tensor]
    problems: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()
    also: Mapping[str, str] = field(default_factory=dict)
    promised: Mapping[str, str] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()
    strays: tuple[str, ...] = ()

    def lost(self, name: str) -> bool:
        """Whether a tensor that is not there may lie in a broken file: that file is told."""
        return self.promised.get(name) in self.broken if self.promised else bool(self.broken)


def scan(folder: Path | None, progress: Progress | None = None) -> Headers | None:
    """The headers of the files that SGLang would load; None where there are none.

    With an index, those are the files that it names.

    Raises:
        Glm53Error: the index is no JSON.
    """
    if folder is None:
        return None
    promised = _index(folder)
    there = sorted(path.name for path in folder.glob("*.safetensors"))
    files = sorted(set(promised.values())) or sorted({*there, *_gaps(there)})
    if not files:
        return None
    tensors: dict[str, Tensor] = {}
    problems, also, broken = [], {}, set()
    for number, file in enumerate(files):
        try:
            if file != Path(file).name:
                raise ValueError("lies elsewhere; SGLang reads files of the folder itself alone")
            for name, tensor in read(folder / file):
                if name in tensors:
                    also[name] = tensors[name].file
                tensors[name] = tensor
        except (OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else error
            problems.append(f"{file}: {what}{_holds(file, promised)}")
            broken.add(file)
        if progress is not None:
            progress(number + 1, len(files))
    strays = tuple(sorted(set(there) - set(files)))
    return Headers(tensors, tuple(problems), tuple(also), also, promised, frozenset(broken), strays)


def _index(folder: Path) -> dict[str, str]:
    """File of each tensor, by the index; empty without one."""
    index = (read_json(folder, INDEX) or {}).get("weight_map")
    if index is not None and not isinstance(index, dict):
        raise Glm53Error(
            f"{folder / INDEX}: weight_map must be an object of tensor names and files; take it "
            "from the model's own repository"
        )
    return {str(name): str(file) for name, file in index.items()} if index else {}


def _gaps(files: list[str]) -> list[str]:
    """Files that a numbering "NAME-00002-of-00005" says are missing."""
    seen: dict[tuple[str, str], set[int]] = {}
    for file in files:
        if match := _NUMBERED.match(file):
            seen.setdefault((match[1], match[3]), set()).add(int(match[2]))
    return [
        f"{stem}-{number:0{len(of)}}-of-{of}.safetensors"
        for (stem, of), numbers in seen.items()
        if int(of) <= _MOST_SHARDS
        for number in range(1, int(of) + 1)
        if number not in numbers
    ]


def _holds(file: str, promised: Mapping[str, str]) -> str:
    """What a file that cannot be read holds, by the index."""
    names = [name for name, where in promised.items() if where == file]
    return f" (by the index it holds {len(names):,} tensors, first {names[0]})" if names else ""


def read(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of one file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is truncated, or no safetensors file; the message says which.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise ValueError("is a folder")
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
        raise ValueError("no regular file")
    size = status.st_size
    with path.open("rb") as file:
        start = file.read(_PREFIX)
        length = struct.unpack("<Q", start)[0] if len(start) == _PREFIX else None
        if length is None or length > _LONGEST:
            raise ValueError("no safetensors file (a Git LFS pointer, or an aborted download)")
        text = file.read(length)
    if len(text) < length:
        raise ValueError("truncated inside its header")
    try:
        header = json.loads(text.decode("utf-8"))  # of bytes it would take UTF-16 too
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
    if not all(type(number) is int and 0 <= number < _MOST for number in numbers) or last < first:
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
        if size > end:
            raise ValueError(f"longer than its header: {size:,} bytes, not {end:,}")
        cut = min((entry for entry in entries if start + entry[4] > size), key=lambda e: e[3:])
        raise ValueError(f"truncated: {size:,} of {end:,} bytes, from {cut[0]} on")
