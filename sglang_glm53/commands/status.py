"""`glm53 status URL`: what serves on a running server."""

from __future__ import annotations

import argparse
import json
from typing import Any

ROWS = (
    ("serving", "serving"),
    ("model", "model"),
    ("draft", "draft (MTP)"),
    ("pool", "KV pool"),
    ("layout", "cache layout"),
    ("pages", "cache pages"),
    ("draft_pool", "draft's pool"),
    ("backend", "attention"),
    ("draft_backend", "draft's attention"),
    ("device", "device"),
    ("dtype", "dtype"),
    ("attention", "attention kernels"),
    ("accept_length", "accept length"),
)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "status",
        help="ask a running server which classes, pool and attention backend serve",
        description="Ask a running SGLang server which classes, pool and attention backend serve.",
    )
    parser.add_argument("url", metavar="URL", help="for example http://127.0.0.1:30000")
    parser.add_argument("--json", action="store_true", help="print the whole block as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from sglang_glm53.status import read_status

    block = read_status(args.url if "://" in args.url else f"http://{args.url}")
    print(json.dumps(block, indent=2) if args.json else table(block))
    return 0


def table(block: dict[str, Any]) -> str:
    """The block of `status.read_status` as lines of text; what is absent is left out."""
    lines = [f"{'versions':<18}sglang-glm53 {block.get('package')}, SGLang {block.get('sglang')}"]
    for key, label in ROWS:
        value = block.get(key)
        if value is not None:
            shown = f"{value:.2f}" if isinstance(value, float) else value
            lines.append(f"{label:<18}{shown}")
    for row in block.get("stood_down") or ():
        lines.append(f"{'stood down':<18}{row['feature']}: {row['reason']}; {row['advice']}")
    for kind, count in (block.get("alarms") or {}).items():
        lines.append(f"{'alarms':<18}{kind}: {count} (the log has the requests' ids)")
    if block.get("error"):
        lines.append(f"{'error':<18}{block['error']}")
    return "\n".join(lines)
