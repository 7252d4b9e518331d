"""The patches that this package ships: rows of patches/patches.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sglang_glm53.errors import Glm53Error
from sglang_glm53.patching import unified
from sglang_glm53.resources import data_folder

BOOK = "patches.yaml"
_FIELDS = ("name", "versions", "patch", "files", "why", "when", "upstream", "test")


@dataclass(frozen=True)
class Patch:
    """One row.

    Attributes:
        versions: SGLang versions that it is for.
        path: of the diff.
        files: SHA-256 (hexadecimal) of each file before, by its path from the folder that holds
            `sglang/`.
        why, when, upstream, test: see patches/patches.yaml.
    """

    name: str
    versions: tuple[str, ...]
    path: Path
    files: Mapping[str, str]
    why: str
    when: str
    upstream: str
    test: str

    @cached_property
    def hunks(self) -> dict[str, tuple[unified.Hunk, ...]]:
        """Hunks of each file.

        Raises:
            Glm53Error: the diff is no diff, or of other files than the row says.
        """
        try:
            hunks = unified.parse(self.path.read_bytes())
        except ValueError as error:
            raise Glm53Error(f"{self.path}: {error}; reinstall sglang-glm53") from None
        if set(hunks) != set(self.files):
            raise Glm53Error(f"{self.path} is of other files than {BOOK} says; reinstall")
        return hunks


def load(folder: Path | None = None) -> tuple[Patch, ...]:
    """All patches, in their order.

    Raises:
        Glm53Error: a row lacks a field or has an unknown one, or a name stands in two rows.
    """
    import yaml

    folder = folder or data_folder("patches")
    rows = yaml.safe_load((folder / BOOK).read_text(encoding="utf-8"))
    patches = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or set(row) != set(_FIELDS):
            raise Glm53Error(f"{folder / BOOK}: row {number + 1} must have: {', '.join(_FIELDS)}")
        patches.append(
            Patch(
                name=row["name"],
                versions=tuple(row["versions"]),
                path=folder / row["patch"],
                files=row["files"],
                **{name: " ".join(row[name].split()) for name in _FIELDS[4:]},
            )
        )
    names = [patch.name for patch in patches]
    if len(set(names)) != len(names):
        raise Glm53Error(f"{folder / BOOK}: a name stands in two rows")
    return tuple(patches)


def named(names: Sequence[str], patches: tuple[Patch, ...]) -> tuple[Patch, ...]:
    """The patches of these names.

    Raises:
        Glm53Error: there is none of a name.
    """
    known = {patch.name: patch for patch in patches}
    for name in names:
        if name not in known:
            raise Glm53Error(f"there is no patch {name!r}; there are: {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))
