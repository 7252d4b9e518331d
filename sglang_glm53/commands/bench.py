"""`glm53 bench`: ours against SGLang's own class against the bound, on the GPU that is there."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from sglang_glm53.bench.plan import GRAPHS, WORKS, Options
from sglang_glm53.bench.served import SIDES

SLICE = """\
Measure one rank of an 8-GPU GLM-5.3 deployment on one GPU: SGLang's own class ("stock") and this
package's ("ours"), alternately, with the same options, CUDA graphs and simulated routing.

With attention data parallelism 8 and expert parallelism 8, each rank holds the whole attention and
32 of the 256 routed experts. A model with GLM-5.3's dimensions, 78 layers and 32 experts is that
rank's work; in FP8 it takes 107 GiB. What the slice leaves out: communication between the ranks,
and the imbalance of real routing. Weights are random, prompts too; times do not depend on them,
since tokens are dealt to the experts in turn (SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS=1).

Works: decode (one step of the decode graph), mtp (draft and verify through sglang.Engine, with
pinned acceptance), prefill (a long prompt in chunks, on fewer layers). The bound is the bytes that
a step must read over the bandwidth of a large copy, measured in the same run. See
docs/benchmarks.md.
"""
EPILOG = """\
examples:
  glm53 bench slice                                  all works: about 20 minutes on an H200
  glm53 bench slice --work decode --startup 0        the decode step alone: 5 minutes
  glm53 bench slice --layers 20 --work decode        on a GPU of 80 GB; times scale with layers
  glm53 bench slice --only stock --work decode       SGLang's own class alone
  glm53 bench slice --kv-cache-dtype bfloat16 -- --dsa-decode-backend flashmla_sparse

Arguments after `--` go to SGLang, on both sides.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure ours against SGLang's own class on the GPU that is there",
        description="Measure ours against SGLang's own class and against the bound.",
    )
    kinds = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    _add_slice(kinds)
    show = kinds.add_parser(
        "show",
        help="print a report that --json wrote",
        description="Print a report that `glm53 bench slice --json` wrote.",
    )
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument("--profile", action="store_true", help="the kernels of both sides too")
    show.set_defaults(run=run_show)


def _add_slice(kinds: argparse._SubParsersAction) -> None:
    parser = kinds.add_parser(
        "slice",
        help="one rank of an 8-GPU deployment: decode, MTP and prefill",
        description=SLICE,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Options()

    def number(option: str, text: str, *, kind: type = int, metavar: str = "N") -> None:
        value = getattr(default, option.lstrip("-").replace("-", "_"))
        parser.add_argument(
            option, type=kind, default=value, metavar=metavar, help=f"{text} (default: {value})"
        )

    def several(option: str, text: str, choices: tuple[str, ...] | None = None) -> None:
        value = getattr(default, option.lstrip("-").replace("-", "_"))
        parser.add_argument(
            option,
            nargs="+",
            type=str if choices else int,
            choices=choices,
            default=list(value),
            metavar=None if choices else "N",
            help=f"{text} (default: {' '.join(map(str, value))})",
        )

    several("--work", "what to measure", WORKS)
    number("--layers", "decoder layers of the slice; 78 is all of them")
    number("--experts", "routed experts of a layer on this rank: 256 over the number of ranks")
    several("--batch", "requests of a decode step, one measurement each")
    number("--context", "tokens that each request has in the cache")
    number("--steps", "decode steps timed, for the median")
    several("--mtp-batch", "requests with MTP")
    number("--mtp-steps", "drafts of a step")
    number("--mtp-tokens", "tokens that a step verifies")
    number("--accept-length", "tokens that a step yields, pinned", kind=float, metavar="X")
    number("--prefill-tokens", "length of the prompt")
    number("--prefill-chunk", "tokens of one pass")
    number("--prefill-layers", "layers of the slice for the prefill")
    several("--prefill-graph", "prefill CUDA graph: SGLang's default, or none", GRAPHS)
    number("--repeats", "repetitions of an MTP run; a prefill has two more")
    number("--startup", "starts of an Engine a side, for the start-up time; 0 leaves it out")
    number("--rounds", "times each measurement is run a side, in the order S O O S")
    number("--kv-cache-dtype", "SGLang's option", kind=str, metavar="DTYPE")
    parser.add_argument("--only", choices=SIDES, help="measure this side alone")
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of both sides beside each other"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="results, logs and traces (default: in the cache)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    parser.add_argument(
        "--resume", action="store_true", help="take what --out holds of an earlier, equal run"
    )
    parser.add_argument(
        "--timeout", type=float, default=1800, metavar="S", help="for one child (default: 1800)"
    )
    # For the tests of this command: another model, and the CPU, whose times say nothing.
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cuda", "cpu"), help=argparse.SUPPRESS, default="cuda")
    parser.add_argument("sglang_arguments", nargs="*", metavar="-- ARGS", help=argparse.SUPPRESS)
    parser.set_defaults(run=run_slice)


def run_slice(args: argparse.Namespace) -> int:
    from sglang_glm53.bench import slice as bench

    names = Options.__dataclass_fields__
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    options = Options(
        **{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    )
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    began = time.monotonic()

    def say(line: str) -> None:
        stamp = f"[{time.monotonic() - began:5.0f} s] " if line and "\n" not in line else ""
        print(f"{stamp}{line}", flush=True)

    return bench.run(
        options,
        out=(args.out or _default_folder()).expanduser(),
        json_file=args.json.expanduser() if args.json else None,
        profile=args.profile,
        resume=args.resume,
        timeout=args.timeout,
        command_line=shlex.join(["glm53", *sys.argv[1:]]),
        say=say,
        model=args.model,
    )


def run_show(args: argparse.Namespace) -> int:
    from sglang_glm53.bench.report import render, render_kernels
    from sglang_glm53.bench.slice import load_report

    found = load_report(args.file)
    print(render(found))
    if args.profile:
        print(render_kernels(found))
    return 0


def _interrupt(signum: int, frame: object) -> NoReturn:
    # They take the way of Ctrl-C, so that the child's whole group is ended.
    sys.exit(128 + signum)


def _default_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return base / "sglang-glm53" / f"bench-slice-{stamp}"
