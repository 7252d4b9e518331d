"""The headers of a checkpoint's safetensors files: names, dtypes, shapes. No weight is read."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_glm53.checks.files import read_json

INDEX = "model.safetensors.index.json"
_LONGEST = 100 * 2**20  # bytes of a header; what safetensors itself accepts
_PREFIX = 8  # bytes before it: its length
_BITS = {
    **{name: 64 for name in ("F64", "I64", "U64")},
    **{name: 32 for name in ("F32", "I32", "U32")},
    **{name: 16 for name in ("F16", "BF16", "I16", "U16")},
    **{name: 8 for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL")},
    "F4": 4,
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
        entries = [
            (name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("its header is not safetensors'") from None
    end = _PREFIX + length + max((last for *_, last in entries), default=0)
    if size != end:
        what = f"truncated: {size:,} of {end:,} bytes" if size < end else "longer than its header"
        raise ValueError(what)
    for name, dtype, shape, first, last in entries:
        bits = _BITS.get(dtype)
        if bits is not None and math.prod(shape) * bits != 8 * (last - first):
            raise ValueError(f"{name} has {last - first:,} bytes for shape {list(shape)}")
        yield name, Tensor(dtype, shape, path.name)
