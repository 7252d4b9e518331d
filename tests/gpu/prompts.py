"""The requests of a run: written once, asked of every server, read by the reference."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .real_dims import prompt

AGAIN = "-again"  # ends the name of a group that repeats another without its cached prefix


@dataclass(frozen=True)
class Group:
    """Prompts that are sent together.

    Attributes:
        name: unique in the file.
        prompts: token ids, sent as one batch.
        new_tokens: greedy tokens asked for.
        prompt_logprobs: ask for the log-probability of every prompt token (SGLang then computes
            the whole prompt, whatever its prefix cache holds).
        repeats: name of an earlier group with the same prompts, whose cached prefix this one uses.
    """

    name: str
    prompts: list[list[int]]
    new_tokens: int
    prompt_logprobs: bool = False
    repeats: str | None = None


def parity_requests(
    vocab: int,
    *,
    lengths: tuple[int, ...] = (100, 3000, 20000),
    batches: tuple[int, ...] = (1, 3, 8),
    batch_length: int = 300,
    new_tokens: int = 64,
    seed: int = 1,
) -> list[Group]:
    """Each length alone, the same with its prefix cached, the same computed anew, then each batch
    size at once.

    A batch's prompts have lengths around `batch_length`, all different.
    """
    groups: list[Group] = []
    for number, length in enumerate(lengths):
        name, tokens = f"p{length}", prompt(vocab, length, seed + number)
        groups.append(Group(name, [tokens], new_tokens, prompt_logprobs=True))
        groups.append(Group(f"{name}-hit", [tokens], new_tokens, repeats=name))
        groups.append(Group(f"{name}{AGAIN}", [tokens], new_tokens, prompt_logprobs=True))
    for batch in batches:
        prompts = [
            prompt(vocab, batch_length + 37 * i, seed + 1000 * batch + i) for i in range(batch)
        ]
        groups.append(Group(f"b{batch}", prompts, new_tokens, prompt_logprobs=True))
    return groups


def write_requests(groups: list[Group], file: Path) -> Path:
    """Write the groups as JSON; returns the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([asdict(group) for group in groups]))
    return file


def read_requests(file: Path) -> list[Group]:
    """What `write_requests` wrote."""
    return [Group(**group) for group in json.loads(file.read_text())]
