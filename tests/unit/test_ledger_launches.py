"""The kernels of a decode step, counted from the config, against the recorded profiles."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_glm53.bench.rank_slice import slice_config
from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.launches import BENCHMARK, KINDS, compare

ROOT = Path(__file__).resolve().parents[2]
REPORT = json.loads((ROOT / "docs/benchmarks/slice.json").read_text())
DECODE = [row for row in REPORT["rows"] if row["work"] == "decode"]
profiles = pytest.mark.parametrize("row", DECODE, ids=[f"batch-{row['batch']}" for row in DECODE])


def config(layers: int = 78) -> Glm53Config:
    return Glm53Config.from_hf(slice_config(layers=layers, experts=32))


@profiles
def test_every_kind_ran_as_often_as_counted(row: dict[str, Any]) -> None:
    found, _ = compare(config(row["layers"]), row["batch"], row["kernels_stock"])
    for each in found:
        assert each.ran == each.counted, each.kind.title


@profiles
def test_nothing_of_a_layer_is_left_over(row: dict[str, Any]) -> None:
    """What no kind names runs a few times a step, not once a layer."""
    found, rest = compare(config(row["layers"]), row["batch"], row["kernels_stock"])
    assert rest < row["layers"] / 2
    whole = sum(each.ran for each in found) + rest + (row["layers"] - 3)
    assert whole == row["launches_stock"]
    assert abs(sum(each.counted for each in found) / (whole - row["layers"] + 3) - 1) < 0.03


@profiles
def test_the_document_tells_these_numbers(row: dict[str, Any]) -> None:
    found, rest = compare(config(row["layers"]), row["batch"], row["kernels_stock"])
    counted = sum(each.counted for each in found)
    line = f"| {row['batch']} | {counted:,} | {row['launches_stock']:,.0f} | {rest:.0f} | 75 |"
    assert line in (ROOT / "docs/ledger.md").read_text()


def test_a_layer_has_as_many_kernels_as_the_document_says() -> None:
    """Two slices differ by their layers: 78 - 74 = one full and three shared ones."""

    def counted(layers: int, batch: int) -> int:
        return sum(each.counted for each in compare(config(layers), batch, [])[0])

    text = (ROOT / "docs/ledger.md").read_text()
    for batch, (shared, full) in ((16, (34, 42)), (1, (33, 41))):
        assert counted(78, batch) - counted(77, batch) == shared
        assert counted(75, batch) - counted(74, batch) == full
    assert "34\nkernels with a shared selection and 42 with its own indexer" in text
    assert f"each of {len(KINDS)} kinds" in text


@profiles
def test_no_kind_reads_faster_than_the_memory(row: dict[str, Any]) -> None:
    """If a count of bytes were too high, its kernels would seem faster than a copy."""
    bandwidth = REPORT["bandwidth"]["bytes_per_second"]
    kinds = {kind.title: kind.kernels for kind in KINDS}

    def seconds(title: str) -> float:
        return sum(
            calls * us / 1e6
            for name, calls, us, *_ in row["kernels_stock"]
            if re.search(kinds[title], name)
        )

    read = row["bytes_by"]
    routed = read["routed experts"] / seconds("routed experts, two products")
    assert 0.75 * bandwidth < routed < bandwidth
    scores = read["index keys"] / seconds("indexer: scores")
    assert scores < bandwidth
    assert row["distinct_experts_stock"] is not None


def test_a_kernel_that_is_not_counted_is_told() -> None:
    rows = [("strange_kernel", 78.0, 1.0), ("fused_moe_kernel", 151.0, 1.0), ("(idle)", 9.0, 1.0)]
    found, rest = compare(config(), 16, rows)
    assert rest == 78
    moe = next(each for each in found if each.kind.kernels == "^fused_moe_kernel$")
    assert (moe.counted, moe.ran) == (150, 151)
    assert compare(config(), 16, [("_simulate_balanced_routing_kernel", 75.0, 1.0)])[1] == 0
    assert BENCHMARK not in {kind.kernels for kind in KINDS}
