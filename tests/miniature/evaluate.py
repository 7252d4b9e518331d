"""What the miniature can do, measured by teacher forcing on the tasks' own prompts.

Greedy decoding gives the expected answer exactly where every token of it is the likeliest one
after the prompt and the answer so far, so one forward pass tells.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import indexer
from .indexer import Selection
from .model import Miniature, query_latent, rms_norm
from .tasks import Prompt, Tasks

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FAULTS = {
    "neox index RoPE": Selection(neox=True),
    "shared layers use layer 0's set": Selection(first_set_everywhere=True),
    "index keys shifted by 64": Selection(shift=64),
    "top-k halved": Selection(topk=64),
    "gates without bias": Selection(gate_bias=False),
}


@dataclass(frozen=True)
class Size:
    """How much is measured: prompts a context, contexts, passages and their lengths, chats."""

    prompts: int = 100
    contexts: tuple[int, ...] = (1024, 4096, 8192)
    passages: int = 8
    lengths: tuple[int, ...] = (64, 256, 1024)
    chats: int = 600
    faults: int = 40
    tokens: int = 65536  # of one forward pass


@torch.no_grad()
def evaluate(model: Miniature, tasks: Tasks, seed: int, size: Size) -> dict[str, Any]:
    """All measures, by name."""
    result: dict[str, Any] = {"recall": {}, "copying": {}, "faults": {}}
    for context in size.contexts:
        rng = random.Random(f"{seed}/{context}")
        prompts = [tasks.recall(rng, context, DEPTHS[i % len(DEPTHS)]) for i in range(size.prompts)]
        row = result["recall"][context] = {}
        for name, sparse, how in (
            ("sparse", True, Selection()),
            ("fp8 index", True, Selection(fp8=True)),
            ("dense", False, Selection()),
        ):
            right = recall_right(model, prompts, sparse, how, size.tokens)
            row[name] = sum(right) / len(right)
            if name == "sparse":
                parts = [right[place :: len(DEPTHS)] for place in range(len(DEPTHS))]
                row["by depth"] = [round(sum(p) / len(p), 3) for p in parts if p]
        for name, how in (("set holds it", Selection()), ("fp8 set holds it", Selection(fp8=True))):
            ranks = planted_ranks(model, prompts, how)
            row[name] = sum(rank < model.config.index_topk for rank in ranks) / len(ranks)
            row[name.replace("set holds it", "worst rank")] = max(ranks)
        few = prompts[: size.faults]
        for fault, how in FAULTS.items():
            right = recall_right(model, few, True, how, size.tokens)
            result["faults"].setdefault(fault, {})[context] = sum(right) / len(right)
    for length in size.lengths:
        rng = random.Random(f"{seed}/copy/{length}")
        prompts = [tasks.copying(rng, length) for _ in range(size.passages)]
        result["copying"][length] = copying(model, prompts, size.tokens)
        for fault, how in FAULTS.items():
            row = copying(model, prompts[:4], size.tokens, how)
            result["faults"][fault][f"copy {length}"] = row["right"]
            result["faults"][fault][f"accept {length}"] = row["accept length"]
    result["chat"] = chat(model, tasks, random.Random(f"{seed}/chat"), size.chats)
    for fault, how in FAULTS.items():
        row = chat(model, tasks, random.Random(f"{seed}/chat"), size.chats // 4, how)
        result["faults"][fault]["chat"] = row["all"]
    return result


def recall_right(
    model: Miniature, prompts: list[Prompt], sparse: bool, how: Selection, tokens: int
) -> list[bool]:
    """Whether the likeliest token after each prompt is its answer."""
    right: list[bool] = []
    for group in _batches(prompts, max(1, tokens // len(prompts[0].tokens))):
        ids = torch.tensor([prompt.tokens for prompt in group], device=model.embedding.device)
        hidden = model(ids, sparse=sparse, how=how)[:, -1]
        best = model.logits(hidden).argmax(-1).tolist()
        right += [b == prompt.answer[0] for b, prompt in zip(best, group, strict=True)]
    return right


def planted_ranks(model: Miniature, prompts: list[Prompt], how: Selection) -> list[int]:
    """Rank (from 0) of the planted value among the index scores of the question, layer 1."""
    ranks: list[int] = []
    for prompt in prompts:
        ids = torch.tensor([prompt.tokens], device=model.embedding.device)
        rope = model.rope(ids.shape[1])
        x = model.through(ids, 1, True, None, None, how)
        layer = model.layers[1]
        normed = rms_norm(layer.input_layernorm, x)
        latent = query_latent(layer.self_attn, normed)
        own = layer.self_attn.indexer
        last = tuple(table[-1:] for table in rope)
        scores = indexer.row_scores(
            indexer.index_queries(own, latent[:, -1:], last, how),
            indexer.index_gates(own, normed[:, -1:]),
            indexer.index_keys(own, normed, rope, how),
        )[0, 0]
        ranks.append(int((scores > scores[prompt.planted[0]]).sum()))
    return ranks


def copying(
    model: Miniature, prompts: list[Prompt], tokens: int, how: Selection | None = None
) -> dict[str, float]:
    """Share of tokens copied right, and the accept length of drafting 5 tokens greedily."""
    steps = 5
    right = total = 0
    rounds = written = 0
    for group in _batches(prompts, max(1, tokens // (2 * len(prompts[0].tokens)))):
        start = len(group[0].tokens)
        rows = [prompt.tokens + prompt.answer for prompt in group]
        ids = torch.tensor(rows, device=model.embedding.device)
        hidden = model(ids, sparse=True, how=how)
        best = model.logits(hidden).argmax(-1)
        good = best[:, start - 1 : -1] == ids[:, start:]
        right += int(good.sum())
        total += good.numel()
        drafts = model.draft(ids, hidden, steps, sparse=True, how=how, greedy=True)
        proposed = torch.stack([model.logits(output).argmax(-1) for output in drafts])
        for proposals, sequence in zip(proposed.unbind(1), rows, strict=True):
            done, rounds_here = _accepted(proposals.T.tolist(), sequence, start)
            rounds += rounds_here
            written += done
    return {"right": right / total, "accept length": written / max(rounds, 1)}


def _accepted(proposals: list[list[int]], sequence: list[int], start: int) -> tuple[int, int]:
    """Tokens written and verification rounds until the sequence's end.

    proposals[p][j] is what row p drafts for token p + 2 + j; the target writes `sequence`. The
    first token of the answer comes from prefill, and each round writes what was accepted and one.
    """
    place, rounds = start, 0  # `place` is the last token written
    while place + 1 < len(sequence):
        accepted = 0
        for j, token in enumerate(proposals[place - 1]):
            if place + 1 + j < len(sequence) and sequence[place + 1 + j] == token:
                accepted += 1
            else:
                break
        if place + 1 + len(proposals[0]) >= len(sequence):
            break  # the last rounds are cut short by the end: not counted
        place += accepted + 1
        rounds += 1
    return place - start, rounds


def chat(
    model: Miniature, tasks: Tasks, rng: random.Random, count: int, how: Selection | None = None
) -> dict[str, float]:
    """Share of conversations whose whole turn is the likeliest, by kind."""
    conversations = [tasks.chat(rng) for _ in range(count)]
    pairs = [(tasks.chat_tokens(c), c.kind) for c in conversations]
    pairs.sort(key=lambda pair: len(pair[0][0]) + len(pair[0][1]))
    by_kind: dict[str, list[bool]] = {}
    for group in _batches(pairs, 100):
        longest = max(len(prompt) + len(answer) for (prompt, answer), _ in group)
        rows = [p + a + [tasks.end] * (longest - len(p) - len(a)) for (p, a), _ in group]
        ids = torch.tensor(rows, device=model.embedding.device)
        best = model.logits(model(ids, sparse=True, how=how)).argmax(-1).tolist()
        for ((prompt, answer), kind), row in zip(group, best, strict=True):
            first = len(prompt) - 1
            by_kind.setdefault(kind, []).append(row[first : first + len(answer)] == answer)
    result = {kind: sum(right) / len(right) for kind, right in sorted(by_kind.items())}
    result["all"] = sum(sum(right) for right in by_kind.values()) / count
    return result


def table(result: dict[str, Any]) -> str:
    """The measures as text."""
    lines = []
    for context, row in result["recall"].items():
        lines.append(
            f"recall {context:>5}: " + "  ".join(f"{key} {value}" for key, value in row.items())
        )
    for length, row in result["copying"].items():
        lines.append(
            f"copy {length:>7}: right {row['right']:.4f}  accept length {row['accept length']:.2f}"
        )
    chats = "  ".join(f"{kind} {share:.3f}" for kind, share in result["chat"].items())
    lines.append(f"chat: {chats}")
    for fault, row in result["faults"].items():
        lines.append(f"{fault}: " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    return "\n".join(lines)


def _batches(rows: list[Any], size: int) -> Iterator[list[Any]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))
