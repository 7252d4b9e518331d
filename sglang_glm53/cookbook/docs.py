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
from sglang_glm53.cookbook.recipe import Recipe, common_accepts, common_why, load, names
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
- **Verified** says which deployment this project ran, and where; **a part of it was run** names the
  part. Everything else was **not run here**: SGLang's own code parses and resolves its flags, and
  no more is known of it.
- **Source** is where flags were published, **not as there** what a recipe has otherwise, and why.
  The spelling is what SGLang takes today. --max-running-requests and --cuda-graph-max-bs-decode
  are often this project's own, to fit the cache; the reason stands beside them.
- **Needs** names packages besides SGLang. A router is one of them (`sglang-router`).
- **Published** figures are other people's, on their machines.

`$NODE0`, `$PREFILL` and `$DECODE` stand for addresses: set them in the shell, or give
`--address NODE0=10.0.0.1`. Several machines: `glm53 recipe show NAME --script --role ROLE --node N`
prints the command of one of them.

## Before it is in production

- **Ready**: `/health` answers 200 once the server takes requests, `/health_generate` once it has
  answered one. `glm53 status http://HOST:30000` says which class serves, and the accept length.
- **Closed**: the recipes listen on all addresses. Add `--api-key KEY` (`--admin-api-key` for the
  calls that change the server), or keep the port behind a gateway. Between machines, keep the ports
  of the ranks and of the cache's transfer inside.
- **Named**: `--served-model-name NAME` is what clients send as `model`; without it, the path.
- **Watched**: `--enable-metrics` gives Prometheus' `/metrics`. Alert on an accept length below 1.4
  after 128 tokens (the draft reads something wrong) and on an accept rate above 0.96 (an answer
  that repeats itself): Z.ai's report on GLM-5 in production took these as signs of a broken cache.
  Neither was measured here; a template answer passes 0.96 honestly.
- **As large as told**: compare `max_total_num_tokens` in the start's log with what
  `glm53 recipe show` says. Less by a tenth or more: another process has memory of the GPU, or the
  estimate is wrong there.
- **On several machines**: name the network with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (the
  interface's name, on each machine), or ranks may wait on one that does not reach the others.
- **Back again**: GLM53_SERVE=stock in the server's environment takes SGLang's own class at the next
  start; `pip uninstall sglang-glm53` takes the package away. Flags and checkpoint stay as they are.

## All of them
"""


def build(version: str) -> str:
    """The document's text, with commands in the spelling of `version`."""
    recipes = [load(name) for name in names()]
    shared = "\n".join(["## Flags that mean the same everywhere", *_why(common_why(), without={})])
    lived = [f"- `{rule}`: {why}." for rule, why in common_accepts().items()]
    warnings = "\n".join(["## Warnings of `glm53 doctor` that all live with", "", *lived])
    parts = [HEAD, _overview(recipes, version), shared + "\n", warnings + "\n"]
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
            show.run_here(recipe),
        )
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
            if found.exact:
                lines.append(f"  `{show.ledger_command(found)}`")
            else:
                lines.append("  `glm53 ledger` itself has no context parallelism.")
    lines += [f"- **Verified**: {line}." for line in show.verified(recipe)]
    lines += [f"- **A part of it was run**: {line}." for line in show.parts(recipe)]
    lines += [f"- **Needs** `{package}`: {why}." for package, why in recipe.needs.items()]
    lines += [f"- **Published**: {row.figure} ({row.source})." for row in recipe.published]
    lines += [f"- **Source**: {source}." for source in recipe.sources]
    lines += [f"- **Not as there**: {line}." for line in recipe.differs]
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
