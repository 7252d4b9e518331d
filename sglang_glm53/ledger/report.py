"""The account as tables for a terminal, as JSON, and one figure explained."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger import model, units
from sglang_glm53.ledger.account import Account, Step
from sglang_glm53.ledger.collectives import Collective
from sglang_glm53.ledger.formula import Figure
from sglang_glm53.ledger.operators import KINDS, Operator


@dataclass(frozen=True)
class Table:
    """Rows under a heading; columns after the first are right-aligned if `numeric`."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def tables(account: Account) -> list[Table]:
    """The whole account, in the order in which it is read."""
    found = [
        _what(account),
        _capacity(account),
        _bound(account),
        _step(account),
        _collectives(account),
        _prefill(account),
        _beside(account),
        _stored(account),
        _cache(account),
        _parameters(account),
        *(_operators(account, kind) for kind in KINDS),
    ]
    return [table for table in found if table.rows]


def render(found: Iterable[Table], width: int | None = None) -> str:
    """Tables as text; notes are wrapped to `width` columns, rows stay whole."""
    return "\n\n".join(_render(table, width) for table in found)


def _render(table: Table, width: int | None) -> str:
    rows = [table.head, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.head))]
    numeric = [
        all(_is_number(row[column]) for row in table.rows) for column in range(len(table.head))
    ]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(size) if right else cell.ljust(size)
            for cell, size, right in zip(row, widths, numeric, strict=True)
        ]
        return "  ".join(cells).rstrip()

    head = [line(table.head)] if any(table.head) else []
    text = [table.title, *head, line(["-" * each for each in widths])]
    text += [line(row) for row in table.rows]
    if table.note:
        text += textwrap.wrap(table.note, width) if width else [table.note]
    return "\n".join(text)


def _is_number(cell: str) -> bool:
    return not cell or cell.removeprefix("-")[:1].isdigit() or cell == "-"


def _figures(found: Iterable[Figure]) -> list[tuple[str, ...]]:
    return [(each.title, units.figure(each), each.name) for each in found]


def _what(account: Account) -> Table:
    topology, work = account.topology, account.workload
    config = account.config
    attention = f"{config.num_attention_heads // topology.attn_tp} of {config.num_attention_heads}"
    experts = f"{config.n_routed_experts // topology.ep} of {config.n_routed_experts}"
    known = "not given" if work.accept is None else f"{work.accept:g}"
    mtp = f"{work.steps}-1-{work.tokens}, accept length {known}" if work.drafts else "off"
    rows = [
        ("topology", topology.name),
        ("ranks; attention groups x ranks", f"{topology.tp}; {topology.dp} x {topology.attn_tp}"),
        ("heads, experts of a rank", f"{attention}, {experts}"),
        ("weights, cache", f"{topology.weights}, {topology.kv}"),
        *((("", line),) if (line := cache_option(account)) else ()),
        ("requests, context", f"{work.batch:,}, {work.context:,} tokens"),
        ("MTP", mtp),
        ("GPU", account.hardware.title),
    ]
    return Table("What is counted", ("", ""), rows)


def cache_option(account: Account) -> str:
    """What SGLang must be told to keep the cache in this form on this GPU; "" if nothing."""
    kv, auto = account.topology.kv, account.hardware.auto_kv
    if not auto or kv == auto or kv == "fp32":
        return ""
    if kv == "bf16":
        return "needs --kv-cache-dtype bfloat16"
    option = "needs --kv-cache-dtype fp8_e4m3"
    if auto == "bf16":
        raw = " and the trtllm or tilelang kernels" if kv == "fp8-raw" else ""
        return f"{option}{raw}: SGLang's own choice on this GPU is bf16 (kv=bf16)"
    token, latent = (
        model.cache(account.config, auto, mtp=account.workload.drafts)[name]
        for name in ("kv_bytes_per_token", "latent_token")
    )
    return (
        "this is FlashMLA's layout; SGLang's own "
        f"choice on this GPU is trtllm's FP8 without scales (kv={auto}), {latent} B a token and "
        f"layer, {token:,} B a token"
    )


PARAMETERS = (
    *("a_projections", "q_b", "kv_b", "o_proj", "attention_total", "indexer", "indexer_total"),
    *("dense_mlp", "dense_total", "expert", "routed", "routed_total", "shared_total"),
    *("router_total", "norms_total", "embedding", "lm_head", "parameters_total", "mtp"),
    *("parameters_with_mtp", "parameters_active", "parameters_active_layers"),
)


def _parameters(account: Account) -> Table:
    sheet = account.parameters
    return Table(
        "Parameters",
        ("part", "parameters", "name"),
        _figures(sheet.figures[name] for name in PARAMETERS),
    )


def _cache(account: Account) -> Table:
    layers = account.config.full_layers
    note = (
        f"full indexer layers: {len(layers)} of {account.config.num_hidden_layers} "
        f"({', '.join(map(str, layers))})"
    )
    work, sheet = account.workload, account.kv
    token = sheet["kv_bytes_per_token"]
    rows = _figures(sheet.figures.values())
    for tokens in dict.fromkeys((work.context, account.config.max_position_embeddings)):
        rows.append((f"cache of {tokens:,} tokens", units.memory(tokens * token), ""))
    return Table("Cache, on each rank that holds the request", ("", "size", "name"), rows, note)


def _stored(account: Account) -> Table:
    return Table(
        "Loaded weights of a rank",
        ("part", "bytes", "name"),
        _figures(
            figure
            for name, figure in account.stored.figures.items()
            if name.startswith("stored") and (figure.value or name == "stored_bytes")
        ),
    )


def _step(account: Account) -> Table:
    step = account.step
    total = step.bytes_read
    rows = [
        (name, units.size(value), f"{value / total:.1%}")
        for name, value in sorted(step.bytes_by.items(), key=lambda item: -item[1])
    ]
    rows.append(("in all", units.size(total), "100.0%"))
    passes = ", ".join(f"{each.times} x {each.kind} ({each.rows} rows)" for each in step.passes)
    return Table(
        f"Bytes that a rank reads in a {_step_name(account)}",
        ("part", "bytes", "share"),
        rows,
        f"passes, with the rows of one rank: {passes}",
    )


def _step_name(account: Account) -> str:
    work = account.workload
    return f"step with MTP {work.steps}-1-{work.tokens}" if work.drafts else "decode step"


def _bound(account: Account) -> Table:
    bound, hardware = account.step.bound, account.hardware
    rows = [
        ("reading", units.milliseconds(bound.memory.value), hardware.bandwidth.origin),
        ("computing", units.milliseconds(bound.compute.value), "datasheet peak, dense"),
        ("bound of the step", units.milliseconds(bound.bound_ms), f"by {bound.limit}"),
        (
            "collectives, not overlapped",
            units.milliseconds(bound.communication.value),
            f"link {hardware.link.origin}, launch latency estimated"
            + ("; between machines the network" if account.topology.tp > hardware.gpus else ""),
        ),
    ]
    origin = "all ranks, at the bound; decode only, without prefill"
    if not account.fits:
        origin += f"; {_misfit(account)}"
    for name, text in (
        ("tokens_per_second", "tokens a second, collectives hidden"),
        ("tokens_per_second_exposed", "tokens a second, none hidden"),
    ):
        if name in account.totals.figures:
            rows.append((text, f"{account.totals[name]:,.0f}", origin))
    if account.break_even is not None:
        rows.append(
            (
                "accept length at which MTP breaks even",
                f"{account.break_even.value:.2f}",
                f"against a decode step of {units.milliseconds(account.decode.bound.bound_ms)}",
            )
        )
    note = ""
    if account.step.tokens is None:
        note = "no tokens a second: what a step with MTP yields must be measured; give --accept"
        note += "" if account.fits else f". {_misfit(account)}"
    return Table(f"Bound of a {_step_name(account)}", ("", "value", "from"), rows, note)


def _misfit(account: Account) -> str:
    """That the batch does not fit, in words."""
    work, fits = account.workload, account.capacity["concurrent"]
    return f"{work.batch:,} requests of {work.context:,} tokens DO NOT FIT: {fits:,} do"


COLLECTIVE_HEAD = (
    *("pass", "where", "layers", "kind", "group", "shape", "count", "bytes each"),
    *("bytes in all", "busiest rank, one way", "time"),
)


def _collectives(account: Account) -> Table:
    step = account.step
    rows = [
        _collective(account, f"{times} x {each.kind}", times, row)
        for times, each, row in step.collectives
    ]
    figure = account.totals.figures.get("collective_bytes_per_token")
    each = f"; for a generated token {units.size(figure.value)}" if figure else ""
    note = (
        f"in a step: {step.collective_count} collectives, {units.size(step.collective_bytes)}; "
        f"one way through the busiest rank {units.size(step.busiest_bytes)}{each}. "
        "time: the link's and a launch latency each, one after another"
    ) + _crossing_note(account, [(times, row) for times, _, row in step.collectives])
    return Table(f"Collectives of a {_step_name(account)}", COLLECTIVE_HEAD, rows, note)


def _crossing_note(account: Account, rows: list[tuple[int, Collective]]) -> str:
    """What leaves a machine, where the ranks are of several; else nothing."""
    gpus = account.hardware.gpus
    crossing = sum(times * row.count * row.crossing(gpus) for times, row in rows)
    if not crossing:
        return ""
    return (
        f". {account.topology.tp} ranks on machines of {gpus} linked GPUs: "
        f"{units.size(crossing)} go through the busiest rank's network port at "
        f"{account.hardware.network.best_known / 1e9:g} GB/s ({account.hardware.network.origin}; a "
        "ring's share is spread over a machine's ports, dispatch and combine use the rank's own); "
        "each collective takes the slower of link and network"
    )


def _collective(account: Account, kind: str, times: int, row: Collective) -> tuple[str, ...]:
    hardware = account.hardware
    spent = row.milliseconds(hardware)
    return (
        kind,
        row.where,
        row.layers,
        row.kind,
        f"{row.group} {row.ranks}",
        " x ".join(map(str, row.shape)),
        str(times * row.count),
        units.size(row.bytes.value),
        units.size(times * row.total_bytes),
        units.size(times * row.total_busiest),
        units.milliseconds(times * spent),
    )


_LAYER_TITLES = {
    "dense": "a dense layer (the first {dense}; full indexer)",
    "full": "a full MoE layer",
    "shared": "a shared MoE layer (takes the selection from above)",
}


def _operators(account: Account, kind: str) -> Table:
    title = _LAYER_TITLES[kind].format(dense=account.config.first_k_dense_replace)
    found = account.layer(kind)  # type: ignore[arg-type]
    rows = [_operator(each) for each in found]
    totals = [
        sum(column) for column in zip(*((o.flops.value, o.bytes) for o in found), strict=True)
    ]
    rows.append(("in all", "", units.flops(totals[0]), "", "", units.size(totals[1]), "", ""))
    return Table(
        f"Operators of {title}, one rank, plain decode",
        ("operator", "shape", "FLOPs", "weights", "cache", "bytes", "FLOP/B", "file"),
        rows,
    )


def _operator(each: Operator) -> tuple[str, ...]:
    return (
        each.name,
        each.shape,
        units.flops(each.flops.value) if each.flops.value else "-",
        units.size(each.weights.value) if each.weights.value else "-",
        units.size(each.cache.value) if each.cache.value else "-",
        units.size(each.bytes),
        f"{each.intensity:.1f}" if each.flops.value else "-",
        each.file,
    )


def _prefill(account: Account) -> Table:
    passes = account.prefill
    hardware, work = account.hardware, account.workload
    total: dict[tuple[str, ...], list[float]] = {}
    for each in passes:
        for row in each.collectives:
            key = (row.where, row.layers, row.kind, f"{row.group} {row.ranks}")
            spent = row.milliseconds(hardware)
            sums = total.setdefault(key, [0, 0, 0, 0])
            for index, value in enumerate((row.count, row.total_bytes, row.total_busiest, spent)):
                sums[index] += value
    rows = [
        (
            *key,
            f"{int(sums[0])}",
            units.size(sums[1]),
            units.size(sums[2]),
            units.milliseconds(sums[3]),
        )
        for key, sums in total.items()
    ]
    bound = account.prefill_bound
    flops = sum(each.flops for each in passes)
    note = (
        f"{len(passes)} pass{'es' if len(passes) > 1 else ''} of at most {work.chunk:,} tokens"
        + (
            f" of an attention group (--chunked-prefill-size {work.chunk * groups}: SGLang divides "
            f"it by the {groups} groups), "
            if (groups := account.topology.dp) > 1
            else f" (--chunked-prefill-size {work.chunk}), "
        )
        + f"{units.flops(flops)} a rank; "
        f"bound {units.milliseconds(bound.bound_ms)} by {bound.limit}"
    ) + _crossing_note(account, [(1, row) for each in passes for row in each.collectives])
    head = ("where", "layers", "kind", "group", "count", "bytes", "busiest rank, one way", "time")
    if not rows:
        rows = [("none: one rank", "", "", "", "", "", "", "")]
    return Table(f"Prefill of {work.prompt:,} tokens", head, rows, note)


def _capacity(account: Account) -> Table:
    note = "" if account.fits else _misfit(account)
    return Table(
        f"What fits at --mem-fraction-static {account.mem_fraction:g}",
        ("", "", "name"),
        _figures(account.capacity.figures.values()),
        note,
    )


def _beside(account: Account) -> Table:
    sheet, room = account.beside, account.capacity["outside"]
    note = (
        "not counted: activations and the graphs' own memory; the recorded slices had 3.5 GiB for "
        "a prefill graph of 8,192 tokens and 0.2 GiB for verifying 8 requests"
    )
    if sheet["needed"] > room:
        note = f"{units.memory(room)} are kept free, which is less than that; {note}"
    shown = [
        figure
        for name, figure in sheet.figures.items()
        if figure.value and not name.endswith("_message")
    ]
    return Table("Beside weights and cache", ("", "", "name"), _figures(shown), note)


# --- two topologies ------------------------------------------------------------------------------


def compare(left: Account, right: Account) -> list[Table]:
    """Two topologies beside each other, and their collectives."""
    entries: list[tuple[str, Callable[[Account], str]]] = [
        ("heads of a rank", lambda a: str(a.config.num_attention_heads // a.topology.attn_tp)),
        ("routed experts of a rank", lambda a: str(a.config.n_routed_experts // a.topology.ep)),
        ("ranks that hold a request's cache", lambda a: str(a.topology.attn_tp)),
        ("loaded weights", lambda a: units.memory(a.stored["stored_bytes"])),
        ("cache of a token", lambda a: f"{a.kv['kv_bytes_per_token']:,} B"),
        ("read in a step", lambda a: units.size(a.step.bytes_read)),
        ("FLOPs in a step", lambda a: units.flops(a.step.flops)),
        ("bound of a step", lambda a: units.milliseconds(a.step.bound.bound_ms)),
        ("bound by", lambda a: a.step.bound.limit),
        ("collectives in a step", lambda a: str(a.step.collective_count)),
        ("their bytes", lambda a: units.size(a.step.collective_bytes)),
        ("one way, busiest rank", lambda a: units.size(a.step.busiest_bytes)),
        (
            "their time, not overlapped",
            lambda a: units.milliseconds(a.step.bound.communication.value),
        ),
        (
            "bytes for a generated token",
            lambda a: _total(a, "collective_bytes_per_token", units.size),
        ),
        (
            "tokens a second of decode, collectives hidden",
            lambda a: _total(a, "tokens_per_second", _tokens(a)),
        ),
        (
            "tokens a second of decode, none hidden",
            lambda a: _total(a, "tokens_per_second_exposed", _tokens(a)),
        ),
        ("the batch fits", lambda a: "yes" if a.fits else f"NO: {a.capacity['concurrent']:,} do"),
        ("tokens that a rank's cache holds", lambda a: f"{a.capacity['pool_tokens']:,}"),
        ("requests of this context, all ranks", lambda a: f"{a.capacity['concurrent']:,}"),
        ("accept length at which MTP breaks even", _break_even),
        ("prefill: collectives", lambda a: str(_prefill_sum(a)[0])),
        ("prefill: one way, busiest rank", lambda a: units.size(_prefill_sum(a)[1])),
        ("prefill: bound", lambda a: units.milliseconds(a.prefill_bound.bound_ms)),
        (
            "prefill: collectives' time, not overlapped",
            lambda a: units.milliseconds(a.prefill_bound.communication.value),
        ),
    ]
    rows = [(title, value(left), value(right)) for title, value in entries]
    names = (left.topology.name, right.topology.name)
    work = left.workload
    return [
        Table(
            f"{names[0]} and {names[1]}: {work.batch:,} requests of {work.context:,} tokens",
            ("", *names),
            [row for row in rows if any(cell != "-" for cell in row[1:])],
        ),
        *(
            Table(f"{table.title}, {account.topology.name}", table.head, table.rows, table.note)
            for account in (left, right)
            if (table := _collectives(account)).rows
        ),
    ]


def _total(account: Account, name: str, form: Callable[[float], str]) -> str:
    figure = account.totals.figures.get(name)
    return "-" if figure is None else form(figure.value)


def _tokens(account: Account) -> Callable[[float], str]:
    """How tokens a second are written: marked where the batch does not fit."""
    return lambda value: f"{value:,.0f}" + ("" if account.fits else " (does not fit)")


def _break_even(account: Account) -> str:
    return "-" if account.break_even is None else f"{account.break_even.value:.2f}"


def _prefill_sum(account: Account) -> tuple[int, float]:
    rows = [row for each in account.prefill for row in each.collectives]
    return sum(row.count for row in rows), sum(row.total_busiest for row in rows)


# --- JSON ----------------------------------------------------------------------------------------


def to_json(account: Account) -> dict[str, Any]:
    """The account as JSON values. Bytes, milliseconds and counts are numbers; formulas are text."""
    step, gpus = account.step, account.hardware.gpus
    return {
        "parameters_total": account.parameters["parameters_total"],
        "parameters_with_mtp": account.parameters["parameters_with_mtp"],
        "parameters_active": account.parameters["parameters_active"],
        "kv_bytes_per_token": account.kv["kv_bytes_per_token"],
        "page_bytes": account.kv["page_bytes"],
        "full_indexer_layers": len(account.config.full_layers),
        "full_indexer_layer_ids": list(account.config.full_layers),
        "stored_bytes_per_rank": account.stored["stored_bytes"],
        "loaded_bytes_per_rank": account.loaded.total,
        "collectives_per_step": step.collective_count,
        "collective_bytes_per_step": step.collective_bytes,
        "collective_bytes_per_token": _total_json(account, "collective_bytes_per_token"),
        "tokens_per_second": _total_json(account, "tokens_per_second"),
        "tokens_per_second_exposed": _total_json(account, "tokens_per_second_exposed"),
        "fits": account.fits,
        "busiest_bytes_per_rank": step.busiest_bytes,
        "step_bytes_per_rank": step.bytes_read,
        "step_flops_per_rank": step.flops,
        "bound_ms": step.bound.bound_ms,
        "bound_by": step.bound.limit,
        "communication_ms": step.bound.communication.value,
        "pool_tokens": account.capacity["pool_tokens"],
        "concurrent_requests": account.capacity["concurrent"],
        "break_even_accept": None if account.break_even is None else account.break_even.value,
        "topology": asdict(account.topology),
        "workload": asdict(account.workload),
        "hardware": account.hardware.name,
        "kv_note": cache_option(account),
        "mem_fraction": account.mem_fraction,
        "step": _step_json(step, gpus),
        "decode_step": _step_json(account.decode, gpus),
        "prefill": {
            "passes": [
                {
                    "rows": each.rows,
                    "flops": each.flops,
                    "collectives": [_collective_json(row, gpus) for row in each.collectives],
                }
                for each in account.prefill
            ],
            "bound_ms": account.prefill_bound.bound_ms,
            "bound_by": account.prefill_bound.limit,
            "communication_ms": account.prefill_bound.communication.value,
        },
        "operators": {
            kind: [_operator_json(each) for each in account.layer(kind)] for kind in KINDS
        },
        "figures": [_figure_json(figure) for figure in account.figures()],
    }


def _total_json(account: Account, name: str) -> float | None:
    figure = account.totals.figures.get(name)
    return None if figure is None else figure.value


def _step_json(step: Step, gpus: int) -> dict[str, Any]:
    return {
        "passes": [
            {
                "kind": each.kind,
                "times": each.times,
                "rows": each.rows,
                "flops": each.flops,
                "collectives": [_collective_json(row, gpus) for row in each.collectives],
            }
            for each in step.passes
        ],
        "bytes_by": step.bytes_by,
        "bound_ms": step.bound.bound_ms,
        "tokens": step.tokens,
    }


def _collective_json(row: Collective, gpus: int) -> dict[str, Any]:
    return {
        "where": row.where,
        "layers": row.layers,
        "kind": row.kind,
        "group": row.group,
        "ranks": row.ranks,
        "count": row.count,
        "shape": list(row.shape),
        "bytes": row.bytes.value,
        "sent_bytes": row.sent.value,
        "received_bytes": row.received.value,
        "network_bytes": row.crossing(gpus),
        "formula": row.bytes.formula,
        "source": row.source,
    }


def _operator_json(each: Operator) -> dict[str, Any]:
    return {
        "name": each.name,
        "file": each.file,
        "shape": each.shape,
        "flops": each.flops.value,
        "weight_bytes": each.weights.value,
        "cache_bytes": each.cache.value,
        "activation_bytes": each.activations.value,
        "flops_per_byte": each.intensity,
    }


def _figure_json(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "title": figure.title,
        "value": figure.value,
        "unit": figure.unit,
        "formula": figure.formula,
        "numbers": figure.numbers,
        "source": figure.source,
    }


# --- explain -------------------------------------------------------------------------------------


def all_figures(account: Account) -> list[Figure]:
    """Every figure that can be explained: the sheets', the operators' and the collectives'."""
    found = list(account.figures())
    for kind in KINDS:
        for each in account.layer(kind):
            for figure in (each.flops, each.weights, each.cache, each.activations):
                if figure.value:
                    found.append(_renamed(figure, f"{kind} layer, {figure.title}"))
    for _, each, row in account.step.collectives:
        for figure in (row.bytes, row.sent, row.received):
            found.append(_renamed(figure, f"{each.kind}, {row.layers or 'once'}, {figure.title}"))
    return found


def _renamed(figure: Figure, title: str) -> Figure:
    return Figure(
        title, figure.value, figure.unit, title, figure.formula, figure.inputs, figure.source
    )


def explain(account: Account, wanted: str) -> str:
    """Formula, numbers and source of every figure whose name or title holds `wanted`; `all`: all.

    Raises:
        Glm53Error: there is none; the line names the nearest.
    """
    figures = all_figures(account)
    exact = [each for each in figures if each.name == wanted]
    found = exact or [
        each
        for each in figures
        if wanted == "all" or wanted.lower() in f"{each.name} {each.title}".lower()
    ]
    if not found:
        near = difflib.get_close_matches(wanted, [each.name for each in figures], 3, 0.4)
        advice = f"nearest: {', '.join(near)}" if near else "`--explain all` prints every one"
        raise Glm53Error(f"no figure is called {wanted!r}; {advice}")
    return "\n\n".join(explain_figure(each) for each in found)


def explain_figure(figure: Figure) -> str:
    """One figure: value, formula, the same with numbers, source."""
    exact = f" = {figure.value:,} {figure.unit}" if isinstance(figure.value, int) else ""
    lines = [f"{figure.title}: {units.figure(figure)}{exact}"]
    if figure.name != figure.title:
        lines[0] = f"{figure.name}: {lines[0]}"
    lines.append(f"  = {figure.formula}")
    if figure.inputs:
        lines.append(f"  = {figure.numbers}")
    if figure.source:
        lines.append(f"  {figure.source}")
    return "\n".join(lines)
