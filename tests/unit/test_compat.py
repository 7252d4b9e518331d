"""Versions, and functions that run when a module has been imported."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from sglang_glm53.compat import SUPPORTED, post_import, require_supported, versions
from sglang_glm53.errors import Glm53Error


@pytest.mark.parametrize("version", SUPPORTED)
def test_supported_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: f"{version}+cu130")
    assert require_supported() == version


@pytest.mark.parametrize("version", ["0.5.21", "0.5.24", "0.5.23.post1", "0.6.0"])
def test_another_version_is_one_line_with_the_supported_ones(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(Glm53Error) as caught:
        require_supported()
    line = str(caught.value)
    assert version in line and all(v in line for v in SUPPORTED) and "\n" not in line


def test_no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(Glm53Error, match=r"not installed.*pip install sglang==0\.5\.23"):
        require_supported()


def test_only_compat_compares_versions() -> None:
    package = Path(versions.__file__).resolve().parents[1]
    for path in package.rglob("*.py"):
        if path.parent.name == "compat":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert not re.search(r"['\"]0\.\d+\.\d+", text), f"{path}:{node.lineno}: {text}"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "glmlate.py"
    path.write_text("value = 1\ntaken = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("glmlate", None)
    post_import._waiting.pop("glmlate", None)


def test_callbacks_run_at_the_end_of_the_import(module: Path) -> None:
    seen: list[tuple[str, int]] = []
    post_import.when_imported("glmlate", lambda m: seen.append(("first", m.value)))
    post_import.when_imported("glmlate", lambda m: seen.append(("second", m.value)))
    assert seen == []
    loaded = importlib.import_module("glmlate")
    assert seen == [("first", 1), ("second", 1)]
    assert loaded.__spec__.loader.get_source("glmlate").startswith("value")
    post_import.when_imported("glmlate", lambda m: seen.append(("late", m.value)))
    assert seen[-1] == ("late", 1)


def test_a_callbacks_error_leaves_through_the_import(module: Path) -> None:
    def fail(_: object) -> None:
        raise Glm53Error("no")

    post_import.when_imported("glmlate", fail)
    with pytest.raises(Glm53Error):
        importlib.import_module("glmlate")
    assert "glmlate" not in sys.modules


def test_too_late_is_an_error(module: Path) -> None:
    module.write_text(
        "from sglang_glm53.compat.post_import import when_imported\n"
        "when_imported('glmlate', print)\n"
    )
    with pytest.raises(RuntimeError, match="being imported already"):
        importlib.import_module("glmlate")
