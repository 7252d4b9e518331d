"""The tasks are what they say: a plain solver finds every answer; batches agree with prompts."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from .batches import CHAT, COPY, RECALL, SIGN, Batch, Batches, ChatPool
from .conversations import add, subtract
from .tasks import Tasks, render
from .tokenizer import VOCAB, build_tokenizer, whole_words


@pytest.fixture(scope="module")
def tasks() -> Tasks:
    return Tasks(build_tokenizer())


def read_records(tasks: Tasks, tokens: list[int]) -> tuple[dict, list[tuple[int, tuple, int]]]:
    """Records {key: value} and questions [(place of the value, key, value)] of a sequence.

    Asserts the form `k1 k2 v ;` and `? k1 k2 v ;`, the last question perhaps unanswered.
    """
    words, place = set(tasks.words), len(tasks.prefix)
    assert tokens[:place] == tasks.prefix
    while tokens[place] == tasks.end:
        place += 1
    records: dict[tuple[int, int], int] = {}
    questions = []
    while place < len(tokens):
        asks = tokens[place] == tasks.ask
        unit = tokens[place + asks : place + asks + 4]
        key = tuple(unit[:2])
        assert words.issuperset(unit[:3])
        if len(unit) == 4:
            assert unit[3] == tasks.end
        if asks:
            questions.append((place + 3, key, unit[2] if len(unit) > 2 else -1))
            assert key in records, "asked before it was told"
        else:
            assert key not in records, "a key stands twice"
            records[key] = unit[2]
        place += len(unit) + asks
    return records, questions


def test_words_are_single_tokens() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.get_vocab_size() <= VOCAB
    for word in whole_words():
        assert len(tokenizer.encode(word).ids) == 1, word
    text = 'Straße 17+25 {"city": "Paris"} é\n\n  x'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("context", [64, 1001, 1024, 4096, 8192])
def test_recall(tasks: Tasks, context: int) -> None:
    for depth in (0.0, 0.37, 1.0):
        prompt = tasks.recall(random.Random(f"{context}/{depth}"), context, depth)
        assert len(prompt.tokens) == context
        records, [(place, asked, _)] = read_records(tasks, prompt.tokens)
        assert place == context and len(records) == tasks.records(context)
        assert [records[asked]] == prompt.answer
        [planted] = prompt.planted
        assert prompt.tokens[planted] == prompt.answer[0]
        assert tuple(prompt.tokens[planted - 2 : planted]) == asked
        reached = (planted - len(tasks.prefix)) / (context - len(tasks.prefix))
        assert abs(reached - depth) < 0.03 + 5 / context
        half = sum(key != asked and (key[0] == asked[0] or key[1] == asked[1]) for key in records)
        assert half > (128 if context >= 1000 else len(records) // 3)


def test_copying(tasks: Tasks) -> None:
    for length in (1, 10, 333, 2048):
        prompt = tasks.copying(random.Random(length), length)
        assert len(prompt.answer) == length
        assert [prompt.tokens[i] for i in prompt.planted] == prompt.answer
        assert prompt.tokens[-2:] == tasks.copy and prompt.tokens[-3] == tasks.line
        pairs = list(zip(prompt.answer, prompt.answer[1:], strict=False))
        assert len(set(pairs)) == len(pairs)
        text = tasks.tokenizer.decode(prompt.tokens)
        assert tasks.tokenizer.encode(text).ids == prompt.tokens[len(tasks.prefix) :]


def test_same_seed_same_prompts(tasks: Tasks) -> None:
    def everything(seed: int) -> tuple:
        rng = random.Random(seed)
        return tasks.recall(rng, 300, 0.5), tasks.copying(rng, 50), tasks.chat(rng)

    assert everything(7) == everything(7)
    assert everything(7) != everything(8)


def test_bad_input(tasks: Tasks) -> None:
    with pytest.raises(ValueError, match="no room"):
        tasks.recall(random.Random(0), 10, 0.5)
    with pytest.raises(ValueError, match="depth"):
        tasks.recall(random.Random(0), 100, 1.5)
    with pytest.raises(ValueError, match="1 to 4096"):
        tasks.copying(random.Random(0), 0)


def test_sums() -> None:
    for a in range(100):
        for b in range(100):
            reasoning, content = add(a, b)
            assert content == f"{a} + {b} = {a + b}." and reasoning.endswith(f" So {a + b}.")
            for piece in reasoning.replace("So ", "").rstrip(".").split(". ")[:2]:
                sum_, value = piece.partition(": ")[2].partition(",")[0].split("=")
                assert sum(map(int, sum_.split("+"))) == int(value)
            if b <= a:
                assert subtract(a, b)[1] == f"{a} - {b} = {a - b}."


def test_chat_is_the_templates(tasks: Tasks, tmp_path) -> None:
    """Prompts as transformers renders them; with the answer, the start of the next prompt."""
    from transformers import AutoTokenizer

    from sglang_glm53.tiny.tokenizer import write_tokenizer

    write_tokenizer(tasks.tokenizer, tmp_path, max_length=16384)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(3)
    kinds = set()
    for _ in range(120):
        chat = tasks.chat(rng)
        kinds.add(chat.kind)
        prompt, answer = tasks.chat_tokens(chat)
        assert prompt == theirs.apply_chat_template(
            chat.messages, tools=chat.tools, add_generation_prompt=True, return_dict=False
        )
        calls = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in chat.tool_calls
        ]
        turn = {
            "role": "assistant",
            "content": chat.content,
            "reasoning_content": chat.reasoning,
            "tool_calls": calls,
        }
        following = {"role": "tool" if calls else "user", "content": ""}
        whole = render([*chat.messages, turn, following], chat.tools)
        decoded = tasks.tokenizer.decode(prompt + answer, skip_special_tokens=False)
        assert whole.startswith(decoded)
    assert len(kinds) == 6


def make_batches(tasks: Tasks) -> tuple[Batches, torch.Generator, np.random.Generator]:
    return Batches(tasks, torch.device("cpu")), torch.Generator(), np.random.default_rng(0)


def test_recall_batches_are_prompts(tasks: Tasks) -> None:
    batches, generator, layout = make_batches(tasks)
    shares = []
    for context in (64, 128, 513, 2048):
        for _ in range(3):
            batch = batches.recall(2, context, generator, layout)
            assert batch.tokens.shape == (2, context)
            learned = dict(zip(batch.at.tolist(), batch.kinds.tolist(), strict=True))
            for row, tokens in enumerate(batch.tokens.tolist()):
                records, questions = read_records(tasks, tokens)
                assert questions
                for place, key, value in questions:
                    assert records[key] == value
                    assert learned.pop(row * context + place) == RECALL
                    assert learned.pop(row * context + place + 1) == SIGN
                firsts = [key[0] for key in records]
                shares.append(max(firsts.count(f) for f in set(firsts)) / len(firsts))
            assert not learned
    assert max(shares) > 0.2, "no key that others share a word with"


def test_copy_batches_are_prompts(tasks: Tasks) -> None:
    batches, generator, layout = make_batches(tasks)
    for context in (64, 128, 1024):
        for _ in range(4):
            batch = batches.copying(2, context, generator, layout)
            columns = sorted({place % context for place in batch.at[batch.kinds == COPY].tolist()})
            for tokens in batch.tokens.tolist():
                starts = [i for i in range(context - 1) if tokens[i : i + 2] == tasks.copy]
                assert len(starts) >= 2 and len(starts) % 2 == 0
                expected = []
                for pair, (one, two) in enumerate(zip(starts[::2], starts[1::2], strict=True)):
                    size = two - one
                    assert tokens[one:two] == tokens[two : two + size]
                    assert tokens[two - 1] == tasks.line
                    expected += range(two + 2 + (pair > 0), two + size)
                assert columns == expected


def test_chat_batches(tasks: Tasks) -> None:
    pool = ChatPool(tasks, 80, 1, torch.device("cpu"))
    for group in (0, 1):
        batch = pool.draw(group, 3, np.random.default_rng(2))
        assert (batch.kinds == CHAT).all()
        text = tasks.tokenizer.decode(
            batch.tokens.flatten()[batch.at].tolist(), skip_special_tokens=False
        )
        assert text.count("</think>") == 3
        assert ("<tools>" in tasks.tokenizer.decode(batch.tokens[0].tolist())) == bool(group)


def test_joined(tasks: Tasks) -> None:
    batches, generator, layout = make_batches(tasks)
    one = batches.recall(2, 64, generator, layout)
    two = batches.copying(3, 64, generator, layout)
    both = one.joined(two)
    picked = both.tokens.flatten()[both.at]
    alone = [batch.tokens.flatten()[batch.at] for batch in (one, two)]
    assert torch.equal(picked, torch.cat(alone)) and isinstance(both, Batch)
