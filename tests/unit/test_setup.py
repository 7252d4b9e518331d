"""scripts/env.sh: an environment that is there is built on, never changed; errors are one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="a layer needs an environment with SGLang to stand on")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "__pycache__", ".*_cache")
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("setup") / "checkout", ignore=ignored)


def setup(checkout: Path, python: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [str(checkout / "scripts" / "env.sh")],
        env={**env, "GLM53_PYTHON": python},
        capture_output=True,
        text=True,
    )


def listing(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir() if entry.name != "__pycache__"}


def test_a_layer_runs_this_checkout_and_leaves_its_base_alone(checkout: Path) -> None:
    site = Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    before = listing(site / "site-packages"), listing(Path(sys.prefix, "bin"))
    done = setup(checkout, sys.executable)
    assert done.returncode == 0, done.stderr
    python = done.stdout.strip()
    assert Path(python) == checkout / ".venv-layer" / "bin" / "python"
    program = (
        "import sglang_glm53, importlib.metadata as m, importlib.util as u\n"
        "print(sglang_glm53.__file__)\n"
        "print(m.distribution('sglang-glm53').locate_file(''))\n"
        "print(all(u.find_spec(n) for n in ('sglang', 'torch', 'pytest', 'ruff')))\n"
    )
    shown = subprocess.run([python, "-c", program], cwd="/", capture_output=True, text=True)
    code, dist, whole = shown.stdout.splitlines()
    assert Path(code).resolve() == checkout / "sglang_glm53" / "__init__.py"
    assert (checkout / ".venv-layer") in Path(dist).parents
    assert whole == "True"
    assert (listing(site / "site-packages"), listing(Path(sys.prefix, "bin"))) == before

    script = Path(python).with_name("sglang")
    assert script.read_text().splitlines()[0] == f"#!{python}"
    shown = subprocess.run([script, "version"], cwd="/", capture_output=True, text=True)
    assert "sglang version: 0.5.2" in shown.stdout, shown.stderr

    again = setup(checkout, sys.executable)
    assert again.stdout == done.stdout and again.stderr == "", "nothing to do the second time"


@pytest.mark.parametrize(
    ("python", "says"),
    [("/no/such/python", "is no program"), ("/bin/false", "supported are 0.5.22 and 0.5.23")],
)
def test_a_python_that_cannot_be_built_on(checkout: Path, python: str, says: str) -> None:
    done = setup(checkout, python)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("[setup] error: ") and says in line and python in line
