"""Starts one server of `measure.py` and takes all that its setting reaches."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.harness import Server

from . import checks, planted, settings
from . import measurements as m
from .recall import first_haystacks, make_haystacks
from .report import Found, Job, Report
from .settings import Amount


@dataclass
class Args:
    """What one call measures with."""

    out: Path
    checkpoint: Path
    on_gpu: bool
    faults: bool
    amount: Amount
    tasks: Any
    config: dict[str, Any]
    report: Report


def run_job(job: Job, args: Args) -> Found:
    """Start the job's server, measure, stop it; an error is part of what was found."""
    found = Found(job)
    began = time.monotonic()
    server: Server | None = None
    try:
        extra: tuple[str, ...] = settings.ON_GPU if args.on_gpu else ()
        if job.kv is not None:
            extra += ("--kv-cache-dtype", job.kv)
        if args.on_gpu and not job.setting.evicts:
            extra += settings.CACHE_ON_GPU
        folder = args.out / "logs" / job.name.replace(" ", "-")
        server, switch = settings.launch(
            job.setting,
            args.checkpoint,
            folder,
            switchable=args.faults,
            arguments=extra,
            side=job.side,
        )
        found.record["started_seconds"] = round(server.ready_after, 1)
        if args.faults:
            measure_faults(planted.Bench(server, switch, args.tasks, args.config), job, args.report)
        else:
            measure(server, found, args.amount, args.tasks, args.config)
    except Exception as error:
        traceback.print_exc()
        found.error = " ".join(str(error).split())[:300] or type(error).__name__
    finally:
        if server is not None:
            server.kill()
    found.record["total_seconds"] = round(time.monotonic() - began, 1)
    print(f"{job.name}: {found.error or 'measured'}, {found.record['total_seconds']} s", flush=True)
    args.report.keep(found)
    return found


def measure(server: Server, found: Found, amount: Amount, tasks: Any, config: Any) -> None:
    """Everything that the setting reaches, into `found` as it comes."""
    setting, name = found.job.setting, found.job.name
    haystacks = make_haystacks(tasks, amount.recall, settings.SEED)

    def timed(what: str, began: float) -> None:
        found.record.setdefault("seconds", {})[what] = round(time.monotonic() - began, 1)

    began = time.monotonic()
    prefilled, hits = m.recall_with_hits(server, haystacks, setting.ranks)
    found.prefilled = prefilled
    found.record |= {"recall": prefilled.as_json(), "hits": hits.as_json()}
    found.checks += [*checks.recall(name, prefilled), *checks.recall(f"{name}, hits", hits)]
    timed("recall", began)
    if setting.evicts:
        began = time.monotonic()
        again = m.recall_after_eviction(server, first_haystacks(haystacks, amount.again))
        found.record["after_eviction"] = again.as_json()
        found.checks += checks.recall(f"{name}, after eviction", again)
        timed("after_eviction", began)
    if setting.shows_selections:
        began = time.monotonic()
        chosen = [haystack[0] for haystack in first_haystacks(haystacks, amount.selected)]
        selected = m.planted_in_selection(server, chosen, config)
        found.record["selected"] = {str(k): one.as_json() for k, one in selected.items()}
        found.checks += checks.planted(name, selected, config["index_topk"])
        timed("selected", began)
    if setting is settings.DENSE or setting is settings.DENSE_ON_GPU:
        return
    began = time.monotonic()
    prompts = m.passages(tasks, amount.copies, settings.COPY_LENGTH, settings.SEED)
    copies = m.copying(server, prompts)
    found.record["copying"] = copies.as_json()
    found.checks.append(checks.copied(name, copies))
    if setting.speculates:
        found.checks.append(checks.accept_length(name, copies))
    timed("copying", began)
    if setting.retracts:
        began = time.monotonic()
        copies = m.copying_with_retraction(server, prompts)
        found.record["retraction"] = copies.as_json()
        found.checks.append(checks.copied(f"{name}, retraction", copies))
        timed("retraction", began)
    if setting.chats:
        began = time.monotonic()
        share, wrong = m.chat_accuracy(server, m.conversations(tasks, amount.chats, settings.SEED))
        found.record["chat"] = {"share": share, "asked": amount.chats, "wrong": wrong}
        found.checks.append(checks.chat(name, share))
        timed("chat", began)


def measure_faults(bench: planted.Bench, job: Job, report: Report) -> None:
    """Every fault that the setting's server can show, healthy and faulty."""
    for one in planted.PLANTED:
        if one.speculates != job.setting.speculates:
            continue
        healthy = planted.measure(bench, one)
        faulty = planted.measure_faulty(bench, one)
        row = {"fault": one.fault, "seen": planted.noticed(one, healthy, faulty)}
        for name, shown in (("healthy", healthy), ("faulty", faulty)):
            row[name] = [check.as_json() for check in (*shown.judged, *shown.told)]
        with report.lock:
            report.faults.append(row)
            report.write()
        for before, after in zip(row["healthy"], row["faulty"], strict=True):
            values = f"{before['value']:8.4g} -> {after['value']:8.4g}"
            print(f"{one.fault:14} {before['name']:44} {values}", flush=True)
