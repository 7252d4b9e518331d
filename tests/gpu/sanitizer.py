"""compute-sanitizer over every GPU kernel of our own: memcheck and racecheck.

A kernel's module under `sglang_glm53/kernels/` offers `sanitizer_cases()`: (name, function) pairs
that launch it on small inputs, edges included.

usage: python -m gpu.sanitizer OUT
       python -m gpu.sanitizer --launch   (what the sanitizer runs: every case once)
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .children import TESTS
from .compare import Check, as_json, report

TOOLS = ("memcheck", "racecheck")
PACKAGE = "sglang_glm53.kernels"
SECONDS = 240


def kernel_modules() -> list[str]:
    """Modules of our own kernels; empty in a release that has none."""
    if importlib.util.find_spec(PACKAGE) is None:
        return []
    package = importlib.import_module(PACKAGE)
    found = pkgutil.walk_packages(package.__path__, f"{PACKAGE}.")
    return [module.name for module in found if not module.ispkg]


def cases() -> list[tuple[str, Callable[[], object]]]:
    """Every case of every kernel.

    Raises:
        AssertionError: a module without cases.
    """
    listed = []
    for name in kernel_modules():
        module = importlib.import_module(name)
        assert hasattr(module, "sanitizer_cases"), f"{name} has no sanitizer_cases()"
        listed += [(f"{name}: {case}", function) for case, function in module.sanitizer_cases()]
    return listed


def launch() -> None:
    """Run every case; the sanitizer watches."""
    import torch

    for name, function in cases():
        function()
        torch.cuda.synchronize()
        print(name, flush=True)


def skip_reason() -> str | None:
    """Why nothing can be run; None if it can."""
    if not kernel_modules():
        return "this release has no GPU kernel of its own"
    if shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not installed"
    return None


def check(tool: str, out: Path) -> Check:
    """One tool over all cases; its log goes into `out`."""
    log = out / "logs" / f"sanitizer-{tool}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--target-processes"]
    command += ["all", sys.executable, "-m", "gpu.sanitizer", "--launch"]
    with log.open("wb") as written:
        try:
            code = subprocess.run(
                command, stdout=written, stderr=written, timeout=SECONDS, cwd=TESTS
            ).returncode
        except subprocess.TimeoutExpired:
            return Check(tool, False, f"not done after {SECONDS} s (log {log})")
    lines = [line for line in log.read_text(errors="replace").splitlines() if "SUMMARY" in line]
    return Check(tool, code == 0, f"{lines[-1].strip('= ') if lines else f'exit code {code}'}")


def main(arguments: list[str]) -> int:
    """See the module's usage lines."""
    if arguments == ["--launch"]:
        launch()
        return 0
    (out,) = map(Path, arguments)
    if reason := skip_reason():
        print(f"sanitizer: not run, {reason}", flush=True)
        return 0
    checks = [check(tool, out) for tool in TOOLS]
    print(report(f"sanitizer, {len(cases())} cases", checks), flush=True)
    (out / "sanitizer.json").write_text(json.dumps(as_json(checks), indent=1) + "\n")
    return int(not all(check.passed for check in checks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
