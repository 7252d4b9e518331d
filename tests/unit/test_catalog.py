"""The catalog of SGLang symbols: its rows hold for the installed SGLang, and a change needs one."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sglang_glm53 import catalog
from sglang_glm53.errors import Glm53Error

PACKAGE = Path(catalog.__file__).resolve().parent
ROW = """
- symbol: {symbol}
  kind: {kind}
  parameters: [{parameters}]
  why: test it. More words.
  upstream: nowhere
  remove_when: never
"""


def row(symbol: str, *, kind: str = "wrap", parameters: str = "") -> catalog.Row:
    return catalog.parse(ROW.format(symbol=symbol, kind=kind, parameters=parameters))[0]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable package `fakesgl` with one module."""
    folder = tmp_path / "fakesgl"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "mod.py").write_text(
        textwrap.dedent(
            '''
            """def hidden(x): a definition in text is none."""
            TABLE: dict = {}
            other = 1
            def plain(a, b=1, *, c): return (a, b, c)
            class Thing:
                limit = 3
                def __init__(self, size): self.size = size
                def grow(self, by): return self.size + by
                @staticmethod
                def fixed(x): return x
                @classmethod
                def made(cls): return cls(0)
            # end
            def broad(
                one,
                two,
            ):
                return one
            '''
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    catalog._source_path.cache_clear()
    yield folder
    catalog._source_path.cache_clear()
    for name in [n for n in sys.modules if n.partition(".")[0] == "fakesgl"]:
        del sys.modules[name]


def test_shipped_rows_hold_for_the_installed_sglang() -> None:
    catalog.check_sources()
    assert len(catalog.rows()) >= 10


def test_rows_hold_for_the_loaded_symbols() -> None:
    """The source check and the check on load agree, for the modules that import in seconds."""
    for row in catalog.rows().values():
        if row.module.startswith(("sglang.srt.arg_groups", "sglang.srt.platforms")):
            catalog.verify(row, importlib.import_module(row.module))


def test_every_changed_symbol_has_a_row_and_every_row_is_used() -> None:
    """wrap and on_load refuse a symbol without a row; this finds them all without running."""
    used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"sglang(\.\w+)+:[\w.]+", node.value) or node.value == "sgl_kernel":
                    used.add(node.value)
    rows = catalog.rows()
    assert used <= set(rows), f"without a row: {sorted(used - set(rows))}"
    listed_only = {s for s, r in rows.items() if r.kind == "subclass"}
    assert set(rows) - listed_only <= used, f"unused: {sorted(set(rows) - used - listed_only)}"


def test_nothing_of_sglang_is_assigned_outside_the_catalog() -> None:
    """No `module.attribute = …` or setattr on something imported from SGLang."""
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "catalog.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            and (getattr(node, "module", None) or node.names[0].name).startswith("sglang.")
            for alias in node.names
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    if target.value.id in names:
                        offenders.append(f"{path.name}: {ast.unparse(target)}")
    # The pool hook, which has its row, sets the one public attribute that SGLang reads.
    assert offenders == ["registration.py: current_platform.get_kv_pool_cls"]


@pytest.mark.parametrize(
    ("symbol", "parameters", "problem"),
    [
        ("fakesgl.mod:plain", "a, b, c", None),
        ("fakesgl.mod:plain", "a, d", "parameter d is gone (it takes a, b, c)"),
        ("fakesgl.mod:broad", "one, two", None),
        ("fakesgl.mod:hidden", "", "symbol is missing"),
        ("fakesgl.mod:TABLE", "", None),
        ("fakesgl.mod:other", "", None),
        ("fakesgl.mod:Thing.grow", "by", None),
        ("fakesgl.mod:Thing.shrink", "", "symbol is missing"),
        ("fakesgl.mod:Thing.limit", "", None),
        ("fakesgl.mod:Thing", "size", None),
        ("fakesgl.mod:Thing", "colour", "parameter colour is gone (it takes self, size)"),
        ("fakesgl.gone:plain", "", "module fakesgl.gone is missing"),
        ("nosuchpackage.mod:plain", "", "module nosuchpackage.mod is missing"),
    ],
)
def test_source_check(fake: Path, symbol: str, parameters: str, problem: str | None) -> None:
    assert catalog.source_problem(row(symbol, parameters=parameters)) == problem
    assert "fakesgl.mod" not in sys.modules  # nothing is imported for it


def test_a_broken_row_is_one_line_with_its_place(fake: Path) -> None:
    with pytest.raises(Glm53Error) as caught:
        catalog.check_sources([row("fakesgl.mod:gone")])
    line = str(caught.value)
    assert line.startswith("patches/catalog.yaml:2: fakesgl.mod:gone: symbol is missing in SGLang")
    assert "needed to test it" in line and "\n" not in line


def _load(fake: Path) -> ModuleType:
    (fake / "__init__.py").write_text("")
    return importlib.import_module("fakesgl.mod")


@pytest.mark.parametrize("late", [False, True])
def test_wrap(fake: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    entries = [row("fakesgl.mod:plain", parameters="a"), row("fakesgl.mod:Thing.fixed")]
    monkeypatch.setattr(catalog, "rows", lambda: {r.symbol: r for r in entries})
    module = _load(fake) if late else None

    def factory(original):  # noqa: ANN001, ANN202
        return lambda *args, **kwargs: ("wrapped", original(*args, **kwargs))

    for entry in entries:
        catalog.wrap(entry.symbol, factory)
    module = module or _load(fake)
    assert module.plain(1, c=2) == ("wrapped", (1, 1, 2))
    assert module.Thing.fixed(3) == ("wrapped", 3) == module.Thing(1).fixed(3)
    assert module.plain.__name__ == "plain"


def test_wrap_refuses_what_has_no_row_and_what_changed(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = row("fakesgl.mod:plain", parameters="z")
    monkeypatch.setattr(catalog, "rows", lambda: {entry.symbol: entry})
    with pytest.raises(Glm53Error, match="has no row"):
        catalog.wrap("fakesgl.mod:broad", lambda original: original)
    catalog.wrap(entry.symbol, lambda original: original)
    with pytest.raises(Glm53Error, match="parameter z is gone"):
        _load(fake)


def test_wrap_leaves_another_versions_row_alone(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ROW.format(symbol="fakesgl.mod:plain", kind="wrap", parameters="")
    entry = catalog.parse(text + "  versions: ['0.0.1']\n")[0]
    monkeypatch.setattr(catalog, "rows", lambda: {entry.symbol: entry})
    catalog.wrap(entry.symbol, lambda original: lambda: "wrapped")
    assert _load(fake).plain(1, c=2) == (1, 1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1", "a list of rows is expected"),
        ("- symbol: a:b\n  kind: wrap", r"fields missing: \['why', 'upstream', 'remove_when'\]"),
        (ROW.format(symbol="a:b", kind="bend", parameters=""), "kind 'bend' is none of"),
        (ROW.format(symbol="a:b", kind="wrap", parameters="") * 2, ":9: a:b has a row at 2"),
        (ROW.format(symbol="a:b", kind="wrap", parameters="") + "  extra: 1\n", "'extra'"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(Glm53Error, match=message):
        catalog.parse(text)
