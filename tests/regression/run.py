"""Starts one server of `measure.py` and takes all that its setting reaches, in a process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.harness import Server

from . import checks, planted, settings
from . import measurements as m
from .recall import first_haystacks, make_haystacks
from .report import Found, Job
from .settings import Amount


@dataclass(frozen=True)
class Args:
    """What one call measures with."""

    out: Path
    checkpoint: Path
    on_gpu: bool
    faults: bool
    amount: Amount


def run_job(job: Job, args: Args) -> Found:
    """Start the job's server, measure, stop it; errors are part of what was found."""
    from miniature.tasks import Tasks
    from tokenizers import Tokenizer

    found = Found(job)
    began = time.monotonic()
    server: Server | None = None
    try:
        tasks = Tasks(Tokenizer.from_file(str(args.checkpoint / "tokenizer.json")))
        config = json.loads((args.checkpoint / "config.json").read_text())
        server, switch = settings.launch(
            job.setting,
            args.checkpoint,
            args.out / "logs" / job.name.replace(" ", "-"),
            switchable=args.faults,
            arguments=arguments_of(job, args.on_gpu),
            side=job.side,
        )
        found.record["started_seconds"] = round(server.ready_after, 1)
        if args.faults:
            measure_faults(planted.Bench(server, switch, tasks, config), found)
        else:
            Measured(server, found, args.amount, tasks, config).take_all()
    except Exception as error:
        found.fail("start", error)
    finally:
        if server is not None:
            server.kill()
    found.record["total_seconds"] = round(time.monotonic() - began, 1)
    said = "; ".join(found.errors) or "measured"
    print(f"{job.name}: {said}, {found.record['total_seconds']} s", flush=True)
    return found


def arguments_of(job: Job, on_gpu: bool) -> tuple[str, ...]:
    """What a job's server gets beside its setting's arguments."""
    given: tuple[str, ...] = settings.ON_GPU if on_gpu else ()
    if job.kv is not None:
        given += ("--kv-cache-dtype", job.kv)
    if on_gpu and not job.setting.evicts:
        given += settings.CACHE_ON_GPU
    return given


@dataclass
class Measured:
    """One server's measurements, into `found` as they come."""

    server: Server
    found: Found
    amount: Amount
    tasks: Any
    config: dict[str, Any]

    def take_all(self) -> None:
        """Everything that the setting reaches; what fails does not keep the rest from it."""
        setting = self.found.job.setting
        steps: tuple[tuple[bool, Callable[[], None]], ...] = (
            (True, self.recall),
            (setting.evicts, self.after_eviction),
            (setting.shows_selections, self.selected),
            (not setting.is_dense, self.copying),
            (setting.retracts, self.retraction),
            (setting.chats, self.chat),
        )
        for reached, step in steps:
            if not reached:
                continue
            began = time.monotonic()
            try:
                step()
            except Exception as error:
                self.found.fail(step.__name__, error)
            spent = self.found.record.setdefault("seconds", {})
            spent[step.__name__] = round(time.monotonic() - began, 1)

    def recall(self) -> None:
        self.haystacks = make_haystacks(self.tasks, self.amount.recall, settings.SEED)
        ranks = self.found.job.setting.ranks
        prefilled, hits = m.recall_with_hits(self.server, self.haystacks, ranks)
        self.found.prefilled = prefilled
        self._keep("recall", prefilled, checks.recall(self.name, prefilled))
        self._keep("hits", hits, checks.recall(f"{self.name}, hits", hits))

    def after_eviction(self) -> None:
        chosen = first_haystacks(self.haystacks, self.amount.again)
        again = m.recall_after_eviction(self.server, chosen)
        self._keep("after_eviction", again, checks.recall(f"{self.name}, after eviction", again))

    def selected(self) -> None:
        haystacks = first_haystacks(self.haystacks, self.amount.selected)
        found = m.planted_in_selection(self.server, [h[0] for h in haystacks], self.config)
        self.found.record["selected"] = {str(k): one.as_json() for k, one in found.items()}
        self.found.checks += checks.planted(self.name, found, self.config["index_topk"])

    def copying(self) -> None:
        copies = m.copying(self.server, self._passages())
        found = [checks.copied(self.name, copies)]
        if self.found.job.setting.speculates:
            found.append(checks.accept_length(self.name, copies))
        self._keep("copying", copies, found)

    def retraction(self) -> None:
        copies = m.copying_with_retraction(self.server, self._passages())
        self._keep("retraction", copies, [checks.copied(f"{self.name}, retraction", copies)])

    def chat(self) -> None:
        asked = m.conversations(self.tasks, self.amount.chats, settings.SEED)
        share, wrong = m.chat_accuracy(self.server, asked)
        self.found.record["chat"] = {"share": share, "asked": len(asked), "wrong": wrong}
        self.found.checks.append(checks.chat(self.name, share))

    @property
    def name(self) -> str:
        return self.found.job.name

    def _passages(self) -> list[Any]:
        return m.passages(self.tasks, self.amount.copies, settings.COPY_LENGTH, settings.SEED)

    def _keep(self, what: str, value: Any, found: list[checks.Check]) -> None:
        self.found.record[what] = value.as_json()
        self.found.checks += found


def measure_faults(bench: planted.Bench, found: Found) -> None:
    """Every fault that the setting's server can show, healthy and faulty."""
    for one in planted.PLANTED:
        if one.speculates != found.job.setting.speculates:
            continue
        try:
            healthy = planted.measure(bench, one)
            faulty = planted.measure_faulty(bench, one)
        except Exception as error:
            found.fail(one.fault, error)
            continue
        row: dict[str, Any] = {
            "fault": one.fault,
            "seen": planted.noticed(one, healthy, faulty),
        }
        for name, shown in (("healthy", healthy), ("faulty", faulty)):
            row[name] = [check.as_json() for check in (*shown.judged, *shown.told)]
        found.faults.append(row)
        for before, after in zip(row["healthy"], row["faulty"], strict=True):
            values = f"{before['value']:8.4g} -> {after['value']:8.4g}"
            print(f"{one.fault:14} {before['name']:44} {values}", flush=True)
