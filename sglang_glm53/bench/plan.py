"""What a run of `glm53 bench slice` will do: its jobs in order, and whether they can fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_glm53.bench.jobs import Job
from sglang_glm53.bench.served import OURS, STOCK
from sglang_glm53.bench.step_bytes import kv_bytes_per_token, kv_kind, loaded_weights
from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error

WORKS = ("decode", "mtp", "prefill")
GRAPHS = ("default", "disabled")
GIB = 2**30
PAGE = 64
# Weights as loaded are this much above what is counted (106.66 GiB against 105.55, all layers).
LOADED = 1.012
KV_AT_LEAST = 7.5 * GIB
RESERVE = 12.0 * GIB  # for activations of a prefill chunk, CUDA graphs, workspaces and contexts
MOST_STATIC = 0.92


@dataclass(frozen=True)
class Options:
    """The options of `glm53 bench slice`; see its --help."""

    layers: int = 78
    experts: int = 32
    batch: tuple[int, ...] = (1, 8, 16)
    context: int = 2304
    steps: int = 64
    work: tuple[str, ...] = WORKS
    mtp_batch: tuple[int, ...] = (1, 8)
    mtp_steps: int = 5
    mtp_tokens: int = 6
    mtp_new_tokens: int = 256
    accept_length: float = 3.5
    prefill_tokens: int = 32768
    prefill_chunk: int = 8192
    prefill_layers: int = 10
    prefill_graph: tuple[str, ...] = GRAPHS
    repeats: int = 3
    startup: int = 3
    rounds: int = 2
    kv_cache_dtype: str = "fp8_e4m3"
    only: str | None = None
    device: str = "cuda"
    sglang_arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise Glm53Error for a number that cannot be."""
        for name in (
            "steps",
            "mtp_steps",
            "mtp_tokens",
            "mtp_new_tokens",
            "prefill_tokens",
            "prefill_chunk",
            "prefill_layers",
            "repeats",
            "rounds",
            "context",
        ):
            if getattr(self, name) < 1:
                raise Glm53Error(f"--{name.replace('_', '-')} is {getattr(self, name)}; give 1 up")
        for name in ("batch", "mtp_batch"):
            if min(getattr(self, name)) < 1:
                raise Glm53Error(f"--{name.replace('_', '-')} takes numbers from 1 up")
        if self.startup < 0:
            raise Glm53Error(f"--startup is {self.startup}; give 0 to leave it out, or more")
        if not 1 <= self.accept_length <= self.mtp_tokens:
            raise Glm53Error(
                f"--accept-length {self.accept_length:g} is not within 1 and the "
                f"{self.mtp_tokens} tokens of a verification"
            )
        if self.prefill_chunk % PAGE:
            raise Glm53Error(f"--prefill-chunk {self.prefill_chunk}: give a multiple of {PAGE}")

    @property
    def starts(self) -> int:
        """Starts of an Engine to be timed on each side; none where only prefill is measured."""
        return 0 if set(self.work) <= {"prefill"} else self.startup

    @property
    def sides(self) -> tuple[str, ...]:
        return (self.only,) if self.only else (STOCK, OURS)

    def alternated(self, times: int) -> Iterator[tuple[int, str]]:
        """Round and side, S O O S S O …: a drift of the machine meets both alike."""
        for turn in range(times):
            for side in self.sides if turn % 2 == 0 else reversed(self.sides):
                yield turn + 1, side


@dataclass(frozen=True)
class Memory:
    """What a slice takes of the GPU, in bytes.

    Attributes:
        weights: as loaded. kv: the cache asked for. needed: the part of it that must be there.
        tokens: that must fit into the cache.
    """

    weights: float
    kv: float
    needed: float
    tokens: int

    @property
    def total(self) -> float:
        return self.weights + self.kv + RESERVE


def memory_of(options: Options, work: str, config: Glm53Config, width: float) -> Memory:
    """The memory that one kind of work takes with `config`'s slice."""
    mtp = work in ("mtp", "startup") and "mtp" in options.work
    tokens = {
        "decode": max(options.batch) * _paged(options.context + decode_tokens(options)),
        "mtp": max(options.mtp_batch) * _paged(options.context + mtp_tokens(options)),
        "prefill": _paged(options.prefill_tokens + 1),
        "startup": PAGE,
    }[work]
    each = kv_bytes_per_token(config, kv=kv_kind(options.kv_cache_dtype), mtp=mtp)
    weights = loaded_weights(config, mtp=mtp, width=width) * LOADED
    needed = float(tokens * each)
    return Memory(weights, max(KV_AT_LEAST, 1.2 * needed), needed, tokens)


def decode_tokens(options: Options) -> int:
    from sglang_glm53.bench.runner import steps_in_all

    return steps_in_all(options.steps)


def mtp_tokens(options: Options) -> int:
    return options.mtp_new_tokens + 4 * options.mtp_tokens + 1


def static_fraction(memory: Memory, gpu_bytes: float) -> float:
    """--mem-fraction-static: weights and cache over the GPU's memory, two decimals, rounded up."""
    wanted = (memory.weights + memory.kv) / gpu_bytes
    return min(MOST_STATIC, math.ceil(wanted * 100) / 100)


def check_memory(
    options: Options, work: str, config: Glm53Config, width: float, gpu_gib: float
) -> None:
    """Raise Glm53Error if the slice cannot fit: what it needs, and what to reduce."""
    memory = memory_of(options, work, config, width)
    own = own_fraction(options.sglang_arguments)
    if own is not None:
        kv = own * gpu_gib * GIB - memory.weights
        if kv < memory.needed:
            raise Glm53Error(
                f"{work}: --mem-fraction-static {own:g} of {gpu_gib:.1f} GiB leaves "
                f"{max(0.0, kv) / GIB:.1f} GiB of cache beside {memory.weights / GIB:.1f} of "
                f"weights, and {memory.tokens} tokens take {memory.needed / GIB:.1f}; raise it, "
                "or reduce --batch or --context"
            )
        return
    if memory.total <= gpu_gib * GIB:
        return
    fits = largest_layers(options, work, config, width, gpu_gib)
    layers = "--prefill-layers" if work == "prefill" else "--layers"
    advice = f"at most {layers} {fits}" if fits else "a smaller --batch or --context"
    raise Glm53Error(
        f"{work} needs about {memory.total / GIB:.0f} GiB of GPU memory (weights "
        f"{memory.weights / GIB:.1f}, cache {memory.kv / GIB:.1f}, work space {RESERVE / GIB:.0f}) "
        f"and the GPU has {gpu_gib:.1f}; use {advice}, or fewer --experts"
    )


def largest_layers(
    options: Options, work: str, config: Glm53Config, width: float, gpu_gib: float
) -> int:
    """The most layers of a slice that fit, or 0."""
    for layers in range(config.num_hidden_layers - 1, 0, -1):
        smaller = replace(
            config, num_hidden_layers=layers, indexer_types=config.indexer_types[:layers]
        )
        if memory_of(options, work, smaller, width).total <= gpu_gib * GIB:
            return layers
    return 0


def own_fraction(arguments: Sequence[str]) -> float | None:
    """The user's own --mem-fraction-static, or None."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--mem-fraction-static":
            try:
                return float(value or arguments[index + 1])
            except (ValueError, IndexError):
                raise Glm53Error("--mem-fraction-static takes a number below 1") from None
    return None


def jobs(
    options: Options,
    *,
    models: dict[str, tuple[Path, Glm53Config, float]],
    gpu_bytes: float,
    folder: Path,
    load_format: str = "dummy",
) -> list[Job]:
    """All jobs in the order in which they run.

    Args:
        models: `slice` and, for the prefill, `prefill`: folder, config, bytes of an element.
        gpu_bytes: the GPU's memory.
        folder: for the profiler's traces.
    """
    found: list[Job] = []

    def add(kind: str, side: str, name: str, arguments: list[str], **spec: Any) -> None:
        model, config, width = models["prefill" if kind == "prefill" else "slice"]
        memory = memory_of(options, kind, config, width)
        base = ["--model-path", str(model), "--load-format", load_format]
        if options.device == "cuda":
            base += ["--kv-cache-dtype", options.kv_cache_dtype]
            if own_fraction(options.sglang_arguments) is None:
                base += ["--mem-fraction-static", f"{static_fraction(memory, gpu_bytes):.2f}"]
        else:
            base += ["--device", "cpu", "--max-total-tokens", str(2 * memory.tokens + 1024)]
        spec = {
            "kind": kind,
            "side": side,
            "device": options.device,
            "vocab": config.vocab_size,
            "experts": config.n_routed_experts,
            "traces": str(folder / name),
            "arguments": [*base, *arguments, *options.sglang_arguments],
            **spec,
        }
        found.append(Job(name, side, spec))

    if "decode" in options.work:
        for turn, side in options.alternated(options.rounds):
            add(
                "decode",
                side,
                f"decode-{side}-{turn}",
                [
                    *("--chunked-prefill-size", str(options.prefill_chunk)),
                    *_context(options.context + decode_tokens(options)),
                    *_graphs(options.batch),
                ],
                batches=list(options.batch),
                context=options.context,
                steps=options.steps,
                chunk=options.prefill_chunk,
            )
    engine = _engine_arguments(options)
    if "mtp" in options.work:
        for turn, side in options.alternated(options.rounds):
            add(
                "mtp",
                side,
                f"mtp-{side}-{turn}",
                engine,
                batches=list(options.mtp_batch),
                context=options.context,
                new_tokens=options.mtp_new_tokens,
                repeats=options.repeats,
            )
    # Every start of an Engine above is one of the starts to be timed.
    timed = options.rounds if "mtp" in options.work else 0
    for turn, side in options.alternated(options.starts):
        if turn > timed:
            add("startup", side, f"startup-{side}-{turn}", engine)
    if "prefill" in options.work:
        for graph in options.prefill_graph:
            for turn, side in options.alternated(options.rounds):
                add(
                    "prefill",
                    side,
                    f"prefill-{graph}-{side}-{turn}",
                    _prefill_arguments(options, graph),
                    tokens=options.prefill_tokens,
                    chunk=options.prefill_chunk,
                    repeats=options.repeats + 2,
                    graph=graph,
                )
    return found


def _engine_arguments(options: Options) -> list[str]:
    """Of an Engine: with MTP where that is measured, plain otherwise."""
    mtp = "mtp" in options.work
    batches = options.mtp_batch if mtp else options.batch
    arguments = [
        "--skip-tokenizer-init",
        *("--max-running-requests", str(max(batches))),
        *("--chunked-prefill-size", str(options.prefill_chunk), "--disable-radix-cache"),
        *_context(options.context + mtp_tokens(options)),
        *_graphs(batches),
    ]
    if mtp:
        arguments += ["--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"]
        arguments += ["--speculative-num-steps", str(options.mtp_steps)]
        arguments += ["--speculative-num-draft-tokens", str(options.mtp_tokens)]
    return arguments


def _prefill_arguments(options: Options, graph: str) -> list[str]:
    arguments = ["--chunked-prefill-size", str(options.prefill_chunk)]
    arguments += _context(options.prefill_tokens + 64)
    arguments += ["--cuda-graph-bs-decode", "1"]
    if graph == "disabled":
        return [*arguments, "--cuda-graph-backend-prefill", "disabled"]
    # The kind of graph is SGLang's default; captured are the sizes that the chunks have, where a
    # server captures some sixty.
    chunk, rest = options.prefill_chunk, options.prefill_tokens % options.prefill_chunk
    sizes = sorted({min(chunk, options.prefill_tokens), *([rest] if rest else [])})
    return [*arguments, "--cuda-graph-bs-prefill", *map(str, sizes)]


def _graphs(batches: Sequence[int]) -> list[str]:
    sizes = [str(batch) for batch in sorted(set(batches))]
    return ["--cuda-graph-bs-decode", *sizes, "--cuda-graph-backend-prefill", "disabled"]


def _context(tokens: int) -> list[str]:
    return ["--context-length", str(max(8192, _paged(tokens + 256)))]


def _paged(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE
