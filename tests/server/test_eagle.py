"""Speculation with the MTP layer: same tokens, same caches, the drafts of the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .comparing import NEAR_TIE, largest_difference, settled_prompt
from .conftest import FLOAT32
from .harness import Answer, Recording, Server, ServerPool

pytestmark = pytest.mark.server

NEW = 128  # the short prompt's answer leaves its page, and the reach of dense attention
SEEDS = {40: 1040, 300: 21_300}  # of a settled prompt a length
# steps, draft tokens, index sharing. One step drafts nothing on its own selection.
CASES = [
    pytest.param(case, marks=pytest.mark.server(f"eagle {name}"), id=name)
    for name, case in {
        "1-1-2-share1": (1, 2, True),
        "3-1-4-share1": (3, 4, True),
        "5-1-6-share1": (5, 6, True),
        "3-1-4-share0": (3, 4, False),
        "5-1-6-share0": (5, 6, False),
    }.items()
]
LOGPROB_TOLERANCE = 1e-5
# Equal up to the rounding of matrix products of another number of rows; a wrong or stale slot
# differs by the size of its entries, which is about 1.
CACHE_TOLERANCE = 1e-4
CLEAR_MARGIN = 1e-3  # logit margin under which a drafted token is a toss-up


def eagle_arguments(steps: int, tokens: int) -> tuple[str, ...]:
    """The flags of EAGLE steps-1-tokens."""
    return (
        "--speculative-algorithm",
        "EAGLE",
        "--speculative-num-steps",
        str(steps),
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        str(tokens),
    )


@pytest.fixture(scope="module")
def prompts(tiny_checkpoint: Callable[..., Path], reference: Callable) -> list[list[int]]:
    model = reference(tiny_checkpoint())
    return [settled_prompt(model, length, NEW, seed) for length, seed in SEEDS.items()]


@pytest.fixture(scope="module")
def mtp(tiny_checkpoint: Callable[..., Path], reference: Callable) -> object:
    """The reference draft layer."""
    from reference.mtp import ReferenceMtp

    return ReferenceMtp(reference(tiny_checkpoint()))


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest,
    servers: ServerPool,
    plain_runs: Callable,
    tiny_checkpoint: Callable[..., Path],
    prompts: list[list[int]],
) -> Case:
    """A configuration's answers and recordings, beside those without speculation."""
    steps, tokens, share = request.param
    plain = plain_runs(prompts, NEW)
    extra = () if share else ("--json-model-override-args", NO_SHARING)
    server = servers.get(tiny_checkpoint(), *FLOAT32, *eagle_arguments(steps, tokens), *extra)
    server.flush()
    answers = [server.generate([prompt], NEW)[0] for prompt in prompts]
    recordings = [server.recording(answer.rid) for answer in answers]
    return Case(server, steps, tokens, share, answers, recordings, *plain)


NO_SHARING = '{"index_share_for_mtp_iteration": false}'


class Case:
    """One speculation setting, run once."""

    def __init__(
        self,
        server: Server,
        steps: int,
        tokens: int,
        share: bool,
        answers: list[Answer],
        recordings: list[Recording],
        plain_answers: list[Answer],
        plain_recordings: list[Recording],
    ) -> None:
        self.server, self.steps, self.tokens, self.share = server, steps, tokens, share
        self.answers, self.recordings = answers, recordings
        self.plain_answers, self.plain_recordings = plain_answers, plain_recordings


def test_same_tokens_and_logprobs(case: Case) -> None:
    worst = max(map(largest_difference, case.answers, case.plain_answers))
    print(f"largest |delta log-probability| {worst:.2e}")
    assert worst <= LOGPROB_TOLERANCE


def test_accept_length(case: Case) -> None:
    """Between 2 and 5.5 tokens a step (a single step can give 2 at most), with rejects."""
    made = sum(len(answer.tokens) for answer in case.answers)
    steps = sum(answer.meta["spec_verify_ct"] for answer in case.answers)
    length = made / steps
    print(f"accept length {length:.2f}: {made} tokens in {steps} steps")
    assert length <= min(5.5, case.steps + 1)
    assert length >= (2 if case.steps > 1 else 1.4)
    accepted, rejected = 0, 0
    for answer in case.answers:
        for cached, _, draft in drafts(case.server, answer):
            good = answer.sequence[cached + 1 : cached + 1 + len(draft)]
            matches = [a == b for a, b in zip(draft, good, strict=False)]
            accepted += matches.count(True)
            rejected += matches.count(False)
    assert accepted and rejected, f"{accepted} accepted, {rejected} rejected drafts"


def test_target_caches_equal_those_without_speculation(case: Case) -> None:
    worst = 0.0
    for answer, mine, plain in zip(
        case.answers, case.recordings, case.plain_recordings, strict=True
    ):
        rows = len(answer.sequence) - 1  # the last token's slot is written when it is read
        worst = max(worst, caches_differ(mine, plain, "target", rows))
    print(f"target caches: largest difference {worst:.2e}")
    assert worst <= CACHE_TOLERANCE


def test_draft_caches_equal_a_fresh_prefill(case: Case) -> None:
    worst = 0.0
    for answer, mine in zip(case.answers, case.recordings, strict=True):
        case.server.flush()
        (fresh,) = case.server.generate([answer.sequence], 1)
        assert fresh.cached == 0
        # the draft's row p embeds token p + 1, so the last committed row is not comparable
        rows = mine.length - 1
        again = case.server.recording(fresh.rid)
        worst = max(worst, caches_differ(mine, again, "draft", rows))
    print(f"draft caches: largest difference {worst:.2e}")
    assert worst <= CACHE_TOLERANCE


def test_drafts_equal_the_reference(case: Case, mtp: object) -> None:
    compared = unclear = 0
    for answer in case.answers:
        sequence = answer.sequence
        hidden = mtp.target.trace(sequence).hidden
        for cached, last, draft in drafts(case.server, answer):
            assert last == sequence[cached], "the row after the cache is not the last token"
            expected = mtp.propose(sequence[: cached + 1], hidden, case.steps, case.share)
            compared += 1
            if expected.margin < CLEAR_MARGIN or expected.gap < NEAR_TIE:
                unclear += 1
                continue
            assert draft == expected.tokens, (
                f"after {cached} tokens: drafted {draft}, reference {expected.tokens} "
                f"(margin {expected.margin:.1e}, gap {expected.gap:.1e})"
            )
    print(f"{compared} drafts compared, {unclear} of them toss-ups")
    assert compared > 2 * NEW / (case.steps + 1) * 0.9
    assert unclear <= 0.05 * compared


def drafts(server: Server, answer: Answer) -> list[tuple[int, int, list[int]]]:
    """(committed tokens, last token, drafted tokens) of the steps inside the answer."""
    lines = server.proposals(answer.rid)
    assert lines, "the probe saw no draft"
    inside = len(answer.sequence)
    return [(x["cached"], x["last"], x["draft"]) for x in lines if x["cached"] < inside]


def caches_differ(left: Recording, right: Recording, who: str, rows: int) -> float:
    """Largest absolute difference of latents and index keys over the first ``rows`` slots."""
    assert min(left.length, right.length) >= rows > 0
    worst = 0.0
    for kind in ("latent", "index"):
        layers = left.layers(kind, who)
        assert layers and layers == right.layers(kind, who), (kind, who, layers)
        for layer in layers:
            a = left.tensor(kind, layer, who)[:rows]
            b = right.tensor(kind, layer, who)[:rows]
            assert bool(torch.isfinite(a).all())
            assert float(a.abs().max()) > 0, f"{who} {kind} of layer {layer} was never written"
            worst = max(worst, float((a - b).abs().max()))
    return worst
