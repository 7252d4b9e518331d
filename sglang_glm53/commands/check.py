"""`glm53 check DIR`: whether a checkpoint is whole, from the headers of its files."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_glm53.errors import Glm53Error

if TYPE_CHECKING:
    from sglang_glm53.checks import headers

DESCRIPTION = """\
Read config.json and the header of every safetensors file, and hold them against GLM-5.3: every
tensor there, once, with its shape and scale; indexers on full layers alone; the MTP layer; the
index; quantization_config. What is found is named with file and tensor. No weight is read: seconds
for a checkpoint of 750 GB. Exit code 1 where a rule fails.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "check",
        help="whether a checkpoint is whole, from its files' headers",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the checkpoint's folder")
    parser.add_argument(
        "--most",
        type=int,
        default=8,
        metavar="N",
        help="lines of what a rule found (default 8)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from sglang_glm53.checks import engine, headers, report
    from sglang_glm53.checks.facts import Facts
    from sglang_glm53.checks.rule import FAIL
    from sglang_glm53.checks.rules import CHECKPOINT

    if not args.folder.is_dir():
        raise Glm53Error(f"{args.folder} is no folder; give a checkpoint's folder")
    began = time.monotonic()
    facts = Facts(checkpoint=args.folder, headers=headers.scan(args.folder, _progress()))
    if facts.raw_config is None:
        raise Glm53Error(f"{args.folder} has no config.json; give a checkpoint's folder")
    if facts.headers is None:
        raise Glm53Error(f"{args.folder} has no safetensors files; download the checkpoint there")
    results = engine.judge(CHECKPOINT, facts)
    took = time.monotonic() - began
    tensors = f"{len(facts.headers.tensors):,} tensors in {args.folder}, in {took:.1f} s"
    if args.json:
        print(json.dumps(report.as_json(results, facts, [tensors]), indent=2))
    else:
        print(report.table(results, facts, [tensors], all_=True, most=args.most))
    return 1 if any(result.status == FAIL for result in results) else 0


def _progress() -> headers.Progress | None:
    """A line that counts files, on a terminal."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, all_: int) -> None:
        end = "\r" if done < all_ else "\r\033[K"
        print(f"reading headers: file {done} of {all_}", end=end, file=sys.stderr, flush=True)

    return show
