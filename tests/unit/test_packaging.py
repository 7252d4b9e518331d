"""The wheel: what is in it, and that installing it adds one package and nothing else."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from sglang_glm53 import __version__

ROOT = Path(__file__).resolve().parents[2]
NOT_SHIPPED = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".gpu"
)


def run(*command: object, cwd: Path, **env: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that building leaves nothing in the real one."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("src") / "checkout", ignore=NOT_SHIPPED)


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", target, checkout, cwd=target)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def read(wheel: Path, ending: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(ending)]
        return archive.read(name).decode()


def test_every_file_of_the_package_is_in_the_wheel(names: set[str]) -> None:
    package = ROOT / "sglang_glm53"
    files = [p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    expected = {str(p.relative_to(ROOT)) for p in files}
    assert {"sglang_glm53/py.typed", "sglang_glm53/tiny/chat_template.jinja"} <= expected
    assert expected <= names, sorted(expected - names)


def test_data_folders_are_inside_the_package(names: set[str], wheel: Path) -> None:
    for folder in ("patches", "recipes"):
        ours = sorted((ROOT / folder).glob("*.yaml"))
        assert ours, f"{folder}/ has no yaml"
        for file in ours:
            shipped = read(wheel, f"sglang_glm53/{folder}/{file.name}")
            assert shipped == file.read_text(encoding="utf-8")


def test_nothing_else_is_in_the_wheel(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert tops == {"sglang_glm53", f"sglang_glm53-{__version__}.dist-info"}


def test_entry_points(wheel: Path) -> None:
    parser = ConfigParser(delimiters=("=",))
    parser.read_string(read(wheel, "entry_points.txt"))
    assert dict(parser["sglang.srt.plugins"]) == {"glm53": "sglang_glm53.plugin:register"}
    assert dict(parser["sglang.srt.platforms"]) == {"glm53": "sglang_glm53.host:activate"}
    assert dict(parser["console_scripts"]) == {"glm53": "sglang_glm53.cli:main"}


def test_metadata(wheel: Path) -> None:
    metadata = email.message_from_string(read(wheel, "dist-info/METADATA"))
    assert metadata["Name"] == "sglang-glm53"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    always = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [line.split(">")[0] for line in always] == ["PyYAML"], "a deployment's own stays its own"
    assert set(metadata.get_all("Provides-Extra")) == {"dev", "report"}
    assert "Apache License" in read(wheel, "licenses/LICENSE")


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a venv that has this environment's packages, but not this one."""
    root = tmp_path_factory.mktemp("layer")
    folder, beneath = root / "venv", root / "beneath"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=root)
    python = folder / "bin" / "python"
    beneath.mkdir()
    for site in (p for p in sys.path if p.endswith("-packages") and os.path.isdir(p)):
        for entry in Path(site).iterdir():
            link = beneath / entry.name
            if "glm53" not in entry.name and entry.suffix != ".pth" and not link.is_symlink():
                link.symlink_to(entry)
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=root)
    Path(purelib.strip(), "beneath.pth").write_text(f"{beneath}\n")
    return python


def frozen(python: Path) -> set[str]:
    return set(run(python, "-m", "pip", "freeze", cwd=python.parent).splitlines())


def test_installing_adds_one_line_to_pip_freeze(layer: Path, wheel: Path) -> None:
    before = frozen(layer)
    assert not any("glm53" in line for line in before)
    run(layer, "-m", "pip", "install", "--no-index", wheel, cwd=wheel.parent)
    after = frozen(layer)
    (added,) = after - before
    assert added.startswith("sglang-glm53 @ ")
    assert before <= after


def test_the_installed_wheel_needs_no_checkout(layer: Path, wheel: Path, tmp_path: Path) -> None:
    again = ("--no-index", "--no-deps", "--force-reinstall")  # this test may run alone
    run(layer, "-m", "pip", "install", *again, wheel, cwd=tmp_path)
    program = (
        "import sglang_glm53\n"
        "from sglang_glm53 import catalog\n"
        "from sglang_glm53.resources import data_folder\n"
        "print(sglang_glm53.__file__)\n"
        "print(data_folder('patches') / 'catalog.yaml', data_folder('recipes') / 'laptop.yaml')\n"
        "print(len(catalog.rows()))\n"
    )
    where, files, rows = run(layer, "-c", program, cwd=tmp_path).splitlines()
    assert str(layer.parents[1]) in where
    assert all(str(layer.parents[1]) in file and Path(file).is_file() for file in files.split())
    assert int(rows) > 0
    script = layer.with_name("glm53")
    assert __version__ in run(script, "--version", cwd=tmp_path)


def test_a_checkout_on_pythonpath_finds_its_data(checkout: Path, tmp_path: Path) -> None:
    program = "from sglang_glm53.resources import data_folder; print(data_folder('recipes'))"
    found = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(checkout))
    assert Path(found.strip()) == checkout / "recipes"
