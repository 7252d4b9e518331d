"""Two processes: TP 2, and attention DP 2 with MTP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from server.harness import Server

from . import checks
from . import measurements as m
from .recall import Plan, make_haystacks
from .settings import COPY_LENGTH, DP_2, DP_2_MTP, SEED, TP_2, TP_2_MTP, Amount, Setting
from .switch import Switch
from .test_plain import expect

pytestmark = pytest.mark.server("regression parallel")

IN_CI = (TP_2, DP_2_MTP)  # with the other two each is run with MTP and without


@pytest.mark.parametrize("setting", [TP_2, TP_2_MTP, DP_2, DP_2_MTP], ids=lambda one: one.name)
def test_two_processes(
    setting: Setting, start: Callable[..., tuple[Server, Switch]], tasks: Any, amount: Amount
) -> None:
    """Recall and copying on both ranks."""
    if setting not in IN_CI and not amount.full:
        pytest.skip("a full run's: GLM53_REGRESSION_PROMPTS above 10")
    server, _ = start(setting)
    haystacks = make_haystacks(tasks, plan_for(setting, amount), SEED)
    prefilled, hits = m.recall_with_hits(server, haystacks, ranks=setting.ranks)
    count = amount.copies if amount.full else 2
    copies = m.copying(server, m.passages(tasks, count, COPY_LENGTH, SEED), together=True)
    if setting.ranks > 1:
        assert prefilled.ranks == copies.ranks == set(range(setting.ranks))
    print(f"{setting.name}: {prefilled.as_json()}\nhits {hits.as_json()}\n{copies.as_json()}")
    found = [*checks.recall(setting.name, prefilled), checks.copied(setting.name, copies)]
    found += checks.recall(f"{setting.name}, hits", hits)
    if setting.speculates:
        found.append(checks.accept_length(setting.name, copies))
    expect(found)


def plan_for(setting: Setting, amount: Amount) -> Plan:
    """In CI the longest context is left to the servers of one process."""
    plan = amount.recall
    return plan if amount.full else dataclasses.replace(plan, contexts=plan.contexts[:-1])
