"""The ledger's page in a real Chromium: it asks for nothing, and all of it can be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, DRIVER, Browser, browser

from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.account import Account
from sglang_glm53.ledger.glm53 import config_json
from sglang_glm53.ledger.hardware import load
from sglang_glm53.ledger.html import page
from sglang_glm53.ledger.topology import PRESETS, Workload

pytestmark = [
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here (Debian has both)"
    ),
    pytest.mark.xdist_group("chromium"),
]
WIDTHS = (1280, 390)
LEAST_PIXELS = 9.5  # of a text, at the width of a phone
LEAST_CONTRAST = 4.5  # WCAG 2.2, level AA, for text

# Colours of texts with their backgrounds, sizes and places, as the browser computed them.
TEXTS = """
const back = element => {
  for (let each = element; each; each = each.parentElement) {
    const colour = getComputedStyle(each).backgroundColor;
    if (!/, 0\\)$|transparent/.test(colour)) return colour;
  }
  return 'rgb(255, 255, 255)';
};
const found = [];
for (const each of document.querySelectorAll('h1, h2, p, b, span, figcaption, td, th, text')) {
  const box = each.getBoundingClientRect(), style = getComputedStyle(each);
  if (!box.width || !each.textContent.trim()) continue;
  const svg = each.ownerSVGElement;
  const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
  found.push({
    text: each.textContent.trim().slice(0, 40),
    size: parseFloat(style.fontSize) * scale,
    colour: svg ? style.fill : style.color, back: back(svg || each),
    left: box.left, right: box.right,
    plot: svg ? [...document.querySelectorAll('svg')].indexOf(svg) : -1,
    box: [box.left, box.top, box.right, box.bottom],
    scrolls: !!each.closest('.scroll'),
  });
}
return found;
"""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        opened.ask("url", url="about:blank")
        opened.requested()  # the browser's own first page
        yield opened


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = Workload(batch=256, context=8192, steps=5, tokens=6, accept=3.5)
    config = Glm53Config.from_hf(config_json())
    found = tmp_path_factory.mktemp("page") / "ledger.html"
    found.write_text(page(Account(config, PRESETS["dp8-deepep"], work, load("h200"))))
    return found


@pytest.fixture(
    params=[(width, dark) for width in WIDTHS for dark in (False, True)],
    ids=lambda each: f"{each[0]}-{'dark' if each[1] else 'light'}",
)
def shown(
    request: pytest.FixtureRequest, window: Browser, file: Path, tmp_path: Path
) -> tuple[Browser, int, bool]:
    width, dark = request.param
    window.console()
    window.requested()
    window.show(file, width=width, dark=dark)
    return window, width, dark


def rgb(colour: str) -> tuple[float, float, float]:
    """Of "rgb(1, 2, 3)", linear, 0 to 1."""
    numbers = [float(each) / 255 for each in colour.split("(")[1].rstrip(")").split(",")[:3]]
    red, green, blue = (
        n / 12.92 if n <= 0.04045 else ((n + 0.055) / 1.055) ** 2.4 for n in numbers
    )
    return red, green, blue


def contrast(front: str, back: str) -> float:
    light = sorted(
        0.2126 * red + 0.7152 * green + 0.0722 * blue
        for red, green, blue in map(rgb, (front, back))
    )
    return (light[1] + 0.05) / (light[0] + 0.05)


def test_it_opens_without_a_word_and_without_a_network(
    shown: tuple[Browser, int, bool], file: Path, tmp_path: Path
) -> None:
    window, width, _ = shown
    assert window.console() == []
    assert set(window.requested()) <= {file.resolve().as_uri(), "data:,"}
    inner, document, loaded = window.run(
        "return [innerWidth, document.documentElement.scrollWidth,"
        " performance.getEntriesByType('resource').length]"
    )
    assert inner == width and document <= width, "the page is wider than the window"
    assert loaded == 0
    window.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 100_000


def test_every_text_is_legible(shown: tuple[Browser, int, bool]) -> None:
    window, width, dark = shown
    texts: list[dict[str, Any]] = window.run(TEXTS)
    assert len(texts) > 300
    for each in texts:
        assert each["size"] >= LEAST_PIXELS, each
        assert contrast(each["colour"], each["back"]) >= LEAST_CONTRAST, each
        assert each["scrolls"] or (each["left"] >= 0 and each["right"] <= width + 0.5), each
    backs = {each["back"] for each in texts}
    assert all((sum(rgb(back)) < 0.2) == dark for back in backs), "the theme is followed"


def test_texts_of_a_plot_do_not_lie_on_each_other(shown: tuple[Browser, int, bool]) -> None:
    window, *_ = shown
    texts: list[dict[str, Any]] = window.run(TEXTS)
    for plot in range(4):
        inside = [each for each in texts if each["plot"] == plot]
        assert len(inside) > 6
        for index, one in enumerate(inside):
            for other in inside[index + 1 :]:
                left, top, right, bottom = one["box"]
                wide = min(right, other["box"][2]) - max(left, other["box"][0])
                high = min(bottom, other["box"][3]) - max(top, other["box"][1])
                # Boxes have a font's whole line height; letters have about two thirds of it.
                assert wide <= 0 or high <= 0.35 * (bottom - top), (one["text"], other["text"])


def test_the_numbers_of_a_table_are_in_sight_on_a_phone(window: Browser, file: Path) -> None:
    """A table of parts shows part and number without being scrolled."""
    window.show(file, width=390, dark=False)
    seen = window.run(
        "return [...document.querySelectorAll('td.n:nth-child(2)')]"
        ".map(cell => [cell.textContent, cell.getBoundingClientRect().right])"
    )
    assert len(seen) > 40
    hidden = [text for text, right in seen if right > 390]
    assert not hidden


def test_a_text_that_cannot_be_read_would_be_noticed(window: Browser, file: Path) -> None:
    pale = file.with_name("pale.html")
    pale.write_text(file.read_text().replace("--muted: #5b6470", "--muted: #c8d0d8"))
    window.show(pale, width=1280, dark=False)
    texts = window.run(TEXTS)
    assert any(contrast(each["colour"], each["back"]) < LEAST_CONTRAST for each in texts)
    assert contrast("rgb(255, 255, 255)", "rgb(0, 0, 0)") == pytest.approx(21)


def test_other_accounts_fit_too(window: Browser, file: Path) -> None:
    config = Glm53Config.from_hf(config_json())
    for name in ("tp8", "dp8"):
        other = file.with_name(f"{name}.html")
        account = Account(config, PRESETS[name], replace(Workload(), batch=1), load("b200"))
        other.write_text(page(account))
        window.show(other, width=390, dark=True)
        assert window.run("return document.documentElement.scrollWidth") <= 390
        assert window.console() == []
