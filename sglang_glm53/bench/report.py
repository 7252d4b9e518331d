"""From the results of the jobs to rows, to JSON, and to a table that is read in a terminal."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sglang_glm53.bench import step_bytes
from sglang_glm53.bench.jobs import Outcome
from sglang_glm53.bench.plan import Options
from sglang_glm53.bench.served import SIDES
from sglang_glm53.bench.trace import IDLE
from sglang_glm53.config import Glm53Config

NAMES = {"decode": "decode", "mtp": "mtp_step", "prefill": "prefill"}
KERNELS_KEPT = 60
HEAD = (
    *("work", "batch", "context", "stock ms", "ours ms", "ours/stock"),
    *("bound ms", "stock/bound", "ours/bound", "launches stock", "ours"),
)


def build_rows(
    outcomes: Sequence[Outcome], options: Options, config: Glm53Config, width: float, speed: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each work, graph and batch, and lines about what must not differ but does.

    Args:
        config, width: of the slice that decode and MTP ran on.
        speed: measured bytes a second.
    """
    parts: dict[tuple[str, str, int], dict[str, list[dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    per_side: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        kind, side = outcome.job.kind, outcome.job.side
        if kind not in NAMES or side is None:
            continue
        per_side[kind, side].append(outcome.result)
        for row in outcome.result.get("rows") or ():
            graph = outcome.job.spec.get("graph", "")
            parts[kind, graph, row["batch"]][side].append(row)
    starts = startup_seconds(outcomes)
    rows, errors = [], []
    for (kind, graph, batch), sides in parts.items():
        row: dict[str, Any] = {
            "work": NAMES[kind],
            "batch": batch,
            "context": next(iter(sides.values()))[0]["context"],
        }
        if kind == "prefill":
            row.update(graph=graph, layers=options.prefill_layers, chunk=options.prefill_chunk)
        else:
            row["layers"] = config.num_hidden_layers
        row.update(_bound(kind, batch, options, config, width, speed))
        for side in SIDES:
            row.update(_of_side(kind, side, sides.get(side, []), per_side[kind, side]))
            row[f"startup_{side}_s"] = _median(starts[side])
        row["ratio"] = _over(row["ours_ms"], row["stock_ms"])
        if kind == "decode" and options.device == "cuda":  # only there is the routing simulated
            errors += _compare_experts(row)
        rows.append(row)
    return rows, errors


def startup_seconds(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds of every start of an Engine, by side."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for outcome in outcomes:
        seconds = outcome.result.get("startup_seconds")
        if outcome.job.side in found and seconds is not None:
            found[outcome.job.side].append(seconds)
    return found


def _bound(
    kind: str, batch: int, options: Options, config: Glm53Config, width: float, speed: float
) -> dict[str, Any]:
    """The bytes that the step must read and the time that takes; None for a prefill, which is
    bound by arithmetic."""
    if kind == "prefill":
        return {"bound_ms": None}
    shape: dict[str, Any] = {
        "batch": batch,
        "context": options.context,
        "kv": step_bytes.kv_kind(options.kv_cache_dtype),
        "width": width,
    }
    if kind == "mtp":
        parts = step_bytes.mtp_step(
            config, steps=options.mtp_steps, tokens=options.mtp_tokens, **shape
        )
        rows = batch * options.mtp_tokens
    else:
        parts = step_bytes.decode_step(config, **shape)
        rows = batch
    total = sum(parts.values())
    return {
        "bound_ms": total / speed * 1e3,
        "bytes": round(total),
        "bytes_by": {name: round(value) for name, value in parts.items()},
        "distinct_experts": step_bytes.round_robin_experts(rows, config),
    }


def _of_side(
    kind: str, side: str, rows: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A side's columns of one row, over all rounds."""
    found: dict[str, Any] = {
        f"{side}_ms": _median([row["ms"] for row in rows]),
        f"{side}_raw_ms": [row["raw_ms"] for row in rows],
        f"launches_{side}": _median([row.get("launches") for row in rows]),
        f"kv_tokens_{side}": _median([result.get("kv_tokens") for result in results]),
        f"served_{side}": next((r["served"]["model"] for r in results if r.get("served")), None),
        f"memory_gib_{side}": max(
            ((r.get("memory") or {}).get("used_gib", 0.0) for r in results), default=0.0
        )
        or None,
    }
    for name in ("pipelined_ms", "tpot_ms", "accept_length"):
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            found[f"{side}_{name}"] = statistics.median(values)
    for name in ("kernels", "distinct_experts", "trace_error"):
        values = [row[name] for row in rows if row.get(name)]
        if values:
            found[f"{name}_{side}"] = values[-1][:KERNELS_KEPT] if name == "kernels" else values[-1]
    if kind == "prefill":
        found[f"graph_replayed_{side}"] = any(row.get("graph") for row in rows) if rows else None
    return found


def _compare_experts(row: dict[str, Any]) -> list[str]:
    """Lines for a row whose sides read different experts, or not as many as the bound counts."""
    counted = {side: row.get(f"distinct_experts_{side}") for side in SIDES}
    where = f"decode, batch {row['batch']}"
    lines = []
    for side, counts in counted.items():
        if isinstance(counts, str):
            lines.append(f"{where}: the experts that {side} reads could not be counted: {counts}")
            counted[side] = None
        elif counts == []:
            counted[side] = None  # a slice of dense layers
    stock, ours = counted["stock"], counted["ours"]
    if stock is not None and ours is not None and stock != ours:
        lines.append(
            f"{where}: the sides read different experts: stock {_few(stock)}, ours {_few(ours)} "
            "distinct ones a layer, so their times do not compare"
        )
    for side, counts in counted.items():
        if counts and set(counts) != {row["distinct_experts"]}:
            lines.append(
                f"{where}: {side} reads {_few(counts)} distinct experts a layer where the bound "
                f"counts {row['distinct_experts']}"
            )
    return lines


def _few(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def render(report: dict[str, Any]) -> str:
    """The report of `glm53 bench slice --json` as text."""
    lines = [*_header(report), ""]
    lines += _table([HEAD, *(_cells(row) for row in report.get("rows") or ())])
    notes = _notes(report)
    if notes:
        lines += ["", *notes]
    lines += [f"error: {line}" for line in report.get("errors") or ()]
    return "\n".join(lines)


def render_kernels(report: dict[str, Any], *, most: int = 40) -> str:
    """The kernels of both sides beside each other, for each row that has them."""
    lines: list[str] = []
    for row in report.get("rows") or ():
        tables = {
            side: {name: tuple(rest) for name, *rest in row.get(f"kernels_{side}") or ()}
            for side in SIDES
        }
        if not any(tables.values()):
            continue
        names = {name for table in tables.values() for name in table}
        weight = {name: max(_weight(each) for each in _present(tables, name)) for name in names}
        shown = sorted(names, key=lambda name: -weight[name])[:most]
        columns = ("calls", "us a call", "us a step", "exposed")
        cells = [tuple(f"{side} {column}" for side in SIDES for column in columns)]
        for name in shown:
            cells.append(
                tuple(cell for side in SIDES for cell in _kernel_cells(tables[side].get(name)))
            )
        sums = "; ".join(f"{side} {_sums(tables[side])}" for side in SIDES if tables[side])
        lines += ["", f"{row['work']}, batch {row['batch']}: kernels of a step ({sums})"]
        for line, name in zip(_table(cells), ["kernel", *shown], strict=True):
            lines.append(f"{line}  {name[:90]}")
    return "\n".join(lines)


def _kernel_cells(kernel: tuple[float, ...] | None) -> list[str]:
    """calls, us a call, us a step, exposed us a step; the last is not in older reports."""
    if kernel is None:
        return ["-"] * 4
    calls, us, *exposed = kernel
    last = f"{calls * exposed[0]:.0f}" if exposed else "-"
    return [f"{calls:g}", f"{us:.1f}", f"{calls * us:.0f}", last]


def _weight(kernel: tuple[float, ...]) -> float:
    """Microseconds a step, exposed ones where they are known."""
    return kernel[0] * kernel[-1]


def _sums(table: dict[str, tuple[float, ...]]) -> str:
    """All kernels' times a step, and the time that passed."""
    busy = sum(calls * us for name, (calls, us, *_) in table.items() if name != IDLE) / 1e3
    if any(len(kernel) < 3 for kernel in table.values()):
        return f"{busy:.2f} ms busy, overlapping kernels counted each"
    idle = table.get(IDLE, (0.0, 0.0))
    passed = sum(map(_weight, table.values())) / 1e3
    return f"{passed:.2f} ms, {idle[0] * idle[1] / 1e3:.2f} of them idle; {busy:.2f} busy in all"


def _present(tables: dict[str, dict[str, tuple[float, ...]]], name: str) -> list[tuple[float, ...]]:
    return [table[name] for table in tables.values() if name in table]


def _header(report: dict[str, Any]) -> list[str]:
    machine, versions = report.get("machine") or {}, report.get("versions") or {}
    wanted = ("sglang", "torch", "sglang-kernel", "deep_gemm", "flash_mla", "flashinfer")
    known = [f"{name} {versions[name]}" for name in wanted if versions.get(name)]
    speed = (report.get("bandwidth") or {}).get("bytes_per_second")
    options = report.get("options") or {}
    return [
        f"{machine.get('gpu') or 'no GPU'}, {machine.get('gpu_memory_gib')} GiB, driver "
        f"{machine.get('driver')}, {machine.get('host_cpus')} CPUs; {report.get('date')}",
        f"sglang-glm53 {versions.get('sglang_glm53')}; {', '.join(known)}",
        f"slice of {options.get('layers')} layers and {options.get('experts')} experts, "
        f"KV {options.get('kv_cache_dtype')}; memory copies "
        + (f"{speed / 1e12:.2f} TB/s (read and written)" if speed else "not measured"),
    ]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    work = row["work"] + (f" ({row['graph']} graph)" if row.get("graph") else "")
    bound = row.get("bound_ms")
    return (
        work,
        str(row["batch"]),
        str(row["context"]),
        _number(row["stock_ms"]),
        _number(row["ours_ms"]),
        _number(_over(row["ours_ms"], row["stock_ms"]), 3),
        _number(bound),
        _number(_over(row["stock_ms"], bound)),
        _number(_over(row["ours_ms"], bound)),
        _number(row.get("launches_stock"), 0),
        _number(row.get("launches_ours"), 0),
    )


def _notes(report: dict[str, Any]) -> list[str]:
    """What stands beside the times: tokens, cache, memory, start-up."""
    lines = []
    for row in report.get("rows") or ():
        if row.get("stock_pipelined_ms") or row.get("ours_pipelined_ms"):
            lines.append(
                f"decode, batch {row['batch']}, steps enqueued one behind another: stock "
                f"{_number(row.get('stock_pipelined_ms'))} ms, ours "
                f"{_number(row.get('ours_pipelined_ms'))} ms"
            )
        if row["work"] == "mtp_step":
            each = [
                f"{side} {_number(row.get(f'{side}_tpot_ms'))} ms a token at accept length "
                f"{_number(row.get(f'{side}_accept_length'))}"
                for side in SIDES
                if row.get(f"{side}_ms") is not None
            ]
            lines.append(f"MTP, batch {row['batch']}: {', '.join(each)}")
    seen = set()
    for row in report.get("rows") or ():
        pair = [row.get(f"kv_tokens_{side}") for side in SIDES]
        memory = [row.get(f"memory_gib_{side}") for side in SIDES]
        key = (row["work"], *pair)
        if any(pair) and key not in seen:
            seen.add(key)
            lines.append(
                f"{row['work']}: KV tokens stock {_number(pair[0], 0)}, ours "
                f"{_number(pair[1], 0)}; GPU memory in use stock {_number(memory[0], 1)}, ours "
                f"{_number(memory[1], 1)} GiB"
            )
    startup = report.get("startup") or {}
    if any(startup.get(f"{side}_s") is not None for side in SIDES):
        counts = [len(startup.get(f"{side}_raw_s") or ()) for side in SIDES]
        lines.append(
            f"start-up: stock {_number(startup.get('stock_s'), 1)} s, ours "
            f"{_number(startup.get('ours_s'), 1)} s (medians of {counts[0]} and {counts[1]})"
        )
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column == 0 and rows[0][0] == "work" else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
