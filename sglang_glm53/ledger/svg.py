"""Charts as SVG. Colours are CSS classes of the page, so that they follow its theme."""

from __future__ import annotations

import math
from html import escape

from sglang_glm53.ledger.charts import Bars, Lines

# A phone's width; the page scales it up. Font sizes are in these units.
WIDTH = 360


def draw(chart: Bars | Lines) -> str:
    """The chart as an <svg> element."""
    return _bars(chart) if isinstance(chart, Bars) else _lines(chart)


def _svg(height: int, label: str, body: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(body)}</svg>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}>{escape(text)}</text>'


def _bars(chart: Bars) -> str:
    step, top = 34, 6
    right = WIDTH - 8
    most = max((value for _, value, _ in chart.items), default=0) or 1
    grid, body = [], []
    for index, (label, value, behind) in enumerate(chart.items):
        y = top + index * step
        width = max(1.0, (right - 4) * value / most)
        body += [
            _text(4, y + 11, label),
            _text(right, y + 11, behind, anchor="end", kind="muted"),
            f'<rect class="s1" x="4" y="{y + 16}" width="{width:.1f}" height="10" rx="2">'
            f"<title>{escape(f'{label}: {behind}')}</title></rect>",
        ]
    bottom = top + len(chart.items) * step
    height = bottom + 34
    ticks = _ticks(most)
    for tick in ticks:
        x = 4 + (right - 4) * tick / most
        anchor = "start" if tick == 0 else "end" if x > right - 12 else "middle"
        grid.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        body.append(_text(x, bottom + 12, f"{tick:g}", anchor=anchor, kind="muted"))
    body.append(_text(right, bottom + 28, chart.axis, anchor="end", kind="axis"))
    return _svg(height, f"{chart.title}, {chart.axis}", grid + body)


def _lines(chart: Lines) -> str:
    left, right, top, bottom = 44, WIDTH - 10, 22, 214
    xs = [x for _, line in chart.series for x, _ in line]
    ys = [y for _, line in chart.series for _, y in line]
    if chart.level:
        ys.append(chart.level[1])
    low, high = math.log2(min(xs)), math.log2(max(xs))
    ticks = _ticks(max(ys))
    most = max(ticks[-1], max(ys))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low) / (high - low)
        return left + (right - left) * across, bottom - (bottom - top) * y / most

    body = [_text(4, 12, chart.y_axis, kind="axis")]
    for tick in ticks:
        _, y = at(min(xs), tick)
        body += [
            f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>',
            _text(left - 5, y + 4, f"{tick:g}", anchor="end", kind="muted"),
        ]
    powers = range(math.ceil(low), math.floor(high) + 1)
    for power in list(powers)[:: 2 if len(powers) > 6 else 1]:
        x, _ = at(2**power, 0)
        anchor = "end" if x > right - 10 else "start" if x < left + 10 else "middle"
        body.append(_text(x, bottom + 14, _power(power), anchor=anchor, kind="muted"))
    body.append(_text(right, bottom + 30, chart.x_axis, anchor="end", kind="axis"))
    y = bottom + 48
    for index, (label, line) in enumerate(chart.series):
        kind = f"s{index % 4 + 1}"
        points = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in line)
        body.append(f'<polyline class="line {kind}" points="{points}"/>')
        for point in line:
            x, up = at(*point)
            body.append(
                f'<circle class="dot {kind}" cx="{x:.1f}" cy="{up:.1f}" r="2.4">'
                f"<title>{escape(label)}: {point[0]:,.0f} {escape(chart.x_axis)}, {point[1]:.2f}"
                "</title></circle>"
            )
        body += [
            f'<line class="line {kind}" x1="4" x2="22" y1="{y - 4}" y2="{y - 4}"/>',
            _text(28, y, label),
        ]
        y += 17
    if chart.level:
        label, level = chart.level
        _, up = at(min(xs), level)
        body += [
            f'<line class="level" x1="{left}" x2="{right}" y1="{up:.1f}" y2="{up:.1f}"/>',
            f'<line class="level" x1="4" x2="22" y1="{y - 4}" y2="{y - 4}"/>',
            _text(28, y, label),
        ]
        y += 17
    return _svg(y - 4, f"{chart.title}, {chart.y_axis} over {chart.x_axis}", body)


def _ticks(most: float) -> list[float]:
    """Four to six round numbers from 0 to at least nearly `most`."""
    size = 10 ** math.floor(math.log10(most)) if most > 0 else 1
    step = next(size * part for part in (0.1, 0.2, 0.25, 0.5, 1, 2) if most / (size * part) <= 6)
    return [round(step * index, 10) for index in range(int(most / step) + 1)]


def _power(power: int) -> str:
    if power >= 20:
        return f"{2 ** (power - 20)}M"
    return f"{2 ** (power - 10)}K" if power >= 10 else str(2**power)
