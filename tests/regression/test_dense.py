"""Dense attention in place of sparse: the indexer loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from server.harness import Server

from . import checks
from . import measurements as m
from .recall import Tally, make_haystacks
from .settings import DENSE, SEED, WHOLE_PLAIN, Amount, Setting
from .switch import Switch
from .test_plain import expect

pytestmark = [pytest.mark.server("regression dense"), pytest.mark.slow]


def test_dense_against_sparse(
    start: Callable[..., tuple[Server, Switch]], tasks: Any, amount: Amount
) -> None:
    """The same prompts, each prefilled whole, with index_topk as it is and above every length."""
    if not amount.full:
        pytest.skip("half a point needs more prompts: GLM53_REGRESSION_PROMPTS above 10")

    def ask(setting: Setting) -> Tally:
        server, _ = start(setting)
        prefilled, hits = m.recall_with_hits(server, make_haystacks(tasks, amount.recall, SEED))
        print(f"{setting.name}: {prefilled.as_json()}\nhits {hits.as_json()}")
        expect([*checks.recall(setting.name, prefilled), *checks.recall("hits", hits)])
        return prefilled

    sparse, dense = ask(WHOLE_PLAIN), ask(DENSE)
    expect(
        [
            checks.dense_gap(context, sparse.accuracy(context), dense.accuracy(context))
            for context in sparse.contexts()
        ]
    )
