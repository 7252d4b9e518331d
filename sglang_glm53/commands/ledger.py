"""`glm53 ledger`: what one request computes, moves and sends, for any topology."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger.topology import A2A, KV, PRESETS, ROUTINGS, WEIGHTS, Topology, Workload

DESCRIPTION = """\
Parameters, cache, operators, collectives and the bound of a step, counted from a config and a
topology. Needs no GPU, no SGLang and no checkpoint: without --model it counts GLM-5.3.
"""
EPILOG = f"""\
A topology is a preset ({", ".join(PRESETS)}), or tp=8,ep=8,dp=8,a2a=deepep, or both in this
order (tp8,kv=bf16). tp, ep, dp and a2a are SGLang's --tp-size, --ep-size, --attn-dp-size and
--moe-a2a-backend; dense_tp=1 is --moe-dense-tp-size 1, dp_lm_head=1 is --enable-dp-lm-head.

examples:
  glm53 ledger                                     GLM-5.3 on eight GPUs, tensor parallel
  glm53 ledger dp8-deepep --batch 128 --context 8192 --mtp 5-1-6 --accept 3.5
  glm53 ledger --compare tp8 dp8-deepep            two topologies beside each other
  glm53 ledger --explain kv_bytes_per_token        a figure's formula; `--explain all`: every one
  glm53 ledger tp8 --json - | jq .bound_ms
  glm53 ledger tp8 --html ledger.html              one page with plots, no network needed
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "ledger",
        help="what a topology stores, reads, computes and sends, and the bound of a step",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Workload()
    parser.add_argument("topology", nargs="?", default=None, metavar="TOPOLOGY", help="see below")
    parser.add_argument("--tp", type=int, metavar="N", help="ranks in all")
    parser.add_argument("--ep", type=int, metavar="N", help="ranks that the experts are split over")
    parser.add_argument("--dp", type=int, metavar="N", help="attention groups")
    parser.add_argument("--a2a", choices=A2A, help="how tokens reach the experts")
    parser.add_argument("--weights", choices=WEIGHTS, help="form of the projections (default: fp8)")
    parser.add_argument(
        "--kv",
        choices=KV,
        help="form of the cache (default: fp8; SGLang's: bf16 on Hopper, fp8-raw on Blackwell)",
    )

    def number(name: str, text: str) -> None:
        value = getattr(default, name)
        parser.add_argument(
            f"--{name}", type=int, metavar="N", help=text.replace("DEFAULT", f"default: {value}")
        )

    number("batch", "requests of the whole deployment (default: what fits, at most 32)")
    number("context", "tokens that each has in the cache (DEFAULT or the model's longest)")
    number("prompt", "tokens of the prompt whose prefill is counted (DEFAULT or the longest)")
    number(
        "chunk",
        "tokens of one prefill pass of one attention group (DEFAULT); SGLang's "
        "--chunked-prefill-size is this times the groups (dp)",
    )
    parser.add_argument("--mtp", metavar="S-1-T", help="draft steps and verified tokens: 5-1-6")
    parser.add_argument(
        "--accept",
        type=float,
        metavar="X",
        help="tokens that a step with MTP yields, as measured; without it no tokens/s are told",
    )
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        default=default.routing,
        help="distinct experts of a pass: tokens dealt to all in turn, or each choice uniform",
    )
    parser.add_argument(
        "--hardware",
        default="h200",
        metavar="GPU",
        help="a GPU's name or YAML file (default: h200)",
    )
    parser.add_argument(
        "--mem-fraction",
        type=float,
        default=0.85,
        metavar="F",
        help="SGLang's --mem-fraction-static (default: 0.85)",
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a checkpoint's folder or config.json"
    )
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="two topologies beside each other"
    )
    parser.add_argument(
        "--explain", metavar="NAME", help="formula, numbers and source of a figure; `all`"
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="as JSON, to FILE or to the terminal"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="write the plots as a picture (needs matplotlib)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from sglang_glm53.ledger import report
    from sglang_glm53.ledger.account import Account
    from sglang_glm53.ledger.hardware import load

    config, quantised = read_model(args.model)
    workload = workload_of(args, config)
    hardware = load(args.hardware)
    if not 0 < args.mem_fraction < 1:
        raise Glm53Error(f"--mem-fraction is {args.mem_fraction:g}; give a number between 0 and 1")

    def account(text: str | None, batch: int | None = None) -> Account:
        topology = topology_of(args, text, quantised)
        one = Account(config, topology, workload, hardware, args.mem_fraction)
        if args.batch is not None:
            return one
        batch = batch or max(1, min(workload.batch, int(one.capacity["concurrent"])))
        return replace(one, workload=replace(workload, batch=batch))

    if args.compare:
        if args.topology:
            raise Glm53Error("--compare takes both topologies; leave the first word out")
        batch = min(account(text).workload.batch for text in args.compare)
        pair = [account(text, batch) for text in args.compare]
        if args.json:
            _write_json([report.to_json(each) for each in pair], args.json)
        if args.html or args.png or args.explain:
            raise Glm53Error(
                "--html, --png and --explain are for one topology; leave --compare out"
            )
        if not args.json:
            print(report.render(report.compare(*pair), columns()))
        return 0
    one = account(args.topology)
    if args.explain:
        print(report.explain(one, args.explain))
        return 0
    if args.json:
        _write_json(report.to_json(one), args.json)
    if args.html:
        from sglang_glm53.ledger.html import page

        _write(args.html, page(one))
    if args.png:
        from sglang_glm53.ledger.picture import save

        save(one, args.png)
    for file in (args.html, args.png):
        if file:
            print(f"{file}: written", file=sys.stderr)
    if not (args.json or args.html or args.png):
        print(report.render(report.tables(one), columns()))
    return 0


def columns() -> int | None:
    """Of the terminal; None where the output is none."""
    return max(40, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def read_model(path: Path | None) -> tuple[Glm53Config, bool | None]:
    """The config, and whether its weights are FP8; GLM-5.3's own without a path.

    Raises:
        Glm53Error: no config.json, or one that is not GLM-5.3's architecture.
    """
    if path is None:
        from sglang_glm53.ledger.glm53 import config_json

        return Glm53Config.from_hf(config_json()), None
    file = path / "config.json" if path.is_dir() else path
    try:
        content: Any = json.loads(file.read_text())
    except OSError as error:
        raise Glm53Error(f"cannot read {file}: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Glm53Error(f"{file} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise Glm53Error(f"{file} holds no object; give a checkpoint's config.json")
    return Glm53Config.from_hf(content), bool(content.get("quantization_config"))


def topology_of(args: argparse.Namespace, text: str | None, quantised: bool | None) -> Topology:
    """The topology of the first word, changed by the options."""
    from sglang_glm53.ledger.topology import parse

    base = Topology() if quantised is None or quantised else Topology(weights="bf16")
    named = {
        field.name: getattr(args, field.name)
        for field in fields(Topology)
        if getattr(args, field.name, None) is not None
    }
    if text is None and not named.keys() & {"tp", "ep", "dp", "a2a"}:
        text = "tp8" if args.model is None else "tp1"
    return replace(parse(text or "", base), **named)


def workload_of(args: argparse.Namespace, config: Glm53Config) -> Workload:
    """What was asked for; what was not is no longer than the model's longest context."""
    steps, tokens = parse_mtp(args.mtp)
    default, longest = Workload(), config.max_position_embeddings
    shape = {
        "batch": default.batch,
        "context": min(default.context, longest),
        "prompt": min(default.prompt, longest),
        "chunk": default.chunk,
    }
    given = {name: getattr(args, name) for name in shape if getattr(args, name) is not None}
    return Workload(
        **{**shape, **given},
        steps=steps,
        tokens=tokens,
        accept=args.accept,
        routing=args.routing,
    )


def parse_mtp(text: str | None) -> tuple[int, int]:
    """Draft steps and verified tokens of `5-1-6`.

    Raises:
        Glm53Error: anything else, or a tree of drafts.
    """
    if text is None:
        return 0, 0
    parts = text.split("-")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise Glm53Error(f"--mtp {text!r}: write steps-1-tokens, as in 5-1-6")
    steps, width, tokens = (int(part) for part in parts)
    if width != 1:
        raise Glm53Error(
            f"--mtp {text!r}: a tree of drafts is not counted; use {steps}-1-{steps + 1}"
        )
    return steps, tokens


def _write_json(content: Any, target: str) -> None:
    text = json.dumps(content, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        _write(Path(target), text)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Glm53Error(f"cannot write {path}: {error.strerror or error}") from None
