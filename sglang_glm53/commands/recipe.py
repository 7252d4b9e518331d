"""`glm53 recipe`: the cookbook. What is told of a recipe is held against SGLang by `check`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from sglang_glm53.compat.flags import newest
from sglang_glm53.compat.versions import SUPPORTED, sglang_version
from sglang_glm53.errors import Glm53Error

DESCRIPTION = """\
Launch recipes for GLM-5.3: what to run, why each flag is there, what fits, what was verified.
"""
EPILOG = """\
examples:
  glm53 recipe list
  glm53 recipe show h200-latency               its command, and all there is to say of it
  glm53 recipe show h200-pd-nixl --script --role router \\
      --address PREFILL=10.0.0.1 --address DECODE=10.0.0.2
  glm53 recipe check                           every recipe against SGLang's parser and the rules;
                                               about a minute
  glm53 recipe run laptop --with mtp           serve the miniature here
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "recipe",
        help="launch recipes: list, show, check against SGLang's own parser, run",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=_splitting(type(parser))
    )

    listing = actions.add_parser("list", help="names, hardware, and what fits")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(run=run_list)

    show = actions.add_parser("show", help="the command, and all there is to say")
    show.add_argument("name", metavar="NAME", help="a recipe, or a YAML file")
    show.add_argument("--script", action="store_true", help="the command alone, for a shell")
    show.add_argument(
        "--sglang", metavar="VERSION", choices=SUPPORTED, help="default: the installed one"
    )
    _add_machine(show)
    _add_choices(show)
    show.set_defaults(run=run_show)

    check = actions.add_parser(
        "check",
        help="hold recipes against SGLang's parser and the rules",
        description="Hold recipes against SGLang's own parser and resolution, and the doctor's "
        "rules; all of them take about a minute, one some twenty seconds.",
    )
    check.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    check.add_argument(
        "--sglang",
        type=Path,
        metavar="DIR",
        help="a folder with an unpacked wheel of SGLang (default: the installed one)",
    )
    check.add_argument("--json", action="store_true", help="as JSON")
    check.set_defaults(run=run_check)

    run = actions.add_parser(
        "run",
        help="start a recipe's server here",
        epilog="Arguments after `--` go to `sglang serve`, after the recipe's own.",
    )
    run.add_argument("name", metavar="NAME", help="a recipe, or a YAML file")
    _add_machine(run)
    _add_choices(run)
    run.set_defaults(run=run_run)


def _splitting(base: type[argparse.ArgumentParser]) -> type[argparse.ArgumentParser]:
    """A parser that leaves what follows `--` alone and keeps it as `after`: argparse would want it
    beside the other words without dashes."""

    class Splitting(base):  # type: ignore[misc, valid-type]
        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            words = list(args or ())
            end = words.index("--") if "--" in words else len(words)
            parsed, unknown = super().parse_known_args(words[:end], namespace)
            parsed.after = words[end + 1 :]
            return parsed, unknown

    return Splitting


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--role", metavar="ROLE", help="of several servers: prefill, decode, router"
    )
    parser.add_argument("--node", type=int, metavar="N", help="of several machines, from 0")


def _add_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--with",
        dest="options",
        action="append",
        default=[],
        metavar="OPTION",
        help="add a recipe's option, of those that `glm53 recipe show NAME` lists",
    )
    parser.add_argument("--model", metavar="PATH", help="the checkpoint (default: the recipe's)")
    parser.add_argument(
        "--address",
        action="append",
        default=[],
        metavar="NAME=HOST",
        help="of a machine: NODE0, PREFILL, DECODE",
    )


def run_list(args: argparse.Namespace) -> int:
    from sglang_glm53.cookbook import recipe as cookbook
    from sglang_glm53.cookbook import show

    recipes = [cookbook.load(name) for name in cookbook.names()]
    if args.json:
        rows = [
            {"name": each.name, "summary": each.summary, "model": each.model,
             "hardware": show.hardware(each), "serves": show.classes(each, _told_version()),
             "verified": bool(each.verified), "parts": bool(each.parts)}
            for each in recipes
        ]  # fmt: skip
        print(json.dumps(rows, indent=1))
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(show.table(recipes, _told_version(), width)))
    return 0


def run_show(args: argparse.Namespace) -> int:
    from sglang_glm53.cookbook import show

    recipe = _recipe(args)
    version = args.sglang or _installed()
    if version not in recipe.sglang:
        raise Glm53Error(
            f"recipe {recipe.name} is for SGLang {' and '.join(recipe.sglang)}, not {version}; "
            "name one with --sglang"
        )
    chosen: dict[str, Any] = {"model": args.model, "addresses": _addresses(args.address, recipe)}
    if args.script:
        print(show.script_of(recipe, version, args.role, args.node, **chosen))
    elif args.role is not None or args.node is not None:
        raise Glm53Error("--role and --node are for --script: without it all machines are shown")
    else:
        print(show.text(recipe, version, **chosen))
    return 0


def run_check(args: argparse.Namespace) -> int:
    from sglang_glm53.cookbook import check
    from sglang_glm53.cookbook import recipe as cookbook
    from sglang_glm53.cookbook.wheel import version_in

    recipes = [cookbook.load(name) for name in args.names or cookbook.names()]
    version = version_in(args.sglang)
    cases = check.cases(recipes)
    if not args.json and sys.stderr.isatty():
        took = "about a minute for all recipes" if not args.names else "some twenty seconds"
        print(f"asking SGLang {version}, {took} ...", file=sys.stderr)
    findings = check.check(cases, version, args.sglang)
    if args.json:
        rows = [
            {"recipe": each.case.title, "sglang": version, "status": each.status,
             "lines": list(each.lines), "says": list(each.says), "notes": list(each.notes)}
            for each in findings
        ]  # fmt: skip
        print(json.dumps(rows, indent=1))
    else:
        _print(findings, len(cases) - len(findings), version)
    return 1 if any(each.status == check.FAIL for each in findings) else 0


def _print(findings: list[Any], skipped: int, version: str) -> None:
    width = max([len(each.case.title) for each in findings], default=0)
    for each in findings:
        print(f"{each.status:<5} {each.case.title:<{width}}".rstrip())
        for line in (*each.lines, *each.says):
            print(f"      {line}")
    counts = {status: sum(each.status == status for each in findings) for status in
              ("ok", "warn", "fail")}  # fmt: skip
    notes: dict[str, list[str]] = {}
    for each in findings:
        for line in each.notes:
            notes.setdefault(line, []).append(each.case.recipe.name)
    for line, names in notes.items():
        print(f"note  {line} ({', '.join(dict.fromkeys(names))})")
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"SGLang {version}: {said}" + (f", {skipped} not for it" if skipped else ""))


def run_run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from sglang_glm53.commands import recipe_server
    from sglang_glm53.commands.demo import CPU_ENVIRONMENT
    from sglang_glm53.commands.server_process import sglang_command
    from sglang_glm53.compat import require_supported
    from sglang_glm53.cookbook import show
    from sglang_glm53.cookbook.command import choose

    recipe = _recipe(args)
    addresses = _addresses(args.address, recipe)
    # Whether there is such a role and machine, before anything is asked of this one.
    command = choose(
        recipe, show.commands(recipe, newest(), addresses=addresses), args.role, args.node
    )
    server = command.server
    if server is None:
        program: list[str] = [sys.executable, *command.program[1:]]
    else:
        program = [*sglang_command(), "serve"]
        recipe_server.require_hardware(recipe, server)
        found = show.commands(
            recipe,
            require_supported(),
            model=recipe_server.checkpoint(recipe, args.model),
            addresses=addresses,
        )
        command = choose(recipe, found, args.role, args.node)
        if server.hardware.gpu == "cpu":
            command = replace(command, environment={**CPU_ENVIRONMENT, **command.environment})
    command = replace(command, argv=(*command.argv, *args.after))
    for word in command.argv:
        if "${" in word:
            name = word.partition("${")[2].partition(":")[0]
            raise Glm53Error(f"recipe {recipe.name} needs an address: --address {name}=HOST")
    if server is None:
        recipe_server.require_router()
    print(command.shell(), file=sys.stderr)
    return recipe_server.run(command, program)


def _recipe(args: argparse.Namespace) -> Any:
    from sglang_glm53.cookbook import recipe

    return recipe.load(args.name).with_options(tuple(args.options))


def _installed() -> str:
    """The installed version; the newest supported one where none is installed."""
    version = sglang_version()
    if version is None:
        return newest()
    if version not in SUPPORTED:
        raise Glm53Error(
            f"SGLang {version} is installed, for which there are no recipes; name one with "
            f"--sglang: {', '.join(SUPPORTED)}"
        )
    return version


def _told_version() -> str:
    """The version that `list` tells of: the installed one where recipes are for it."""
    version = sglang_version()
    return version if version in SUPPORTED else newest()


def _addresses(given: list[str], recipe: Any) -> dict[str, str]:
    from sglang_glm53.cookbook.command import placeholders

    there = placeholders(recipe)
    result = {}
    for each in given:
        name, equals, host = each.partition("=")
        if not equals or not name or not host or any(c.isspace() for c in host):
            raise Glm53Error(f"--address {each!r}: write NAME=HOST, as in NODE0=10.0.0.1")
        if name.upper() not in there:
            raise Glm53Error(
                f"--address {each!r}: recipe {recipe.name} asks for "
                f"{', '.join(there) or 'no address'}"
            )
        result[name.upper()] = host
    return result
