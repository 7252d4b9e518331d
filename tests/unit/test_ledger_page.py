"""The ledger's page and picture: complete, self-contained, with units; its charts' data."""

from __future__ import annotations

import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sglang_glm53 import cli
from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.account import Account
from sglang_glm53.ledger.charts import Bars, Lines, charts
from sglang_glm53.ledger.glm53 import config_json
from sglang_glm53.ledger.hardware import load
from sglang_glm53.ledger.html import page
from sglang_glm53.ledger.svg import WIDTH, draw
from sglang_glm53.ledger.topology import PRESETS, Topology, Workload

VOID = {"meta", "link", "br"}


def account(name: str = "dp8-deepep", **work: object) -> Account:
    config = Glm53Config.from_hf(config_json())
    return Account(config, PRESETS[name], replace(Workload(), **work), load("h200"))


class Checker(HTMLParser):
    """Tags that are closed in order; every attribute that could name something outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_is_whole_and_needs_nothing_else(name: str) -> None:
    text = page(account(name, steps=5, tokens=6, accept=3.5))
    checker = Checker()
    checker.feed(text)
    assert not checker.open and checker.tags.count("svg") == 4
    assert checker.links == ["data:,"] and "script" not in checker.tags
    assert "url(" not in text and "@import" not in text and "http" not in text
    for expected in ("743.38 billion", "54,728 B", "prefers-color-scheme: dark", "viewport"):
        assert expected in text


@pytest.mark.parametrize("name", PRESETS)
def test_plots_have_units_and_stay_inside(name: str) -> None:
    for chart in charts(account(name)):
        root = ElementTree.fromstring(draw(chart))
        _, _, width, height = (float(part) for part in root.get("viewBox").split())
        assert width == WIDTH
        texts = [node.text for node in root.iter("text")]
        axes = [chart.axis] if isinstance(chart, Bars) else [chart.x_axis, chart.y_axis]
        assert all(axis in texts for axis in axes)
        for node in root.iter():
            for key, most in (("x", width), ("x2", width), ("cx", width), ("y", height),
                              ("y2", height), ("cy", height)):  # fmt: skip
                assert 0 <= float(node.get(key, 0)) <= most


def test_the_charts_show_the_ledgers_numbers() -> None:
    one = account("tp8", steps=5, tokens=6, accept=3.5)
    parts, bound, kv, sent = charts(one)
    assert isinstance(parts, Bars) and isinstance(bound, Lines)
    assert isinstance(kv, Lines) and isinstance(sent, Bars)
    assert sum(value for _, value, _ in parts.items) == pytest.approx(one.mtp.bytes_read / 1e9)
    lines = dict(bound.series)
    assert dict(lines["decode"])[32] == one.decode.bound.bound_ms
    assert dict(lines["MTP 5-1-6"])[32] == one.mtp.bound.bound_ms
    assert dict(kv.series[1][1])[2**20] == pytest.approx(54728 * 2**20 / 1e9)
    bars = {label: value for label, value, _ in sent.items}
    assert bars["TP 8 (this)"] == one.mtp.busiest_bytes / 1e6
    assert set(bars) == {"TP 8 (this)", "TP 8, DeepEP", "DP 8", "DP 8, DeepEP"}


def test_text_is_escaped() -> None:
    gpu = replace(load("h200"), title="<script>alert(1)</script>")
    text = page(replace(account(), hardware=gpu))
    assert "<script" not in text and "&lt;script&gt;" in text


def test_a_model_that_cannot_be_split_eight_ways_still_has_a_page() -> None:
    config = Glm53Config.from_hf({**config_json(), "num_attention_heads": 2})
    one = Account(config, Topology(tp=2), Workload(), load("h200"))
    labels = [label for label, _, _ in charts(one)[3].items]
    assert labels == ["TP 2 (this)", "TP 2, DeepEP", "DP 2", "DP 2, DeepEP"]
    lonely = Account(config, Topology(), Workload(), load("h200"))
    assert [label for label, _, _ in charts(lonely)[3].items] == ["DP 8", "DP 8, DeepEP"]
    assert "<svg" in page(lonely)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.html"
    assert cli.main(["ledger", "tp8", "--html", str(file)]) == 0
    captured = capsys.readouterr()
    assert not captured.out and captured.err == f"{file}: written\n"
    assert file.read_text().startswith("<!doctype html>")


def test_a_picture_without_matplotlib_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert cli.main(["ledger", "--png", str(tmp_path / "a.png")]) == 1
    err = capsys.readouterr().err
    assert "pip install 'sglang-glm53[report]'" in err and err.count("\n") == 1


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "a.png"
    assert cli.main(["ledger", "dp8", "--png", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000
