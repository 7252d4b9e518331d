"""`glm53 tiny DIR`: write a tiny GLM-5.3 checkpoint with random weights."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from sglang_glm53.tiny.options import DTYPES, TinyOptions

HELP = {
    "layers": "decoder layers; the MTP layer comes on top",
    "experts": "routed experts of a MoE layer, two for each token",
    "heads": "attention heads",
    "index_heads": "heads of the indexer",
    "index_topk": "positions that attention reads for a query",
    "hidden": "width of the residual stream",
    "vocab": "rows of the embedding",
    "seed": "of the random weights; the same options give the same bytes",
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "tiny",
        help="write a tiny GLM-5.3 checkpoint with random weights (27 MB)",
        description="Write a tiny GLM-5.3 checkpoint: random weights with structure, a "
        "tokenizer, a chat template and one MTP layer. It serves wherever GLM-5.3 does.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="where to write it")
    for name, text in HELP.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=getattr(TinyOptions, name),
            metavar="N",
            help=text,
        )
    parser.add_argument("--dtype", choices=DTYPES, default=TinyOptions.dtype, help="as stored")
    parser.add_argument(
        "--fp8", action="store_true", help="store the projections in block-scaled FP8 (128x128)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from sglang_glm53.tiny import make_checkpoint

    fields = [field.name for field in dataclasses.fields(TinyOptions)]
    options = TinyOptions(**{name: getattr(args, name) for name in fields})
    folder = make_checkpoint(args.dir, options)
    size = sum(file.stat().st_size for file in folder.iterdir())
    stored = "float8_e4m3fn in 128x128 blocks" if options.fp8 else options.dtype
    print(
        f"{folder}: {options.layers} layers and one MTP layer, {options.experts} experts, "
        f"{stored}, {size / 1e6:.1f} MB"
    )
    print(f"serve it: sglang serve --model-path {folder}")
    return 0
