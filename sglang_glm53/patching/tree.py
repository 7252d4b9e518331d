"""A tree of SGLang's source, and what state a patch is in there.

A file counts as known only by its SHA-256: as the version has it, or as the patch leaves it. Any
other content is left alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sglang_glm53.errors import Glm53Error
from sglang_glm53.patching import unified
from sglang_glm53.patching.book import Patch

OUT, IN, DRIFTED, OTHER = "not applied", "applied", "drifted", "not for this version"
PARTLY = "applied to some files only"  # a command was killed between two files


@dataclass(frozen=True)
class Tree:
    """Where `sglang/` lies (its parent), and its version; None: it cannot be told."""

    root: Path
    version: str | None


@dataclass(frozen=True)
class Change:
    """One file to write."""

    path: Path
    content: bytes


def find(folder: Path | None) -> Tree:
    """The tree below a folder: a checkout of SGLang, its `python/`, or an environment's
    site-packages; without a folder the installed package. SGLang is not imported.

    Raises:
        Glm53Error: no SGLang is there.
    """
    if folder is None:
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise Glm53Error("SGLang is not installed here; name a source tree with --tree DIR")
        root = Path(spec.submodule_search_locations[0]).parent
        return Tree(root, _version(root))
    there = folder.resolve()  # "." has neither a name nor a parent
    for root in (there, there / "python", *((there.parent,) if there.name == "sglang" else ())):
        if (root / "sglang" / "srt").is_dir():
            return Tree(root, _version(root))
    raise Glm53Error(f"{folder} holds no SGLang (sglang/srt or python/sglang/srt); name its folder")


def _version(root: Path) -> str | None:
    """By the generated file of a release, or by the metadata beside the package."""
    try:
        found = re.search(
            r"__version__ = .*?'([\w.+]+)'",
            (root / "sglang/_version.py").read_text(encoding="utf-8", errors="replace"),
        )
    except OSError:
        found = None
    if found:
        return found[1].split("+")[0]
    metadata = sorted(root.glob("sglang-*.dist-info"))
    return metadata[0].name.split("-")[1].removesuffix(".dist") if metadata else None


def state(patch: Patch, tree: Tree) -> str:
    """OUT, IN, PARTLY (each file is one of them), DRIFTED (a file is neither as the version has it
    nor as the patch leaves it) or OTHER."""
    states = {_file_state(patch, tree, path) for path in patch.files}
    if states == {OUT} or states == {IN}:
        return states.pop()
    if tree.version is not None and tree.version not in patch.versions:
        return OTHER
    if states == {OUT, IN}:
        return PARTLY
    return DRIFTED


def drifted(patch: Patch, tree: Tree) -> list[Path]:
    """Files that are not as the version has them."""
    return [tree.root / path for path in patch.files if _file_state(patch, tree, path) == DRIFTED]


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _file_state(patch: Patch, tree: Tree, path: str) -> str:
    content = _read(tree.root / path)
    if content is None:
        return DRIFTED
    if _sha(content) == patch.files[path]:
        return OUT
    before = unified.apply(content, unified.reverse(patch.hunks[path]))
    return IN if before is not None and _sha(before) == patch.files[path] else DRIFTED


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def changes(patch: Patch, tree: Tree, *, back: bool) -> list[Change]:
    """What applying (`back`: reverting) writes; the state must be OUT (IN) or PARTLY.

    Raises:
        Glm53Error: the diff does not fit the file that its row is for (a broken install).
    """
    result = []
    for path, hunks in patch.hunks.items():
        if _file_state(patch, tree, path) == (OUT if back else IN):
            continue
        content = (tree.root / path).read_bytes()
        new = unified.apply(content, unified.reverse(hunks) if back else hunks)
        if new is None:
            raise Glm53Error(f"{patch.path} does not fit {tree.root / path}; reinstall")
        result.append(Change(tree.root / path, new))
    return result


def write(all_: Iterable[Change]) -> None:
    """Write files, all or none, each in place of the old one: hard links of a package manager's
    cache keep theirs.

    Raises:
        OSError: one could not be written; those before it are put back.
    """
    written: list[tuple[Path, bytes]] = []
    try:
        for change in all_:
            old = change.path.read_bytes()
            _replace(change.path, change.content)
            written.append((change.path, old))
    except BaseException:
        for path, old in reversed(written):
            _replace(path, old)
        raise


def _replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, path.stat().st_mode & 0o7777)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
