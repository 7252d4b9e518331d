"""`glm53 doctor`: what would go wrong, before a weight is loaded."""

from __future__ import annotations

import argparse
import json

DESCRIPTION = """\
Hold versions, plugins, a checkpoint's config and a server's command line against rules, each of
which comes from something that went wrong for somebody. No weight is read and no GPU is touched.
Without arguments for SGLang it takes a second; with them SGLang's own parser resolves them first
(10 to 20 s). docs/troubleshooting.md has every rule with its symptom, cause and source.
"""
EPILOG = """\
examples:
  glm53 doctor                                      this environment and this machine
  glm53 doctor --model DIR                          and a checkpoint's config and tokenizer
  glm53 doctor -- --model-path DIR --tp-size 8      and the command line of a server
  glm53 doctor --gpu h200 -- sglang serve --model-path zai-org/GLM-5.3 --tp-size 8
  glm53 doctor --json | jq '.results[] | select(.status == "fail")'

Exit code: 1 where a rule fails, 0 otherwise.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what would go wrong with this environment, checkpoint and command line",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", metavar="DIR", help="a checkpoint's folder, or a repository's name"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="judge for this GPU (h200, b200, ...), not this machine's"
    )
    parser.add_argument(
        "--gpus", type=int, default=8, metavar="N", help="GPUs of a machine of it (default: 8)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="take options as written; do not ask SGLang's parser"
    )
    parser.add_argument(
        "--all", action="store_true", help="name the rules that passed, too (--json always does)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument(
        "sglang", nargs=argparse.REMAINDER, metavar="-- SGLANG ARGS", help="a server's command line"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from sglang_glm53.checks import engine, once, report
    from sglang_glm53.checks.gather import Question, gather, pasted
    from sglang_glm53.checks.rule import FAIL
    from sglang_glm53.checks.rules import RULES

    argv, variables = pasted(args.sglang)
    facts, notes = gather(
        Question(
            model=args.model,
            argv=argv,
            variables=variables,
            gpu=args.gpu,
            count=args.gpus,
            ask_sglang=not args.quick,
        )
    )
    results = once.without_repeats(engine.judge(RULES, facts), facts)
    if args.json:
        print(json.dumps(report.as_json(results, facts, notes), indent=2))
    else:
        here = args.gpu is None
        print(report.table(results, facts, notes, all_=args.all, here=here))
    return 1 if any(result.status == FAIL for result in results) else 0
