"""Training batches, made on the device that trains.

The same definitions as `tasks.py` (a test reads the batches back): recall sequences that ask many
questions in place of one, passages with their copies, and chat conversations from a pool.

Every token has a class: what of it is learned. Only tokens that can be foreseen have one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from .tasks import RECORD, SENTENCE, Tasks

NOTHING, RECALL, COPY, SIGN, CHAT = range(5)  # classes of a token
ASKED = 5  # tokens of `? k1 k2 v ;`


@dataclass(frozen=True)
class Batch:
    """Sequences and what of them is learned.

    Attributes:
        tokens: [B, S] int64.
        at: [T] int64, the learned tokens, as places in the flattened sequences.
        kinds: [T] int64, their classes.
    """

    tokens: torch.Tensor
    at: torch.Tensor
    kinds: torch.Tensor

    def joined(self, other: Batch) -> Batch:
        """Both, one after the other; their contexts are equal."""
        at = torch.cat((self.at, other.at + self.tokens.numel()))
        return Batch(
            torch.cat((self.tokens, other.tokens)), at, torch.cat((self.kinds, other.kinds))
        )


class Batches:
    """Makes batches of one device; the same generator state gives the same batch."""

    def __init__(self, tasks: Tasks, device: torch.device) -> None:
        self.tasks, self.device = tasks, device
        self.words = torch.tensor(tasks.words, device=device)
        self.nouns = torch.tensor(tasks.nouns, device=device)
        self.verbs = torch.tensor(tasks.verbs, device=device)

    # Recall

    def recall(
        self, count: int, context: int, generator: torch.Generator, layout: np.random.Generator
    ) -> Batch:
        """`count` sequences of `context` tokens with one layout of records and questions.

        layout: decides where records and questions stand, the same in all sequences.
        """
        units = self._units(context, layout)
        records = [start for start, asks in units if not asks]
        asks = [start for start, asked in units if asked]
        before = [sum(r < start for r in records) for start in asks]
        keys, hot = self._keys(count, len(records), generator, layout)
        values = self._pick(self.words, (count, len(records)), generator)
        tokens = self._blank(count, context, self.tasks.end)
        at = torch.tensor(records, device=self.device)
        for offset, part in enumerate((keys[..., 0], keys[..., 1], values)):
            tokens[:, at + offset] = part
        if asks:
            at = torch.tensor(asks, device=self.device)
            seen = torch.tensor(before, device=self.device)
            which = (self._uniform((count, len(asks)), generator) * seen).long()
            # The key that most others share a word with is asked more often than by chance.
            wanted = self._uniform((count, len(asks)), generator) < 0.1
            which = torch.where(wanted & (hot[:, None] < seen), hot[:, None], which)
            asked = keys.gather(1, which[..., None].expand(-1, -1, 2))
            tokens[:, at] = self.tasks.ask
            tokens[:, at + 1], tokens[:, at + 2] = asked[..., 0], asked[..., 1]
            tokens[:, at + 3] = values.gather(1, which)
        learned = [(start + 3, RECALL) for start in asks] + [(start + 4, SIGN) for start in asks]
        return self._batch(tokens, learned)

    def _units(self, context: int, layout: np.random.Generator) -> list[tuple[int, bool]]:
        """(start, whether it is a question) of each record and question, to the context's end."""
        start = len(self.tasks.prefix)
        room = context - start
        if layout.random() < 0.5:  # questions among the records
            share = layout.uniform(0.15, 0.5)
            kinds = [False] * 4
            while len(kinds) < room // RECORD:
                kinds.append(bool(layout.random() < share))
        else:  # all records, then questions
            most = max(4, min(64, room // (2 * ASKED)))
            tail = int(layout.integers(max(2, most // 4), most + 1))
            kinds = [False] * ((room - ASKED * tail) // RECORD) + [True] * tail
        fitting, used = [], 0
        for asks in kinds:
            size = ASKED if asks else RECORD
            if used + size > room:
                break
            fitting.append(asks)
            used += size
        start += room - used
        units = []
        for asks in fitting:
            units.append((start, asks))
            start += ASKED if asks else RECORD
        return units

    def _keys(
        self, count: int, records: int, generator: torch.Generator, layout: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[count, records, 2] keys, unique in a row, and [count] the place of the hot one.

        As `Tasks.recall`: one key, some that share a word with it, others that do not.
        """
        size = len(self.words)
        most = min(2 * (size - 1), int(layout.uniform(0.0, 0.75) * records), 400)
        sharing = max(0, min(most, records - 1))
        a, b = (
            torch.randint(size, (count, 1), generator=generator, device=self.device) for _ in "ab"
        )
        line = torch.arange(size - 1, device=self.device)[None]
        same_first = a * size + (line + (line >= b))
        same_second = (line + (line >= a)) * size + b
        candidates = torch.cat((same_first, same_second), dim=1)
        chosen = self._sample(candidates, sharing, generator)
        weight = self._uniform((count, size, size), generator)
        rows = torch.arange(count, device=self.device)
        weight[rows, a[:, 0], :] = -1.0
        weight[rows, :, b[:, 0]] = -1.0
        others = weight.flatten(1).topk(records - 1 - sharing, dim=1).indices
        codes = torch.cat((a * size + b, chosen, others), dim=1)
        order = self._uniform(codes.shape, generator).argsort(dim=1)
        codes = codes.gather(1, order)
        keys = torch.stack((self.words[codes // size], self.words[codes % size]), dim=-1)
        return keys, order.argmin(dim=1)

    # Copying

    def copying(
        self, count: int, context: int, generator: torch.Generator, layout: np.random.Generator
    ) -> Batch:
        """`count` sequences of passages with their copies, the lengths the same in all."""
        tasks = self.tasks
        head = len(tasks.prefix)
        longest = (context - head) // 2 - 3
        length = int(np.exp(layout.uniform(np.log(min(12, longest)), np.log(longest))))
        tokens = self._blank(count, context, tasks.end)
        learned: list[tuple[int, int]] = []
        sign = torch.tensor(tasks.copy, device=self.device)
        start, first = head, True
        while start + 2 * (length + 3) <= context:
            passage = self._passage(count, length, generator, layout)
            for again in (False, True):
                tokens[:, start : start + 2] = sign
                tokens[:, start + 2 : start + 2 + length] = passage
                tokens[:, start + 2 + length] = tasks.line
                if again:
                    # `Copy:` stands in several places, so only the first copy's start is foreseen.
                    from_here = start + 2 + (not first)
                    learned += [(at, COPY) for at in range(from_here, start + 3 + length)]
                start += length + 3
            first = False
        if start < context:
            rest = self._pick(self.words, (count, context - start), generator)
            tokens[:, start:] = rest
        return self._batch(tokens, learned)

    def _passage(
        self, count: int, length: int, generator: torch.Generator, layout: np.random.Generator
    ) -> torch.Tensor:
        passage = self._pick(self.words, (count, length), generator)
        starts, place = [], 0
        while place < length:
            fits = length - place >= SENTENCE and len(starts) < len(self.nouns)
            if fits and layout.random() < 0.4:
                starts.append(place)
                place += SENTENCE
            else:
                place += 1
        if starts:
            at = torch.tensor(starts, device=self.device)
            many = (count, len(starts))
            last = self._uniform((count, len(self.nouns)), generator).argsort(dim=1)
            passage[:, at] = self._pick(self.nouns, many, generator)
            passage[:, at + 1] = self._pick(self.verbs, many, generator)
            passage[:, at + 2] = self.nouns[last[:, : len(starts)]]
            passage[:, at + 3] = self.tasks.stop
        return passage

    # Pieces

    def _batch(self, tokens: torch.Tensor, learned: list[tuple[int, int]]) -> Batch:
        """learned: (column, class), the same in all sequences."""
        count, context = tokens.shape
        columns, kinds = (
            torch.tensor(learned, dtype=torch.int64, device=self.device).reshape(-1, 2).unbind(1)
        )
        rows = torch.arange(count, device=self.device)[:, None] * context
        return Batch(tokens, (rows + columns).flatten(), kinds.repeat(count))

    def _blank(self, count: int, context: int, token: int) -> torch.Tensor:
        tokens = torch.full((count, context), token, device=self.device)
        prefix = torch.tensor(self.tasks.prefix, device=self.device)
        tokens[:, : len(prefix)] = prefix
        return tokens

    def _uniform(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=self.device)

    def _pick(
        self, ids: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator
    ) -> torch.Tensor:
        return ids[torch.randint(len(ids), shape, generator=generator, device=self.device)]

    def _sample(self, rows: torch.Tensor, few: int, generator: torch.Generator) -> torch.Tensor:
        order = self._uniform(tuple(rows.shape), generator).topk(few, dim=1).indices
        return rows.gather(1, order)


class ChatPool:
    """Conversations rendered once, in two groups by length, each padded to its longest."""

    LIMITS = (64, 384)

    def __init__(self, tasks: Tasks, size: int, seed: int, device: torch.device) -> None:
        rng = random.Random(seed)
        groups: list[list[tuple[list[int], list[int]]]] = [[] for _ in self.LIMITS]
        for _ in range(size):
            prompt, answer = tasks.chat_tokens(tasks.chat(rng))
            length = len(prompt) + len(answer)
            groups[next(i for i, limit in enumerate(self.LIMITS) if length <= limit)].append(
                (prompt, answer)
            )
        self.groups = [
            self._padded(rows, limit, tasks.end)
            for rows, limit in zip(groups, self.LIMITS, strict=True)
        ]
        self.device = device

    @staticmethod
    def _padded(
        rows: list[tuple[list[int], list[int]]], limit: int, filler: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """tokens [rows, limit] and whether each is learned."""
        tokens = np.full((len(rows), limit), filler, dtype=np.int64)
        learned = np.zeros((len(rows), limit), dtype=bool)
        for index, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            tokens[index, :end] = prompt + answer
            learned[index, len(prompt) : end] = True
        return tokens, learned

    def draw(self, group: int, count: int, layout: np.random.Generator) -> Batch:
        """`count` conversations of one group (0: short, 1: with tools)."""
        tokens, learned = self.groups[group]
        rows = layout.integers(len(tokens), size=count)
        at = torch.from_numpy(np.flatnonzero(learned[rows]))
        chosen = torch.from_numpy(tokens[rows])
        if self.device.type == "cuda":  # from pinned memory the copy does not wait for the device
            chosen, at = chosen.pin_memory(), at.pin_memory()
        chosen = chosen.to(self.device, non_blocking=True)
        at = at.to(self.device, non_blocking=True)
        return Batch(chosen, at, torch.full_like(at, CHAT))
