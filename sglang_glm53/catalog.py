"""The catalog of SGLang symbols that this package wraps, replaces or sets (patches/catalog.yaml).

Nothing in the package changes SGLang except through `wrap` and `on_load`, and both ask the catalog
for the symbol's row first: a change without a row is an error. Before a
change is made, the row is held against the loaded symbol; at registration every row is held against
the source of the installed SGLang without importing it. A missing symbol or a changed signature
raises with that row's line.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_glm53.compat import sglang_version
from sglang_glm53.compat.post_import import when_imported
from sglang_glm53.errors import Glm53Error
from sglang_glm53.resources import data_folder

KINDS = ("wrap", "hook", "instance", "item", "subclass", "module")
_REQUIRED = ("symbol", "kind", "why", "upstream", "remove_when")
_OPTIONAL = ("parameters", "versions")


@dataclass(frozen=True)
class Row:
    """One row of the catalog.

    Attributes:
        symbol: "package.module:Name" or "package.module:Class.method"; for kind "module" the
            module alone.
        kind: wrap (called round the original), hook (a public hook of SGLang), instance (set on one
            object), item (an entry of a dict), subclass (a class of ours overrides it), module
            (stands in when the real one does not import).
        parameters: names of parameters that we rely on, each of which the callable must take.
        versions: SGLang versions that the row is for; empty: all supported ones.
    """

    symbol: str
    kind: str
    why: str
    upstream: str
    remove_when: str
    parameters: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    line: int = 0

    @property
    def module(self) -> str:
        return self.symbol.partition(":")[0]

    @property
    def path(self) -> tuple[str, ...]:
        """The attributes that lead from the module to the symbol."""
        name = self.symbol.partition(":")[2]
        return tuple(name.split(".")) if name else ()

    def applies(self, version: str | None) -> bool:
        return not self.versions or version in self.versions


def parse(text: str, *, where: str = "patches/catalog.yaml") -> tuple[Row, ...]:
    """The rows of a catalog.

    Raises:
        Glm53Error: a row lacks a field, has an unknown one, or a symbol stands in two rows.
    """
    import yaml

    node = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if not isinstance(node, yaml.SequenceNode):
        raise Glm53Error(f"{where}: a list of rows is expected at the top level")
    entries: list[dict[str, Any]] = yaml.load(
        text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    rows: dict[str, Row] = {}
    for entry, item in zip(entries, node.value, strict=True):
        line = item.start_mark.line + 1
        if not isinstance(entry, dict):
            raise Glm53Error(f"{where}:{line}: a row must be a mapping")
        missing = [key for key in _REQUIRED if not entry.get(key)]
        unknown = sorted(set(entry) - {*_REQUIRED, *_OPTIONAL})
        if missing or unknown:
            raise Glm53Error(f"{where}:{line}: fields missing: {missing}; unknown: {unknown}")
        if entry["kind"] not in KINDS:
            raise Glm53Error(f"{where}:{line}: kind {entry['kind']!r} is none of {KINDS}")
        row = Row(
            symbol=entry["symbol"],
            kind=entry["kind"],
            why=entry["why"],
            upstream=entry["upstream"],
            remove_when=entry["remove_when"],
            parameters=tuple(entry.get("parameters", ())),
            versions=tuple(str(v) for v in entry.get("versions", ())),
            line=line,
        )
        if row.symbol in rows:
            raise Glm53Error(f"{where}:{line}: {row.symbol} has a row at {rows[row.symbol].line}")
        rows[row.symbol] = row
    return tuple(rows.values())


@functools.cache
def rows() -> Mapping[str, Row]:
    """The shipped catalog, by symbol."""
    path = data_folder("patches") / "catalog.yaml"
    return {row.symbol: row for row in parse(path.read_text(encoding="utf-8"))}


def row_of(symbol: str) -> Row:
    """The row of `symbol`; Glm53Error if the catalog has none."""
    try:
        return rows()[symbol]
    except KeyError:
        raise Glm53Error(
            f"{symbol} is changed by sglang-glm53 but has no row in patches/catalog.yaml; add one"
        ) from None


def broken(row: Row, problem: str) -> Glm53Error:
    """The error for a row that the installed SGLang does not meet."""
    return Glm53Error(
        f"patches/catalog.yaml:{row.line}: {row.symbol}: {problem} in SGLang {sglang_version()} "
        f"(needed to {row.why.split('. ')[0].rstrip('.')}); install a supported SGLang or another "
        f"release of sglang-glm53"
    )


# --- checks ----------------------------------------------------------------------------------


def check_sources(selected: Iterable[Row] | None = None) -> None:
    """Hold rows against the source files of the installed SGLang; nothing is imported.

    Raises:
        Glm53Error: with the line of the first row that does not hold.
    """
    version = sglang_version()
    for row in rows().values() if selected is None else selected:
        if row.kind == "module" or not row.applies(version):
            continue
        problem = source_problem(row)
        if problem is not None:
            raise broken(row, problem)


def source_problem(row: Row) -> str | None:
    """What is wrong with a row according to the module's source file, or None."""
    path = _source_path(row.module)
    if path is None:
        return f"module {row.module} is missing"
    node = _find_definition(_source_of(path), row.path)
    if node is None:
        return "symbol is missing"
    if row.parameters and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _parameter_problem(row, _ast_parameters(node))
    if row.parameters and isinstance(node, ast.ClassDef):
        init = next(
            (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
        )
        # A class without an __init__ of its own is checked when it is loaded.
        return _parameter_problem(row, _ast_parameters(init)) if init is not None else None
    return None


def loaded_problem(row: Row, module: ModuleType) -> str | None:
    """What is wrong with a row according to the loaded module, or None."""
    try:
        value = _resolve(module, row.path)
    except AttributeError:
        return "symbol is missing"
    if not row.parameters:
        return None
    try:
        names = list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return "signature cannot be read"
    return _parameter_problem(row, names)


def _parameter_problem(row: Row, present: Iterable[str]) -> str | None:
    names = list(present)
    gone = [name for name in row.parameters if name not in names]
    return f"parameter {', '.join(gone)} is gone (it takes {', '.join(names)})" if gone else None


@functools.cache
def _source_path(module: str) -> Path | None:
    """The source file of a module, found from the top package's folder without importing it."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    base = Path(next(iter(spec.submodule_search_locations))).joinpath(*rest)
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@functools.lru_cache(maxsize=4)
def _source_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _find_definition(source: str, path: tuple[str, ...]) -> ast.AST | None:
    """The top-level definition (or assignment) that `path` leads to, parsing as little as we can.

    Some of SGLang's files have 6,000 lines, and parsing one takes 0.1 s: only the top-level block
    that holds the name is parsed.
    """
    block = _top_level_block(source, path[0])
    if block is None:
        return None
    try:
        body = ast.parse(block).body
    except SyntaxError:
        body = ast.parse(source).body
    node: ast.AST | None = None
    for depth, name in enumerate(path):
        node = next((n for n in body if name in _names_of(n)), None)
        if node is None:
            return None
        if depth + 1 < len(path):
            if not isinstance(node, ast.ClassDef):
                return None
            body = node.body
    return node


def _names_of(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


@functools.lru_cache(maxsize=4)
def _lines_of(source: str) -> list[str]:
    return source.splitlines(keepends=True)


@functools.lru_cache(maxsize=8)
def _top_level_block(source: str, name: str) -> str | None:
    lines = _lines_of(source)
    heads = (f"def {name}(", f"async def {name}(", f"class {name}(", f"class {name}:")
    start = next(
        (
            i
            for i, text in enumerate(lines)
            if text.startswith(heads)
            or (text.startswith(name) and text[len(name) :].lstrip().startswith(("=", ":")))
        ),
        None,
    )
    if start is None:
        return None
    end = start + 1
    while end < len(lines) and (lines[end][0] in " \t\r\n)]}#" or not lines[end].strip()):
        end += 1
    return "".join(lines[start:end])


def _ast_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    args = node.args
    return [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def _resolve(owner: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        owner = getattr(owner, name)
    return owner


# --- changes ---------------------------------------------------------------------------------

Factory = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrap(symbol: str, factory: Factory) -> None:
    """Replace `symbol` by `factory(original)` as soon as its module has been imported.

    Names that other modules took out of it before (`from module import symbol`) are rebound too.
    Does nothing where the row is for another SGLang version.
    """
    row = row_of(symbol)
    if not row.applies(sglang_version()):
        return

    def apply(module: ModuleType) -> None:
        verify(row, module)
        owner = _resolve(module, row.path[:-1])
        name = row.path[-1]
        static = inspect.getattr_static(owner, name)
        original = getattr(owner, name)
        changed: Any = factory(original)
        functools.update_wrapper(changed, original)
        if isinstance(static, staticmethod):
            changed = staticmethod(changed)
        elif isinstance(static, classmethod):
            raise broken(row, "became a classmethod, which wrap does not handle,")
        setattr(owner, name, changed)
        if owner is module:
            _rebind(name, original, changed)

    when_imported(row.module, apply)


def on_load(symbol: str, action: Callable[[Any], None]) -> None:
    """Call `action(value of symbol)` once its module is imported and its row holds.

    For rows of the kinds "instance" and "item", where nothing is rebound in the module itself.
    """
    row = row_of(symbol)
    if not row.applies(sglang_version()):
        return

    def apply(module: ModuleType) -> None:
        verify(row, module)
        action(_resolve(module, row.path))

    when_imported(row.module, apply)


def verify(row: Row, module: ModuleType) -> None:
    """Raise the row's error unless the loaded module meets it."""
    problem = loaded_problem(row, module)
    if problem is not None:
        raise broken(row, problem)


def _rebind(name: str, original: Any, changed: Any) -> None:
    """Rebind what other SGLang modules imported by name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("sglang.") and module is not None:
            if module.__dict__.get(name) is original:
                setattr(module, name, changed)
