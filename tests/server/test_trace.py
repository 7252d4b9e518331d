"""`glm53 trace` on real ranks: what runs is what the ledger counts, row by row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
PLAIN = {"prefill", "decode"}
MTP = {"prefill", "verify", "draft-prefill", "draft-extend", "draft"}


@pytest.mark.parametrize(
    ("topology", "mtp"),
    [
        pytest.param(topology, mtp, marks=pytest.mark.server(f"trace {topology} {mtp}"))
        for topology, mtp in (
            ("tp=1", "3-1-4"),
            ("tp=2", None),
            ("tp=2", "3-1-4"),
            ("tp=2,dp=2", None),
            ("tp=2,dp=2", "3-1-4"),
        )
    ],
)
def test_what_runs_is_what_is_counted(topology: str, mtp: str | None, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "sglang_glm53.cli", "trace", topology, "--json", str(report)]
    command += ["--keep", str(tmp_path / "run"), *(("--mtp", mtp) if mtp else ())]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert report.exists(), done.stderr
    found = json.loads(report.read_text())
    differing = [
        (each["kind"], each["rows"], row)
        for each in found["passes"]
        for row in (*each["collectives"], *each["products"])
        if row["counted"] != row["ran"]
    ]
    assert not differing and found["equal"] and done.returncode == 0
    assert found["served"].startswith("sglang_glm53.models.")
    assert {each["kind"] for each in found["passes"]} == (MTP if mtp else PLAIN)
    counted = sum(row["counted"] for each in found["passes"] for row in each["collectives"])
    assert bool(counted) == (topology != "tp=1")
    # Every kind of product was compared, and attention in both of its forms.
    products = {row["what"] for each in found["passes"] for row in each["products"]}
    assert {"A projections", "o_proj", "indexer: key and gates", "router"} <= products
    assert {each["form"] for each in found["passes"]} == {"absorbed", "expanded"}
