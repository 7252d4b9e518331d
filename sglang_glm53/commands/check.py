"""`glm53 check DIR`: whether a checkpoint is whole, from the headers of its files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sglang_glm53.errors import Glm53Error

DESCRIPTION = """\
Read config.json and the header of every safetensors file, and hold them against GLM-5.3: every
tensor there, once, with its shape and scale; indexers on full layers alone; the MTP layer. No
weight is read: seconds for a checkpoint of 700 GB. Exit code 1 where a rule fails.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "check",
        help="whether a checkpoint is whole, from its files' headers",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the checkpoint's folder")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from sglang_glm53.checks import engine, report
    from sglang_glm53.checks.facts import Facts
    from sglang_glm53.checks.rule import FAIL
    from sglang_glm53.checks.rules import CHECKPOINT

    if not args.folder.is_dir():
        raise Glm53Error(f"{args.folder} is no folder; give a checkpoint's folder")
    facts = Facts(checkpoint=args.folder)
    if facts.raw_config is None:
        raise Glm53Error(f"{args.folder} has no config.json; give a checkpoint's folder")
    if facts.headers is None:
        raise Glm53Error(f"{args.folder} has no safetensors files; download the checkpoint there")
    results = engine.judge(CHECKPOINT, facts)
    tensors = f"{len(facts.headers.tensors):,} tensors in {args.folder}"
    if args.json:
        print(json.dumps(report.as_json(results, facts, [tensors]), indent=2))
    else:
        print(report.table(results, facts, [tensors], all_=True))
    return 1 if any(result.status == FAIL for result in results) else 0
