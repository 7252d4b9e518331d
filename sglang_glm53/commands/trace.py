"""`glm53 trace`: real forward passes beside the ledger's rows."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_glm53.bench.slice import check_writable
from sglang_glm53.commands.ledger import parse_mtp, read_model
from sglang_glm53.ending import end_as_by_ctrl_c
from sglang_glm53.errors import Glm53Error

DESCRIPTION = """\
Runs prefill, decode and (with --mtp) the steps of speculation on real ranks, records every
collective and every matrix product of our modules with torch's own hooks, and prints them beside
what the ledger counts. Exit code 0: all rows are equal; 1: some differ.
"""
EPILOG = """\
examples:
  glm53 trace                                  the miniature, one process on the CPU
  glm53 trace tp=2                             two processes
  glm53 trace tp=2,dp=2 --mtp 3-1-4            attention data parallelism and MTP
  glm53 trace tp=1 --model DIR --device cuda   a checkpoint, or a rank slice, on a GPU

Topologies are written as for `glm53 ledger`. Arguments after `--` go to SGLang.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "trace",
        help="what a forward pass really ran, beside the ledger",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("topology", nargs="?", default="tp=1", metavar="TOPOLOGY")
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the tiny checkpoint")
    parser.add_argument("--mtp", metavar="S-1-T", help="draft steps and verified tokens: 3-1-4")
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=int,
        default=[40, 200],
        metavar="N",
        help="tokens of each prompt; asked alone, then all at once (default: 40 200)",
    )
    parser.add_argument(
        "--new-tokens", type=int, default=6, metavar="N", help="generated for each (default: 6)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="for all of it (default: 600)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep recordings and SGLang's log")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="as JSON, to FILE or the terminal"
    )
    parser.add_argument("sglang_arguments", nargs="*", metavar="-- ARGS", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    steps, tokens = parse_mtp(args.mtp)
    if min(args.prompts) < 1 or args.new_tokens < 2:
        raise Glm53Error("give prompts of 1 token or more, and --new-tokens of 2 or more")
    if not 0 < args.timeout < float("inf"):
        raise Glm53Error(f"--timeout {args.timeout:g}: give seconds, more than 0")
    if args.device == "cuda" and not _has_gpu():
        raise Glm53Error("--device cuda: PyTorch sees no GPU here; leave it out to run on the CPU")
    if args.json and args.json != "-":
        check_writable(Path(args.json))  # before minutes of work, not after them
    end_as_by_ctrl_c()
    if args.model is not None:
        return _run(args, args.model, steps, tokens)
    from sglang_glm53.tiny import make_checkpoint

    with tempfile.TemporaryDirectory(prefix="glm53-trace-model-") as folder:
        return _run(args, make_checkpoint(Path(folder) / "tiny"), steps, tokens)


def _run(args: argparse.Namespace, model: Path, steps: int, tokens: int) -> int:
    from sglang_glm53.ledger.topology import Topology, Workload, parse
    from sglang_glm53.trace.run import Run, trace

    config, quantised = read_model(model)
    on_cpu = args.device == "cpu"
    form = "bf16" if on_cpu or not quantised else "fp8"
    base = Topology(weights=form, kv="bf16" if on_cpu else "fp8", device=args.device)
    topology = parse(args.topology, base)
    topology.check(config)
    Workload(context=1, prompt=1, steps=steps, tokens=tokens).check(config, topology)
    job = Run(
        model.resolve(),
        topology,
        tuple(args.prompts),
        args.new_tokens,
        steps,
        tokens,
        args.device,
        tuple(args.sglang_arguments),
    )
    found = trace(
        job,
        config,
        timeout=args.timeout,
        keep=args.keep,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if args.json:
        text = json.dumps(_json(found, topology.name), indent=1) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            Path(args.json).write_text(text)
    else:
        print(render(found, topology.name))
    return 0 if found.equal else 1


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def render(found: Any, name: str) -> str:
    """The comparison as text: a table for each pass."""
    from sglang_glm53.ledger.report import Table
    from sglang_glm53.ledger.report import render as tables

    parts = []
    for each in found.passes:
        rows = [
            (
                row.what,
                row.detail,
                str(row.counted),
                str(row.ran),
                "equal" if row.equal else "DIFFERS",
            )
            for row in (*each.collectives, *each.products)
        ]
        ranks = " + ".join(map(str, each.rows))
        form = f", attention {each.form}" if "prefill" in each.kind else ""
        title = f"{each.kind}, rows {ranks}{form}: ran {each.times} times"
        parts.append(Table(title, ("what", "shape", "ledger", "ran", ""), rows))
    total = sum(len(each.collectives) + len(each.products) for each in found.passes)
    wrong = sum(
        not row.equal for each in found.passes for row in (*each.collectives, *each.products)
    )
    verdict = f"{total} rows, all equal" if not wrong else f"{wrong} of {total} rows differ"
    lines = [tables(parts), "", f"{name}, {found.served}: {verdict}"]
    if found.outside:
        sent = ", ".join(f"{count} x {what}" for what, count in found.outside.items())
        lines.append(f"between passes, not counted by the ledger: {sent}")
    return "\n".join(lines)


def _json(found: Any, name: str) -> dict[str, Any]:
    return {
        "topology": name,
        "served": found.served,
        "equal": found.equal,
        "passes": [{**asdict(each), "equal": each.equal} for each in found.passes],
        "outside": found.outside,
    }
