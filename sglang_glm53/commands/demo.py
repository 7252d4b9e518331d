"""`glm53 demo`: serve the miniature through the real `sglang serve`, and talk to it."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sglang_glm53 import miniature
from sglang_glm53.commands.chat import Reply
from sglang_glm53.commands.server_process import Server, free_port, sglang_command
from sglang_glm53.commands.status import table
from sglang_glm53.commands.talk import SUM, Talk, check, row, say, speed
from sglang_glm53.compat.versions import GPU_TESTED, sglang_version
from sglang_glm53.ending import end_as_by_ctrl_c
from sglang_glm53.errors import Glm53Error
from sglang_glm53.features import HOPPER

HOST = "127.0.0.1"
HELLO = "Hello, who are you?"  # what a checkpoint with random weights can answer
SERVE_FLAGS = ("--reasoning-parser", "glm45", "--tool-call-parser", "glm47")
# The log interval is that of the accept length's statistics too: an answer here is a few steps.
MTP_FLAGS = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "5"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "6"),
    *("--decode-log-interval", "1"),
)
# A server that waits would otherwise keep a core busy.
IDLE_FLAGS = ("--sleep-on-idle",)
# One conversation needs neither a cache that fills the GPU nor a graph for every batch size.
GPU_FLAGS = (
    *("--max-total-tokens", "32768", "--max-running-requests", "4"),
    *("--cuda-graph-bs-decode", "1", "4", "--cuda-graph-backend-prefill", "disabled"),
)
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
# Or DeepGEMM compiles a kernel for each number of rows that could come, for minutes.
GPU_ENVIRONMENT = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="serve a miniature GLM-5.3 on this machine, talk to it, and show what served",
        description="Serve the miniature that comes with this package with `sglang serve`, on a "
        "Hopper GPU where there is one and on the CPU elsewhere. Ask it a sum, and a question for "
        "which it has to call a tool, over /v1/chat/completions; print reasoning, answers, tool "
        "call, the token rate and what served. Exit code 1 if an answer makes no sense.",
        epilog="Arguments after `--` go to `sglang serve`. The answers of another --model, or to "
        "another --question, are printed and not judged.",
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a checkpoint (default: the shipped miniature)"
    )
    parser.add_argument(
        "--question", metavar="TEXT", help=f"ask this alone (default: {SUM} and one with a tool)"
    )
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--port", type=int, metavar="N", help="default: a free one")
    parser.add_argument(
        "--mtp", action="store_true", help="draft with the MTP layer: EAGLE, 5 steps, 6 tokens"
    )
    parser.add_argument(
        "--fp8", action="store_true", help="the miniature in FP8 (128x128), derived on this machine"
    )
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    parser.add_argument("--keep", action="store_true", help="leave the server up at the end")
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="for the start; default: 600"
    )
    parser.add_argument("serve_arguments", nargs="*", metavar="-- ARGS", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    sglang_command()  # nothing is made or started if SGLang is missing
    _check(args)
    port = free_port(HOST, args.port)
    model = checkpoint(args)
    flags, environment = _where(args)
    url = f"http://{HOST}:{port}"
    first = ["--model-path", str(model), "--host", HOST, "--port", str(port), *SERVE_FLAGS]
    first += [*IDLE_FLAGS, *(MTP_FLAGS if args.mtp else ())]
    flags = [*first, *flags, *args.serve_arguments]
    server = Server(
        flags,
        url=url,
        log=cache_folder() / f"demo-{port}.log",
        keep=args.keep,
        environment=environment,
    )
    end_as_by_ctrl_c()
    _no_proxy_for(HOST)
    keep = False
    try:
        say(f"starting: sglang serve {' '.join(flags)}")
        say(f"its log:  {server.log}")
        server.start()
        seconds = server.wait_ready(args.timeout, lambda s, doing: say(f"  {s:4.0f} s  {doing}"))
        say(f"ready after {seconds:.0f} s")
        try:
            replies = show(server, args)
        except Glm53Error:
            server.check_alive()  # a server that died is the better explanation
            raise
        if args.question is None and args.model is None and miniature.shipped():
            check(replies)
        keep = args.keep
    finally:
        if not keep:
            server.stop()
    if keep:
        say(f"\nleft up at {url}, pid {server.pid}; stop it with: kill {server.pid}")
    return 0


def show(server: Server, args: argparse.Namespace) -> list[Reply]:
    """Talk, and print the rate and what served; the replies, in order."""
    from sglang_glm53.status import read_status

    talk = Talk(server.url, args.max_tokens, timeout=max(args.timeout, 60))
    learned = args.model is not None or miniature.shipped()
    replies = talk.question(args.question or (SUM if learned else HELLO))
    if args.question is None and learned:
        replies += talk.with_a_tool()
    say()
    row("speed", speed(replies))
    say()
    say(table(read_status(server.url)))
    return replies


def checkpoint(args: argparse.Namespace) -> Path:
    """The folder to serve: the one that was named, or the miniature, in FP8 where asked for."""
    if args.model is None:
        if not miniature.shipped():
            say("this version carries no trained miniature yet: random weights serve instead")
            return tiny_checkpoint(args.fp8)
        return fp8_miniature() if args.fp8 else miniature.folder()
    model = args.model.expanduser()
    if not (model / "config.json").is_file():
        raise Glm53Error(f"{model} holds no config.json; name a checkpoint's folder with --model")
    return model


def tiny_checkpoint(fp8: bool) -> Path:
    """A checkpoint of `glm53 tiny` with its default sizes, made if the cache does not hold it."""
    from sglang_glm53.tiny import TinyOptions, make_checkpoint

    # A new version of the generator gets a folder of its own.
    source = Path(__file__).parent.parent / "tiny"
    digest = hashlib.sha256(repr(TinyOptions(fp8=fp8)).encode())
    for file in sorted([*source.glob("*.py"), *source.glob("*.jinja")]):
        digest.update(file.read_bytes())
    folder = cache_folder() / f"tiny-{digest.hexdigest()[:12]}"
    if (folder / "config.json").is_file():
        return folder
    say(f"making it in {folder}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as scratch:
            made = make_checkpoint(Path(scratch) / "tiny", fp8=fp8)
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


def fp8_miniature() -> Path:
    """The miniature in FP8, derived if the cache does not hold it yet."""
    try:
        return miniature.derive_fp8(cache_folder() / "miniature-fp8")
    except Glm53Error as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise Glm53Error(
            str(error).replace("name another folder", "set XDG_CACHE_HOME to another folder")
        ) from error


def _check(args: argparse.Namespace) -> None:
    if args.model is not None and args.fp8:
        raise Glm53Error("--fp8 derives from the shipped miniature; leave out --model, or --fp8")
    if args.max_tokens < 1:
        raise Glm53Error(f"--max-tokens is {args.max_tokens}; use at least 1")
    if args.question is not None and not args.question.strip():
        raise Glm53Error("--question is empty; give it a text, or leave it out")


def _where(args: argparse.Namespace) -> tuple[tuple[str, ...], dict[str, str]]:
    """Flags and variables for CPU or GPU: one's own model is SGLang's to place, or --cpu's."""
    if args.cpu or (args.model is None and not has_hopper()):
        return (), CPU_ENVIRONMENT
    return (GPU_FLAGS, {**GPU_ENVIRONMENT, **os.environ}) if args.model is None else ((), {})


def has_hopper() -> bool:
    """Whether every GPU here is one that our classes serve on, with a SGLang that they know."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or sglang_version() not in GPU_TESTED:
        return False
    command = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    gpus = set(told.stdout.split())
    return told.returncode == 0 and gpus == {".".join(map(str, HOPPER))}


def cache_folder() -> Path:
    """Where logs go, and the miniature in FP8."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sglang-glm53"


def _no_proxy_for(host: str) -> None:
    """Keep a proxy of the environment out of the way of requests to this machine."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [name for name in known.split(",") if name and name != host]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*hosts, host])
