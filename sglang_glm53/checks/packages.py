"""Facts of the Python environment, from the packages' metadata: nothing is imported."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")

# Looked at besides what SGLang pins: other names of the same kernels, and what depends on them.
ALSO = (
    *("sglang", "sgl-kernel", "deep-ep", "deep-gemm", "flash-mla", "flashinfer-cubin"),
    *("flashinfer-jit-cache", "mooncake-transfer-engine", "nixl", "sglang-router"),
    *("pynvml", "safetensors", "tokenizers"),
)


@dataclass(frozen=True)
class Plugin:
    """An entry point of SGLang's: its group, name, "module:function" and distribution.

    `problem` is why it will not load, "" where its module is there.
    """

    group: str
    name: str
    value: str
    distribution: str
    problem: str = ""


def versions() -> dict[str, str | None]:
    """Versions by normalised distribution name, "flashinfer-python"; None: not installed."""
    return {name: _version(name) for name in sorted({*ALSO, *(pins() or {})})}


def pins() -> dict[str, str] | None:
    """What the installed SGLang asks for, as version specifiers by normalised name."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        lines = metadata.requires("sglang") or ()
    except metadata.PackageNotFoundError:
        return None
    needed = {}
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed[canonicalize_name(requirement.name)] = str(requirement.specifier)
    return needed


def plugins() -> tuple[Plugin, ...]:
    """Entry points of SGLang's groups; a module that is not there is told, none is imported."""
    found = []
    for group in GROUPS:
        for point in metadata.entry_points(group=group):
            owner = getattr(point.dist, "name", "unknown") if point.dist else "unknown"
            found.append(Plugin(group, point.name, point.value, owner, _problem(point.value)))
    return tuple(found)


def catalog_problems() -> tuple[str, ...] | None:
    """Symbols of SGLang's that this package changes and that are not as it expects them."""
    from sglang_glm53 import catalog
    from sglang_glm53.compat.versions import sglang_version

    version = sglang_version()
    if version is None:
        return None
    problems = []
    for row in catalog.rows().values():
        if row.kind != "module" and row.applies(version):
            problem = catalog.source_problem(row)
            if problem is not None:
                problems.append(f"{row.symbol}: {problem}")
    return tuple(problems)


def torch_cuda() -> str | None:
    """CUDA version that torch is built for, read from its version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=\n]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found.group(1) if found else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def _problem(value: str) -> str:
    """Why an entry point cannot be loaded, as far as can be told without importing it."""
    module = value.partition(":")[0].strip()
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return f"there is no module {top}"
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*rest)
        if not rest or base.with_suffix(".py").is_file() or base.is_dir() or _compiled(base):
            return ""
    return f"there is no module {module}" if rest else ""


def _compiled(base: Path) -> bool:
    return any(base.parent.glob(f"{base.name}.*.so"))
