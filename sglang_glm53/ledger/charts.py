"""What the plots show, as data: drawn as SVG (svg.py) or by matplotlib (picture.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger import units
from sglang_glm53.ledger.account import Account
from sglang_glm53.ledger.model import cache
from sglang_glm53.ledger.topology import Topology

SHOWN = 8  # parts of a step's bytes that get a bar of their own


@dataclass(frozen=True)
class Bars:
    """Horizontal bars. items: (label, value, what stands behind the bar)."""

    title: str
    axis: str
    items: list[tuple[str, float, str]]


@dataclass(frozen=True)
class Lines:
    """Lines over a logarithmic x. series: (label, points); level: (label, y) across the plot."""

    title: str
    x_axis: str
    y_axis: str
    series: list[tuple[str, list[tuple[float, float]]]]
    level: tuple[str, float] | None = None


def charts(account: Account) -> list[Bars | Lines]:
    """The page's plots, in order."""
    return [
        _bytes(account),
        _bound_over_batch(account),
        _cache_over_context(account),
        _collectives(account),
    ]


def _step(account: Account) -> str:
    work = account.workload
    return f"step with MTP {work.steps}-1-{work.tokens}" if work.drafts else "decode step"


def _bytes(account: Account) -> Bars:
    step = account.step
    total = step.bytes_read
    parts = sorted(step.bytes_by.items(), key=lambda item: -item[1])
    parts, rest = parts[:SHOWN], sum(value for _, value in parts[SHOWN:])
    if rest:
        parts.append(("all else", rest))
    return Bars(
        f"Where the bytes of a {_step(account)} go",
        "GB read by one rank",
        [(name, value / 1e9, f"{units.size(value)}, {value / total:.1%}") for name, value in parts],
    )


def _bound_over_batch(account: Account) -> Lines:
    batches = [2**power for power in range(11)]
    points: dict[str, list[tuple[float, float]]] = {}
    for batch in batches:
        other = replace(account, workload=replace(account.workload, batch=batch))
        found = {"decode": other.decode}
        if other.mtp is not None:
            found[f"MTP {other.workload.steps}-1-{other.workload.tokens}"] = other.mtp
        for name, step in found.items():
            points.setdefault(name, []).append((batch, step.bound.bound_ms))
            points.setdefault(f"{name}, collectives added", []).append(
                (batch, step.bound.with_communication_ms)
            )
    if account.topology.tp == 1:
        points = {name: line for name, line in points.items() if "collectives" not in name}
    fits, context = account.capacity["concurrent"], account.workload.context
    return Lines(
        f"Bound of a step at {context:,} tokens of context ({fits:,} requests fit)",
        "requests, all ranks",
        "ms",
        list(points.items()),
    )


def _cache_over_context(account: Account) -> Lines:
    longest = account.config.max_position_embeddings
    contexts = [longest / 2**power for power in range(8, -1, -1)]
    forms = {"bf16": "bf16", "fp8": "FP8 (FlashMLA)", "fp8-raw": "FP8 without scales"}
    if account.topology.kv == "fp32":
        forms = {"fp32": "fp32", **forms}
    series = []
    for kv, label in forms.items():
        token = cache(account.config, kv, mtp=account.workload.drafts)["kv_bytes_per_token"]
        series.append((label, [(context, context * token / 1e9) for context in contexts]))
    room = account.capacity["pool_bytes"] / 1e9
    return Lines(
        "Cache of one request over its context",
        "tokens",
        "GB on each rank that holds it",
        series,
        (f"room of a rank: {room:.1f} GB", room) if room else None,
    )


def _collectives(account: Account) -> Bars:
    items = []
    for name, other in _topologies(account):
        step = other.step
        count = f"{step.collective_count} collectives, {units.size(step.busiest_bytes)}"
        items.append((name, step.busiest_bytes / 1e6, count))
    return Bars(
        f"Collectives of a {_step(account)} by topology",
        "MB one way through the busiest rank",
        items,
    )


def _topologies(account: Account) -> Iterator[tuple[str, Account]]:
    """The four ways to use these ranks, and the one that was asked for."""
    one = account.topology
    ranks = one.tp if one.tp > 1 else 8
    ways = {
        f"TP {ranks}": Topology(tp=ranks),
        f"TP {ranks}, DeepEP": Topology(tp=ranks, ep=ranks, a2a="deepep"),
        f"DP {ranks}": Topology(tp=ranks, dp=ranks),
        f"DP {ranks}, DeepEP": Topology(tp=ranks, ep=ranks, dp=ranks, a2a="deepep"),
    }
    ways = {name: replace(way, kv=one.kv, weights=one.weights) for name, way in ways.items()}
    if one.tp > 1 and one not in ways.values():
        ways[one.name] = one
    for name, way in ways.items():
        try:
            found = replace(account, topology=way)
        except Glm53Error:  # this model cannot be split so
            continue
        yield f"{name} (this)" if way == one else name, found
