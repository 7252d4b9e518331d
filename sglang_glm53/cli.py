"""The `glm53` command. Nothing heavy is imported before a subcommand needs it."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from sglang_glm53 import __version__
from sglang_glm53.commands import (
    bench,
    check,
    demo,
    doctor,
    ledger,
    patch,
    recipe,
    status,
    tiny,
    trace,
)
from sglang_glm53.errors import Glm53Error, describe

COMMANDS = (demo, status, doctor, check, patch, recipe, tiny, bench, ledger, trace)

DESCRIPTION = """\
GLM-5.3 in SGLang, served by this package's own model code.

  glm53 demo                        serve a miniature GLM-5.3 here, on a CPU too, and talk to it
  glm53 status http://HOST:PORT     which classes serve on a running server
  glm53 doctor -- SGLANG ARGS       what would go wrong, before a weight is loaded
  glm53 check DIR                   whether a checkpoint is whole, from its files' headers
  glm53 patch                       patches of SGLang's source: list, status, apply, revert
  glm53 recipe                      launch commands for a deployment: list, show, check, run
  glm53 tiny DIR                    write a tiny checkpoint with random weights
  glm53 bench slice                 ours against SGLang's class: one rank of 8 GPUs on one GPU
  glm53 ledger                      what a topology stores, reads, computes and sends
  glm53 trace                       the same of real forward passes, beside the ledger

To serve a checkpoint, use SGLang's own command; installing this package is all it takes:
  sglang serve --model-path DIR
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit code 1, as all errors of ours are."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += " (arguments for SGLang come after `--`)"
        self.exit(1, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="glm53",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sglang-glm53 {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a letter gets a "?"
            stream.reconfigure(errors="replace")
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except Glm53Error as error:
        print(f"glm53 {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"glm53 {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output is gone (`glm53 status URL | head -1`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"glm53 {args.command}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        package = {"yaml": "PyYAML"}.get(error.name or "", error.name)
        print(
            f"glm53 {args.command}: this Python has no {package}; run it in SGLang's environment, "
            f"or pip install {package}",
            file=sys.stderr,
        )
        return 1
    except Exception as error:
        print(
            f"glm53 {args.command}: {describe(error)}; report this "
            "(GLM53_DEBUG=1 shows the traceback)",
            file=sys.stderr,
        )
        if os.environ.get("GLM53_DEBUG") == "1":
            traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
