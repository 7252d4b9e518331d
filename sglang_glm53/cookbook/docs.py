"""Makes docs/recipes.md from recipes/*.yaml: `python -m sglang_glm53.cookbook.docs`.

With --resolve it first asks SGLang what it makes of every recipe, and keeps that in resolved.json:
the installed version, and each that was unpacked into a folder (--wheel DIR).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_glm53.compat.flags import newest
from sglang_glm53.cookbook import check, resolved, show
from sglang_glm53.cookbook.expect import Expected
from sglang_glm53.cookbook.recipe import Recipe, common_why, load, names
from sglang_glm53.cookbook.resolve import resolve_all
from sglang_glm53.cookbook.wheel import version_in
from sglang_glm53.errors import Glm53Error

TARGET = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"

HEAD = """\
# Recipes

<!-- Made by `python -m sglang_glm53.cookbook.docs` from recipes/*.yaml: edit those. -->

Launch commands for GLM-5.3, each held against SGLang's own argument parser and resolution
(`glm53 recipe check`), for the versions that this package supports. A recipe is one YAML in
`recipes/`; `glm53 recipe show NAME` prints the command in the spelling of the installed SGLang, and
`glm53 recipe run NAME` starts it.

- **Serves**: the class that serves there, with what ours runs or why it stands down, decided by the
  table of [features](compatibility.md#features) on the arguments as SGLang resolves them on that
  hardware.
- **What fits** is computed by the [ledger](ledger.md) from the resolved arguments: tokens of an
  attention group's cache beside the weights. The start of the server says the exact number
  (`max_total_num_tokens`).
- **Verified** says what this project ran, and where. Everything else was **not run here**: its
  flags are those of the sources, in the spelling that SGLang takes today, and SGLang's own code
  parses and resolves them.
- **Published** figures are other people's, on their machines.

`$NODE0`, `$PREFILL` and `$DECODE` stand for addresses: set them in the shell, or give
`--address NODE0=10.0.0.1`.
"""


def build(version: str) -> str:
    """The document's text, with commands in the spelling of `version`."""
    recipes = [load(name) for name in names()]
    shared = "\n".join(["## Flags that mean the same everywhere", *_why(common_why(), without={})])
    parts = [HEAD, _overview(recipes, version), shared + "\n"]
    parts += [_section(recipe, version) for recipe in recipes]
    return "\n".join(parts)


def _overview(recipes: Sequence[Recipe], version: str) -> str:
    rows = [
        "| recipe | for | hardware | serves | cache, tokens | requests of 9,216 / 131,072 tokens "
        "| run here |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe in recipes:
        tokens, fits, classes = [], [], []
        for server in recipe.servers:
            told = resolved.find(recipe, server.role, version)
            classes.append(told.serves if told else "–")
            found = show.memory(recipe, server, version)
            if isinstance(found, Expected):
                groups = f"{found.groups} × " if found.groups > 1 else ""
                tokens.append(f"{groups}{found.tokens:,}")
                fits.append(f"{found.fits[9_216]} / {found.fits[131_072]}")
        cells = (
            f"[{recipe.name}](#{recipe.name})",
            recipe.summary,
            show.hardware(recipe),
            ", ".join(dict.fromkeys(classes)),
            "; ".join(tokens) or "–",
            "; ".join(fits) or "–",
            "in part" if recipe.verified and recipe.name != "laptop" else "yes" if
            recipe.verified else "no",
        )  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _section(recipe: Recipe, version: str) -> str:
    lines = [f"## {recipe.name}", f"{recipe.summary[0].upper()}{recipe.summary[1:]}.", ""]
    lines += ["```bash", show.script(recipe, version), "```", ""]
    for server in recipe.servers:
        of = f" ({server.role})" if len(recipe.servers) > 1 else ""
        lines.append(f"- **Serves{of}**: {show.serves(recipe, server, version)}.")
        for other in recipe.sglang:
            also = show.also_stands_down(recipe, server, version, other)
            if also:
                lines.append(f"  With SGLang {other} also: {also}.")
        found = show.memory(recipe, server, version)
        if isinstance(found, str):
            lines.append(f"- **What fits{of}**: {found}.")
        else:
            lines.append(f"- **What fits{of}**: " + "; ".join(show.memory_lines(found)[:3]) + ".")
            lines.append(f"  `glm53 ledger {show.ledger_arguments(found)}`")
    lines += [f"- **Verified**: {line}." for line in show.verified(recipe)]
    lines += [f"- **Published**: {row.figure} ({row.source})." for row in recipe.published]
    lines += [f"- **Source**: {source}." for source in recipe.sources]
    lines += [f"- {note}" for note in recipe.notes]
    for rule, why in recipe.accepts.items():
        lines.append(f"- The warning `{rule}` of `glm53 doctor` is lived with: {why}.")
    for name, added in recipe.options.items():
        words = " ".join(f"--{flag} {value}" for flag, value in added.items())
        lines.append(f"- Option `--with {name}`: `{words}`.")
    own = {flag: recipe.why[flag] for flag in show.flags(recipe)}
    return "\n".join([*lines, *_why(own, without=common_why())]) + "\n"


def _why(reasons: Mapping[str, str], without: Mapping[str, str]) -> list[str]:
    """A table of reasons; those that all recipes share are told once."""
    rows = [
        f"| `{flag if flag.isupper() else '--' + flag}` | {text.replace('|', chr(92) + '|')} |"
        for flag, text in reasons.items()
        if without.get(flag) != text
    ]
    return ["", "| flag | why |", "|---|---|", *rows] if rows else []


def resolve(wheels: Sequence[Path]) -> str:
    """The content of resolved.json, by the installed SGLang and by unpacked wheels."""
    entries = {}
    for folder in (None, *wheels):
        version = version_in(folder)
        found = check.cases([load(name) for name in names()], options=False)
        wanted = [case for case in found if version in case.recipe.sglang]
        answers = resolve_all([check.job(case, version) for case in wanted], sglang=folder)
        for case, answer in zip(wanted, answers, strict=True):
            if answer.problem:
                raise Glm53Error(f"{case.title}: SGLang {version} refuses it: {answer.problem}")
            entries[case.recipe.name, case.server.role, version] = resolved.of(answer)
    return resolved.text(entries)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_glm53.cookbook.docs")
    parser.add_argument("--resolve", action="store_true", help="ask SGLang first")
    parser.add_argument(
        "--wheel",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with an unpacked wheel of another supported SGLang",
    )
    args = parser.parse_args(argv)
    try:
        if args.resolve:
            resolved.FILE.write_text(resolve(args.wheel), encoding="utf-8")
            resolved.forget()
        TARGET.write_text(build(newest()), encoding="utf-8")
    except Glm53Error as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
