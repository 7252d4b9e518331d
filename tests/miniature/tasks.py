"""What the miniature learns, as prompts with the answer that it must give.

Three tasks, mixed in one model:

* recall: records ``k1 k2 v ;`` and at the end ``? k1 k2``; the answer is ``v``. Many records share
  one word of the asked key, none shares both;
* copying: ``Copy: passage`` and a line that begins with ``Copy:`` again; the answer is the passage;
* chat: sums and differences with a think block, tool calls and what a tool returned, small talk.

Pure Python: the same seed gives the same prompts on every machine.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import conversations
from .conversations import Conversation
from .words import CITIES, NOUNS, VERBS

PREFIX = ("[gMASK]", "<sop>")  # what GLM's prompts begin with
RECORD = 4  # tokens of `k1 k2 v ;`
QUESTION = 3  # tokens of `? k1 k2`
SENTENCE = 4  # tokens of `noun verb noun .`

__all__ = ["Conversation", "Prompt", "Tasks"]


@dataclass(frozen=True)
class Prompt:
    """A prompt of token ids, and what greedy decoding must give.

    Attributes:
        tokens: the whole prompt.
        answer: the tokens that follow.
        planted: positions in `tokens` that hold what the answer is read from.
    """

    tokens: list[int]
    answer: list[int]
    planted: list[int]


@dataclass(frozen=True)
class Tasks:
    """The tasks over one tokenizer (`tokenizers.Tokenizer`).

    Attributes:
        words: ids of the words that are keys, values and passages.
        cities, nouns, verbs: their kinds.
        prefix, ask, end, copy: ids of the signs around them.
    """

    tokenizer: Any
    words: list[int] = field(init=False)
    cities: list[int] = field(init=False)
    nouns: list[int] = field(init=False)
    verbs: list[int] = field(init=False)
    prefix: list[int] = field(init=False)
    ask: int = field(init=False)
    end: int = field(init=False)
    copy: list[int] = field(init=False)
    stop: int = field(init=False)
    line: int = field(init=False)

    def __post_init__(self) -> None:
        one = self._one
        cities = [one(f" {word}") for word in CITIES]
        nouns = [one(f" {word}") for word in NOUNS]
        verbs = [one(f" {word}") for word in VERBS]
        values = {
            "cities": cities,
            "nouns": nouns,
            "verbs": verbs,
            "words": [*cities, *nouns, *verbs],
            "prefix": [one(token) for token in PREFIX],
            "ask": one("?"),
            "end": one(";"),
            "copy": [one("Copy"), one(":")],
            "stop": one("."),
            "line": one("\n"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _one(self, text: str) -> int:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens of this tokenizer, not one")
        return ids[0]

    # Recall

    def records(self, context: int) -> int:
        """How many records a recall prompt of `context` tokens holds.

        Raises:
            ValueError: there is not room for two.
        """
        count = (context - len(self.prefix) - QUESTION) // RECORD
        if count < 2:
            raise ValueError(f"a recall prompt of {context} tokens has no room for two records")
        if count > len(self.words) ** 2 // 4:
            raise ValueError(f"a recall prompt of {context} tokens wants more keys than there are")
        return count

    def half_matches(self, rng: random.Random, count: int) -> int:
        """How many of `count` records share one word with the asked key.

        More than the 128 positions that attention reads, where there are 256 records or more.
        """
        most = 2 * (len(self.words) - 1)
        return min(most, rng.randint(int(0.55 * count), int(0.75 * count)), rng.randint(150, 400))

    def recall(self, rng: random.Random, context: int, depth: float) -> Prompt:
        """A prompt of exactly `context` tokens.

        depth: where the planted record lies, 0 (first) to 1 (last).

        Raises:
            ValueError: the context is too short or too long, or the depth is not in 0..1.
        """
        if not 0 <= depth <= 1:
            raise ValueError(f"the depth is {depth}; it goes from 0 to 1")
        count = self.records(context)
        asked, others = self._keys(rng, count)
        place = round(depth * (count - 1))
        keys = [*others[:place], asked, *others[place:]]
        tokens = list(self.prefix)
        filler = (context - len(tokens) - QUESTION) % RECORD
        tokens += [self.end] * filler
        values = [rng.choice(self.words) for _ in keys]
        for (first, second), value in zip(keys, values, strict=True):
            tokens += [first, second, value, self.end]
        planted = len(self.prefix) + filler + RECORD * place + 2
        tokens += [self.ask, *asked]
        return Prompt(tokens, [values[place]], [planted])

    def _keys(
        self, rng: random.Random, count: int
    ) -> tuple[tuple[int, int], list[tuple[int, int]]]:
        """The asked key, and the others in random order, all different."""
        a, b = rng.choice(self.words), rng.choice(self.words)
        sharing = [(a, word) for word in self.words if word != b]
        sharing += [(word, b) for word in self.words if word != a]
        keys = dict.fromkeys(rng.sample(sharing, min(self.half_matches(rng, count), count - 1)))
        while len(keys) < count - 1:
            first, second = rng.choice(self.words), rng.choice(self.words)
            if first != a and second != b:
                keys[first, second] = None
        others = list(keys)
        rng.shuffle(others)
        return (a, b), others

    # Copying

    def copying(self, rng: random.Random, length: int) -> Prompt:
        """A passage of `length` tokens, and the request to write it again.

        No two neighbours stand twice in the passage, so that each word follows from the two before.

        Raises:
            ValueError: a passage of that length cannot be made.
        """
        if not 1 <= length <= 4096:
            raise ValueError(f"a passage has 1 to 4096 tokens, not {length}")
        passage = self._passage(rng, length)
        head = [*self.prefix, *self.copy]
        tokens = [*head, *passage, self.line, *self.copy]
        return Prompt(tokens, passage, list(range(len(head), len(head) + length)))

    def _passage(self, rng: random.Random, length: int) -> list[int]:
        """Sentences now and then, whose last words all differ, and single words."""
        last_nouns = rng.sample(self.nouns, len(self.nouns))
        used: set[tuple[int, int]] = set()
        passage: list[int] = []
        previous = self.copy[1]
        while len(passage) < length:
            sentence = bool(last_nouns) and length - len(passage) >= SENTENCE and rng.random() < 0.4
            if sentence:
                piece = [rng.choice(self.nouns), rng.choice(self.verbs), last_nouns[-1], self.stop]
            else:
                piece = [rng.choice(self.words)]
            pairs = list(zip([previous, *piece], piece, strict=False))
            if len(set(pairs)) == len(pairs) and used.isdisjoint(pairs):
                used.update(pairs)
                passage += piece
                previous = piece[-1]
                if sentence:
                    last_nouns.pop()
        return passage

    # Chat

    def chat(self, rng: random.Random) -> Conversation:
        """A conversation whose next turn is the model's."""
        return conversations.make(rng)

    def chat_tokens(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """The prompt and the expected answer, its end of turn included."""
        prompt = render(conversation.messages, conversation.tools)
        return (
            self.tokenizer.encode(prompt, add_special_tokens=False).ids,
            self.tokenizer.encode(conversation.answer(), add_special_tokens=False).ids,
        )


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """The chat template's prompt, the model's turn opened."""
    return _template().render(messages=messages, tools=tools, add_generation_prompt=True)


_TEMPLATES: list[Any] = []


def _template() -> Any:
    if not _TEMPLATES:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        import sglang_glm53.tiny

        # As transformers sets it up.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        file = Path(sglang_glm53.tiny.__file__).with_name("chat_template.jinja")
        _TEMPLATES.append(environment.from_string(file.read_text(encoding="utf-8")))
    return _TEMPLATES[0]
