"""What is measured on a running server. Each function reaches one condition, and fails if it did
not: an accuracy under a condition that never came about says nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import requests
import torch
from server.harness import Server

from . import faults
from .ask import Reply, arguments_of, ask, ask_with_selection, chat
from .recall import Haystack, Question, Tally
from .switch import Switch

if TYPE_CHECKING:
    from miniature.tasks import Prompt, Tasks

PAGE = 64


class NotReached(AssertionError):
    """The server never came into the condition that was to be measured."""


# --- recall --------------------------------------------------------------------------------------


def recall(
    server: Server, questions: Sequence[Question], rank: int | None = None
) -> tuple[Tally, list[Reply]]:
    """Ask all questions, with what is in the cache; of one data-parallel rank if it is named."""
    replies = ask(
        server,
        [question.tokens for question in questions],
        1,
        expected=[question.answer for question in questions],
        rank=rank,
    )
    tally = Tally(ranks={reply.rank for reply in replies})
    for question, reply in zip(questions, replies, strict=True):
        tally.add(question, reply.tokens, reply.logprob)
    return tally, replies


def recall_with_hits(
    server: Server, haystacks: Sequence[Haystack], ranks: int = 1
) -> tuple[Tally, Tally]:
    """From an empty cache: each haystack's first question, then the others on its prefix.

    Args:
        ranks: data-parallel ranks, which take the haystacks in turns.

    Returns:
        The tally of the prompts that were prefilled, and that of the hits.

    Raises:
        NotReached: a first question hit, or another did not.
    """
    server.flush()
    prefilled, hits = Tally(), Tally()
    groups = [
        (group, rank if ranks > 1 else None)
        for rank in range(ranks)
        for group in groups_that_fit(haystacks[rank::ranks], capacity(server))
    ]
    for group, rank in groups:
        first, replies = recall(server, [haystack[0] for haystack in group], rank)
        if any(reply.cached for reply in replies):
            raise NotReached(f"first questions hit the cache: {[r.cached for r in replies]}")
        prefilled.merge([first])
        others = [question for haystack in group for question in haystack[1:]]
        if not others:
            continue
        second, replies = recall(server, others, rank)
        for question, reply in zip(others, replies, strict=True):
            if reply.cached < shared_pages(question):
                raise NotReached(
                    f"{reply.cached} of {question.context} tokens came from the cache, not "
                    f"{shared_pages(question)}"
                )
        hits.merge([second])
    return prefilled, hits


def recall_after_eviction(server: Server, haystacks: Sequence[Haystack]) -> Tally:
    """First questions that were asked before, whose cache others have taken since.

    Raises:
        NotReached: one of them was still in the cache.
    """
    tally = Tally()
    for haystack in haystacks:
        again, (reply,) = recall(server, haystack[:1])
        if reply.cached:
            raise NotReached(f"{reply.cached} tokens were never evicted")
        tally.merge([again])
    return tally


def shared_pages(question: Question) -> int:
    """Tokens of a haystack that a later question about it finds in the cache: whole pages."""
    return (question.context - 3) // PAGE * PAGE


def groups_that_fit(haystacks: Sequence[Haystack], room: int) -> Iterator[list[Haystack]]:
    """The haystacks in order, in groups that the cache holds with all their questions."""
    group: list[Haystack] = []
    filled = 0
    for haystack in haystacks:
        # Every question ends in pages of its own; one more is opened for the answer.
        size = haystack[0].context + 2 * PAGE * len(haystack)
        if group and filled + size > room:
            yield group
            group, filled = [], 0
        group.append(haystack)
        filled += size
    if group:
        yield group


def capacity(server: Server) -> int:
    """Tokens that the server's cache holds."""
    return int(server.get("/server_info")["max_total_num_tokens"])


def evicted_tokens(server: Server) -> int:
    """Tokens evicted since the start; the server runs with --enable-metrics."""
    text = requests.get(server.url + "/metrics", timeout=60).text
    values = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("sglang:evicted_tokens_total")
    ]
    return int(sum(values))


# --- the indexer ---------------------------------------------------------------------------------


@dataclass
class Selected:
    """What one layer's indexer chose for the last row of recall prompts.

    planted: prompts whose planted value is in the set. asked: prompts. sizes: of each set.
    """

    planted: int = 0
    asked: int = 0
    sizes: list[int] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.planted / self.asked

    def as_json(self) -> dict[str, Any]:
        return {"share": self.share, "asked": self.asked, "smallest_set": min(self.sizes)}


def planted_in_selection(
    server: Server, questions: Sequence[Question], config: dict[str, Any]
) -> dict[int, Selected]:
    """For each full layer: is the planted value in the set of the row that must answer?

    The cache is emptied before each prompt whose records are new, so that where the selection
    comes as cache slots they can be told apart from positions.
    """
    layers, k = config["num_hidden_layers"], config["index_topk"]
    full = [i for i, kind in enumerate(config["indexer_types"]) if kind == "full"]
    found = {layer: Selected() for layer in full}
    for question in questions:
        server.flush()
        reply = ask_with_selection(server, question.tokens, layers, k)
        for layer in full:
            chosen = positions(reply.selection[:, layer], len(question.tokens), k)
            found[layer].asked += 1
            found[layer].planted += question.planted in chosen
            found[layer].sizes.append(len(chosen))
    return found


def positions(selection: np.ndarray, length: int, k: int) -> set[int]:
    """Positions that the last row of a prompt chose.

    On a CPU the selection holds positions. SGLang's kernels on a GPU give cache slots, or offsets
    into the batch's keys: those of a request that is alone in an empty cache are its positions from
    some start on, and the rows that see no more than `k` tokens show the start.

    Args:
        selection: [length, k] int32 of one layer, -1 padded.

    Raises:
        NotReached: the slots do not lie next to each other.
    """
    last, early = selection[length - 1], selection[k - 1]
    chosen = last[last >= 0]
    # A row whose attention ran dense is left at zero: it shows nothing, and there it is a CPU.
    start = int(early.min()) if len(set(early.tolist()) - {-1}) == k else 0
    if chosen.size and not (start <= chosen.min() and chosen.max() < start + length):
        raise NotReached(f"slots {chosen.min()} to {chosen.max()} of a prompt of {length} tokens")
    return {int(value) - start for value in chosen}


# --- copying -------------------------------------------------------------------------------------


@dataclass
class Copies:
    """Passages copied.

    right, tokens: right tokens, of all. whole: passages without a wrong one, of `asked`.
    verifies: target passes with speculation. retractions: of all requests. ranks: the
    data-parallel ranks that answered.
    """

    right: int = 0
    tokens: int = 0
    whole: int = 0
    asked: int = 0
    verifies: int = 0
    retractions: int = 0
    ranks: set[int] = field(default_factory=set)

    @property
    def accuracy(self) -> float:
        return self.right / self.tokens

    @property
    def accept_length(self) -> float | None:
        """Tokens a target pass gave; None without speculation. The prefill's token is left out."""
        return (self.tokens - self.asked) / self.verifies if self.verifies else None

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "ranks": sorted(self.ranks),
            "accuracy": self.accuracy,
            "accept_length": self.accept_length,
        }

    def add(self, expected: Sequence[int], reply: Reply) -> None:
        """Count one passage; tokens after a wrong one count by themselves."""
        matches = [a == b for a, b in zip(expected, reply.tokens, strict=True)]
        self.right += sum(matches)
        self.tokens += len(matches)
        self.whole += all(matches)
        self.asked += 1
        self.verifies += reply.verifies
        self.retractions += reply.retractions
        self.ranks.add(reply.rank)


def passages(tasks: Tasks, count: int, length: int, seed: int) -> list[Prompt]:
    """Prompts that ask for a copy of `length` tokens."""
    rng = random.Random(f"copying {seed} {length}")
    return [tasks.copying(rng, length) for _ in range(count)]


def copying(server: Server, prompts: Sequence[Prompt], *, together: bool = False) -> Copies:
    """Ask for copies from an empty cache, one after the other or all at once."""
    server.flush()
    length = len(prompts[0].answer)
    tokens = [prompt.tokens for prompt in prompts]
    replies = (
        ask(server, tokens, length)
        if together
        else [reply for one in tokens for reply in ask(server, [one], length)]
    )
    copies = Copies()
    for prompt, reply in zip(prompts, replies, strict=True):
        copies.add(prompt.answer, reply)
    return copies


def copying_with_retraction(server: Server, prompts: Sequence[Prompt]) -> Copies:
    """All at once on a server that retracts (SGLANG_TEST_RETRACT).

    Raises:
        NotReached: no request was retracted.
    """
    copies = copying(server, prompts, together=True)
    if not copies.retractions:
        raise NotReached("no request was retracted")
    return copies


def draft_cache_error(server: Server, switch: Switch, prompt: Prompt, name: str) -> float:
    """How far the draft's cache after a copy is from that of a fresh prefill of the same tokens.

    Returns:
        Largest over latents and index keys of: mean |difference| / mean |value|.
    """
    rids = [f"{faults.DUMP}{name}-{part}" for part in ("drafted", "fresh")]
    server.flush()
    (drafted,) = ask(server, [prompt.tokens], len(prompt.answer), rids=rids[:1])
    server.flush()
    ask(server, [prompt.tokens + drafted.tokens], 1, rids=rids[1:])
    mine, fresh = (switch.draft_cache(rid) for rid in rids)
    # The draft's row p embeds token p + 1: the last committed row is another one after a prefill.
    first, last = len(prompt.tokens), len(prompt.tokens) + len(drafted.tokens) - 2
    return max(relative_error(mine[kind][first:last], fresh[kind][first:last]) for kind in mine)


def relative_error(left: torch.Tensor, right: torch.Tensor) -> float:
    """Mean |difference| by the mean |value| of the right one."""
    assert left.shape == right.shape and left.numel()
    return float((left - right).abs().mean() / right.abs().mean())


# --- chat ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """One chat answer, and what is wrong with it (empty if nothing is)."""

    kind: str
    message: dict[str, Any]
    wrong: str


def ask_conversation(server: Server, conversation: Any) -> Answered:
    """Ask one of the tasks' conversations; the answer must be the learned one."""
    message = chat(server, conversation.messages, conversation.tools)
    return Answered(conversation.kind, message, what_is_wrong(message, conversation))


def what_is_wrong(message: dict[str, Any], conversation: Any) -> str:
    """What differs between a reply and the turn that was learned: "" if nothing does."""
    reasoning = (message.get("reasoning_content") or "").strip()
    content = (message.get("content") or "").strip()
    calls = [
        (call["function"]["name"], arguments_of(call)) for call in message.get("tool_calls") or []
    ]
    pairs = {
        "reasoning": (reasoning, conversation.reasoning.strip()),
        "content": (content, conversation.content.strip()),
        "tool calls": (calls, list(conversation.tool_calls)),
    }
    wrong = [f"{k}: {got!r}, not {want!r}" for k, (got, want) in pairs.items() if got != want]
    return "; ".join(wrong)


def conversations(tasks: Tasks, count: int, seed: int) -> list[Any]:
    """Conversations of all kinds that the miniature was trained on."""
    rng = random.Random(f"chat {seed}")
    return [tasks.chat(rng) for _ in range(count)]


def chat_accuracy(server: Server, asked: Sequence[Any]) -> tuple[float, list[str]]:
    """Share of right answers, and what is wrong with the others."""
    answered = [ask_conversation(server, conversation) for conversation in asked]
    wrong = [f"{answer.kind}: {answer.wrong}" for answer in answered if answer.wrong]
    return 1 - len(wrong) / len(answered), wrong
