"""The page's plots as one PNG, drawn by matplotlib (the extra `report`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger.account import Account
from sglang_glm53.ledger.charts import Bars, Lines, charts

COLOURS = ("#0b66c3", "#c2410c", "#0f766e", "#7c3aed")


def save(account: Account, path: Path) -> None:
    """Write the plots to `path`.

    Raises:
        Glm53Error: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise Glm53Error(
            "--png needs matplotlib, which is not installed: pip install 'sglang-glm53[report]', "
            "or use --html"
        ) from None
    found = charts(account)
    figure = Figure(figsize=(14, 9), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    figure.suptitle(f"GLM-5.3 ledger: {account.topology.name}")
    axes = figure.subplots(2, 2).flat
    for chart, axis in zip(found, axes, strict=True):
        axis.set_title(chart.title)
        if isinstance(chart, Bars):
            _bars(axis, chart)
        else:
            _lines(axis, chart)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise Glm53Error(f"cannot write {path}: {error.strerror or error}") from None


def _bars(axis: Any, chart: Bars) -> None:
    labels = [label for label, _, _ in chart.items]
    drawn = axis.barh(labels, [value for _, value, _ in chart.items], color=COLOURS[0])
    axis.bar_label(drawn, [f" {behind}" for _, _, behind in chart.items], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.35)
    axis.set_xlabel(chart.axis)


def _lines(axis: Any, chart: Lines) -> None:
    for index, (label, line) in enumerate(chart.series):
        xs, ys = zip(*line, strict=True)
        axis.plot(xs, ys, marker=".", color=COLOURS[index % len(COLOURS)], label=label)
    if chart.level:
        axis.axhline(chart.level[1], linestyle="--", color="#b91c1c", label=chart.level[0])
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel(chart.x_axis)
    axis.set_ylabel(chart.y_axis)
    axis.grid(alpha=0.3)
    axis.legend()
