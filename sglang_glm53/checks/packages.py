"""Facts of the Python environment, from the packages' metadata: nothing is imported."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")

# Looked at besides what SGLang pins: other names of the same kernels, and what depends on them.
ALSO = (
    *("sglang", "sgl-kernel", "deep-ep", "deep-gemm", "flash-mla", "flashinfer-cubin"),
    *("flashinfer-jit-cache", "mooncake-transfer-engine", "nixl", "sglang-router"),
    *("pynvml", "safetensors", "tokenizers"),
)

# What SGLang imports where an option asks for it, and the kernels of every forward pass.
MODULES = (
    *("deep_ep", "deep_gemm", "flash_mla", "flashinfer", "mooncake", "nixl", "nixl_ep"),
    *("pplx_kernels", "sgl_kernel"),
)

ARCHITECTURE = "GlmMoeDsaForCausalLM"
_MOST_FILES = 500  # of a plugin's package that are looked through


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


def modules() -> frozenset[str]:
    """Those of MODULES that are there."""
    return frozenset(name for name in MODULES if _spec(name) is not None)


def contested() -> tuple[str, ...]:
    """Other plugins of SGLang's that define our architecture or hook a symbol of our catalog.

    Their sources are searched for a class of that name, and for a symbol's dotted name in quotes,
    which is how SGLang's hooks name their target. Nothing is imported.
    """
    from sglang_glm53 import catalog

    targets = [row.symbol.replace(":", ".") for row in catalog.rows().values() if row.path]
    wanted = re.compile(
        rf"^class ({ARCHITECTURE}\w*)\b|[\"']({'|'.join(map(re.escape, targets))})[\"']",
        re.MULTILINE,
    )
    lines = []
    for plugin in plugins():
        top = plugin.value.partition(":")[0].partition(".")[0].strip()
        spec = None if top == "sglang_glm53" else _spec(top)
        if spec is None:
            continue
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        sources = [path for folder in folders for path in folder.rglob("*.py")][:_MOST_FILES]
        if not folders and spec.origin:
            sources = [Path(spec.origin)]
        for path in sources:
            found = wanted.search(path.read_text(encoding="utf-8", errors="replace"))
            if found:
                lines.append(f"{plugin.name} ({plugin.distribution}): {found[1] or found[2]}")
                break
    return tuple(dict.fromkeys(lines))


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
    spec = _spec("torch")
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


def _spec(module: str) -> ModuleSpec | None:
    """Where a top-level module is; it is not imported."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def _problem(value: str) -> str:
    """Why an entry point cannot be loaded, as far as can be told without importing it."""
    module = value.partition(":")[0].strip()
    top, *rest = module.split(".")
    spec = _spec(top)
    if spec is None:
        return f"there is no module {top}"
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*rest)
        if not rest or base.with_suffix(".py").is_file() or base.is_dir() or _compiled(base):
            return ""
    return f"there is no module {module}" if rest else ""


def _compiled(base: Path) -> bool:
    return any(base.parent.glob(f"{base.name}.*.so"))
