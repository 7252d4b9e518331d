"""Numbers for people. GB is 10^9 bytes, GiB is 2^30; both are written where memory is meant."""

from __future__ import annotations

from sglang_glm53.ledger.formula import Figure, Number

_DECIMAL = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_COUNTS = (("trillion", 1e12), ("billion", 1e9), ("million", 1e6))


def count(value: Number, digits: int = 2) -> str:
    """`743.38 billion`, `21`."""
    for word, size in _COUNTS:
        if abs(value) >= size:
            return f"{value / size:.{digits}f} {word}"
    return whole(value)


def whole(value: Number) -> str:
    """With thousands separated; a fraction keeps two decimals."""
    return f"{value:,.2f}" if value % 1 else f"{int(value):,}"


def size(value: Number, digits: int = 2) -> str:
    """Bytes in powers of ten: `61.34 MB`."""
    for letter, unit in _DECIMAL:
        if abs(value) >= unit:
            return f"{value / unit:.{digits}f} {letter}"
    return f"{whole(value)} B"


def memory(value: Number) -> str:
    """Bytes of a memory: `113.33 GB (105.55 GiB)`."""
    if abs(value) < 2**30:
        return size(value)
    return f"{value / 1e9:.2f} GB ({value / 2**30:.2f} GiB)"


def bytes_(value: Number) -> str:
    """Few bytes one by one, many in powers of ten, a memory's also in powers of two."""
    if abs(value) < 1e7 and not value % 1:
        return f"{int(value):,} B"
    return memory(value) if abs(value) >= 1e9 else size(value)


def flops(value: Number) -> str:
    for letter, unit in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= unit:
            return f"{value / unit:.2f} {letter}FLOP"
    return f"{whole(value)} FLOP"


def milliseconds(value: Number) -> str:
    if value >= 1:
        return f"{value:.2f} ms"
    return f"{value * 1e3:.1f} µs"


def figure(found: Figure) -> str:
    """A figure's value in its unit."""
    if found.unit == "B":
        return bytes_(found.value)
    if found.unit == "FLOP/s":
        return f"{found.value / 1e12:,.0f} TFLOP/s"
    if found.unit == "%":
        return f"{found.value:.1f} %"
    if found.unit == "FLOP":
        return flops(found.value)
    if found.unit == "ms":
        return milliseconds(found.value)
    if found.unit == "parameters":
        return count(found.value)
    return f"{whole(found.value)} {found.unit}".strip()
