"""`glm53 demo`: serve a miniature GLM-5.3 through the real `sglang serve`, and ask it."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import textwrap
from pathlib import Path

from sglang_glm53.commands import chat
from sglang_glm53.commands.server_process import Server, free_port, sglang_command
from sglang_glm53.commands.status import table
from sglang_glm53.errors import Glm53Error

QUESTION = "Hello, who are you?"
HOST = "127.0.0.1"
SERVE_FLAGS = ("--reasoning-parser", "glm45", "--tool-call-parser", "glm47")
# The log interval is that of the accept length's statistics too: an answer here is a few steps.
MTP_FLAGS = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "5"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "6"),
    *("--decode-log-interval", "1"),
)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="serve a miniature GLM-5.3 on this machine, ask it, and show what served",
        description="Serve a checkpoint with `sglang serve` on this machine, ask one question "
        "over /v1/chat/completions, print the answer, the token rate and what served.",
        epilog="Arguments after `--` go to `sglang serve`.",
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a checkpoint (default: a miniature, made once)"
    )
    parser.add_argument("--question", default=QUESTION, metavar="TEXT", help=f"default: {QUESTION}")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--port", type=int, metavar="N", help="default: a free one")
    parser.add_argument(
        "--mtp", action="store_true", help="draft with the MTP layer: EAGLE, 5 steps, 6 tokens"
    )
    parser.add_argument("--keep", action="store_true", help="leave the server up at the end")
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="for the start; default: 600"
    )
    parser.add_argument("serve_arguments", nargs="*", metavar="-- ARGS", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    sglang_command()  # nothing is made or started if SGLang is missing
    port = free_port(HOST, args.port)
    model = args.model.expanduser() if args.model else tiny_model()
    if not (model / "config.json").is_file():
        raise Glm53Error(f"{model} holds no config.json; name a checkpoint's folder with --model")
    url = f"http://{HOST}:{port}"
    flags = ["--model-path", str(model), "--host", HOST, "--port", str(port), *SERVE_FLAGS]
    flags += [*(MTP_FLAGS if args.mtp else ()), *args.serve_arguments]
    server = Server(
        flags,
        url=url,
        log=cache_folder() / f"demo-{port}.log",
        keep=args.keep,
        environment={} if args.model else _on_the_cpu(),
    )
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    _no_proxy_for(HOST)
    keep = False
    try:
        say(f"starting: sglang serve {' '.join(flags)}")
        say(f"its log:  {server.log}")
        server.start()
        seconds = server.wait_ready(args.timeout, lambda s, doing: say(f"  {s:4.0f} s  {doing}"))
        say(f"ready after {seconds:.0f} s")
        try:
            show(server, args)
        except Glm53Error:
            server.check_alive()  # a server that died is the better explanation
            raise
        keep = args.keep
    finally:
        if not keep:
            server.stop()
    if keep:
        say(f"\nleft up at {url}, pid {server.pid}; stop it with: kill {server.pid}")
    return 0


def show(server: Server, args: argparse.Namespace) -> None:
    """Ask, and print the answer, the rate and what served."""
    from sglang_glm53.status import read_status

    reply = chat.ask(
        server.url, args.question, max_tokens=args.max_tokens, timeout=max(args.timeout, 60)
    )
    say()
    for label, text in (
        ("question", args.question),
        ("reasoning", reply.reasoning),
        ("answer", reply.content),
    ):
        wrapped = textwrap.wrap(text.strip(), 78) or ["(none)"]
        say(f"{label:<18}" + f"\n{'':<18}".join(wrapped))
    rate = f", then {reply.rate:.1f} tokens a second" if reply.rate else ""
    ended = "" if reply.finish_reason == "stop" else f" (cut at --max-tokens {args.max_tokens})"
    say(f"{'speed':<18}{reply.tokens} tokens{ended}, first after {reply.first:.2f} s{rate}")
    say()
    say(table(read_status(server.url)))


def tiny_model() -> Path:
    """The miniature checkpoint with its default options, made if it is not in the cache yet."""
    from sglang_glm53.tiny import TinyOptions, make_checkpoint

    # A new version of the generator gets a folder of its own.
    source = Path(__file__).parent.parent / "tiny"
    digest = hashlib.sha256(repr(TinyOptions()).encode())
    for file in sorted([*source.glob("*.py"), *source.glob("*.jinja")]):
        digest.update(file.read_bytes())
    folder = cache_folder() / f"tiny-{digest.hexdigest()[:12]}"
    if not (folder / "config.json").is_file():
        say(f"making a miniature GLM-5.3 in {folder}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as scratch:
                made = make_checkpoint(Path(scratch) / "tiny")
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(made, folder)  # all of it or nothing
        except (OSError, Glm53Error) as error:
            cause = error.__cause__ if isinstance(error, Glm53Error) else error
            if not isinstance(cause, OSError):
                raise
            raise Glm53Error(
                f"cannot write to {folder.parent}: {cause.strerror or cause}; "
                "set XDG_CACHE_HOME to another folder"
            ) from error
    return folder


def cache_folder() -> Path:
    """Where the miniature checkpoint and the logs go."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sglang-glm53"


def say(line: str = "") -> None:
    print(line, flush=True)


def _on_the_cpu() -> dict[str, str]:
    """Variables that keep the miniature off a GPU, where this release stands down."""
    if os.environ.get("GLM53_ATTENTION") == "torch":
        return {}
    if Path("/dev/nvidiactl").exists():
        say("this release has no GPU kernels: the miniature is served on the CPU")
    return {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def _no_proxy_for(host: str) -> None:
    """Keep a proxy of the environment out of the way of requests to this machine."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, (known, host)))


def _interrupt(signum: int, frame: object) -> None:
    # They take the way of Ctrl-C, so that the server is stopped.
    sys.exit(128 + signum)
