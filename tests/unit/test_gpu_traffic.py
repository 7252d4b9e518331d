"""The bytes of a step as Nsight Compute writes them, and how they are judged."""

from __future__ import annotations

import pytest
from gpu.traffic import READ, judge, kernels

HEAD = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'


def _line(name: str, value: str, unit: str = "byte", metric: str = READ) -> str:
    return f'"0","{name}","{metric}","{unit}","{value}"'


def test_bytes_are_summed_by_kernel_whatever_their_unit() -> None:
    lines = [
        "==PROF== Connected to process 7",
        HEAD,
        _line("gemm<a, b>", "1,024"),
        _line("gemm<a, b>", "2", "Mbyte"),
        _line("norm", "3.5", "Kbyte"),
        _line("norm", "9", "byte", "dram__bytes_write.sum"),
    ]
    found = kernels(lines)
    assert [(each.name, each.calls, each.read) for each in found] == [
        ("gemm<a, b>", 2, 2_001_024.0),
        ("norm", 1, 3500.0),
    ]


@pytest.mark.parametrize("lines", [[], [HEAD], [HEAD, _line("gemm", "1", "furlong")]])
def test_what_cannot_be_read_is_an_error(lines: list[str]) -> None:
    with pytest.raises(ValueError):
        kernels(lines)


@pytest.mark.parametrize(
    ("read", "good"), [(1.0, True), (1.029, True), (1.04, False), (0.9, False)]
)
def test_a_count_within_three_percent_passes(read: float, good: bool) -> None:
    row = {"side": "ours", "batch": 1, "launches": 5, "read": read * 1e9, "counted_total": 1e9}
    assert [check.passed for check in judge([row])] == [good]


def test_a_step_that_failed_fails() -> None:
    (check,) = judge([{"side": "ours", "batch": 1, "error": "ncu: no rights"}])
    assert not check.passed and "no rights" in check.detail
