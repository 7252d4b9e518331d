"""`glm53 patch`: patches of SGLang's source, for faults that no hook reaches."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from pathlib import Path

from sglang_glm53.errors import Glm53Error
from sglang_glm53.patching import book, tree

DESCRIPTION = """\
Faults of supported SGLang versions that this package cannot reach from outside, cured in SGLang's
source: installed, or a checkout (--tree). A file that is not exactly as the version has it is
refused; reverting gives back every byte. A server that runs keeps what it has loaded.

  glm53 patch list                  which there are, why, and who needs them
  glm53 patch status                which are applied
  glm53 patch apply [NAME ...]      without names: all for this version; --dry-run shows the diff
  glm53 patch revert [NAME ...]
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "patch",
        help="patches of SGLang's source: list, status, apply, revert",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="which there are").set_defaults(run=run_list)
    for name, run in (("status", run_status), ("apply", run_change), ("revert", run_change)):
        action = actions.add_parser(name)
        action.add_argument(
            "--tree", type=Path, metavar="DIR", help="a source tree; default: the installed SGLang"
        )
        if run is run_change:
            action.add_argument("names", nargs="*", metavar="NAME", help="default: all that fit")
            action.add_argument(
                "--dry-run", action="store_true", help="show the diff, write nothing"
            )
        action.set_defaults(run=run)


def run_list(args: argparse.Namespace) -> int:
    for patch in book.load():
        print(f"{patch.name}  (SGLang {', '.join(patch.versions)})")
        for title in ("why", "when", "upstream", "test"):
            text = f"{title:<10}{getattr(patch, title)}"
            print(textwrap.fill(text, 96, initial_indent="  ", subsequent_indent=" " * 12))
        for path in patch.files:
            print(f"  {'file':<10}{path}")
    return 0


def run_status(args: argparse.Namespace) -> int:
    found = tree.find(args.tree)
    print(f"SGLang {found.version or 'of unknown version'} in {found.root}")
    code = 0
    for patch in book.load():
        state = tree.state(patch, found)
        print(f"  {patch.name:<18} {state}")
        for path in tree.drifted(patch, found) if state == tree.DRIFTED else ():
            print(f"  {'':<18} not as SGLang {' or '.join(patch.versions)} has it: {path}")
        if state == tree.PARTLY:
            print(f"  {'':<18} glm53 patch apply or revert {patch.name} completes it")
        code |= state in (tree.DRIFTED, tree.PARTLY)
    return code


def run_change(args: argparse.Namespace) -> int:
    """Apply or revert, all or none."""
    back = args.action == "revert"
    found, patches = tree.find(args.tree), book.load()
    chosen = book.named(args.names, patches) if args.names else patches
    wanted, there = (tree.IN, tree.OUT) if back else (tree.OUT, tree.IN)
    todo = []
    for patch in chosen:
        state = tree.state(patch, found)
        if state in (wanted, tree.PARTLY):
            todo.append(patch)
        elif state == there or (state == tree.OTHER and not args.names):
            print(f"{patch.name}: {state}")
        else:
            raise Glm53Error(_refusal(patch, state, found))
    changes = [change for patch in todo for change in tree.changes(patch, found, back=back)]
    if args.dry_run:
        for change in changes:
            print(_diff(change, found), end="")
    else:
        tree.write(changes)
    for patch in todo:
        would = "would be " if args.dry_run else ""
        print(f"{patch.name}: {would}{'reverted' if back else 'applied'}")
    if todo and not args.dry_run:
        print("start servers again: one that runs keeps what it has loaded")
    return 0


def _refusal(patch: book.Patch, state: str, found: tree.Tree) -> str:
    versions = " or ".join(patch.versions)
    if state == tree.OTHER:
        return f"{patch.name} is for SGLang {versions}; {found.root} has {found.version}"
    files = ", ".join(map(str, tree.drifted(patch, found)))
    return (
        f"{patch.name}: neither as SGLang {versions} has it nor as the patch leaves it: {files}; "
        "nothing was written. Install that SGLang again, or take the change in by hand"
    )


def _diff(change: tree.Change, found: tree.Tree) -> str:
    name = change.path.relative_to(found.root)
    old, new = (
        text.decode("utf-8", "replace").splitlines(keepends=True)
        for text in (change.path.read_bytes(), change.content)
    )
    return "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"))
