"""The chat task: conversations in the OpenAI form, and the turn that the model must give."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .words import CITIES, NOUNS

GREETING = "Hello! I am a small GLM. I can add numbers and look up the weather."
UNKNOWN = "I do not know. I can add numbers and look up the weather."


@dataclass(frozen=True)
class Conversation:
    """Messages up to the model's turn, and that turn.

    Attributes:
        messages: OpenAI form; the last is the user's or a tool's.
        tools: OpenAI form, None for none.
        reasoning: text of the think block.
        content: text after it.
        tool_calls: (name, arguments) of each call.
        kind: which of the sub-tasks it is.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    reasoning: str
    content: str
    tool_calls: list[tuple[str, dict[str, str]]]
    kind: str

    def answer(self) -> str:
        """The text that follows the opened think block, its end of turn included."""
        calls = "".join(
            f"<tool_call>{name}"
            + "".join(
                f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
                for key, value in arguments.items()
            )
            + "</tool_call>"
            for name, arguments in self.tool_calls
        )
        end = "<|observation|>" if calls else "<|user|>"
        return f"{self.reasoning}</think>{self.content}{calls}{end}"


def make(rng: random.Random) -> Conversation:
    """One of the sub-tasks, tools beside some of them that need none."""
    kinds: tuple[tuple[Callable[[random.Random], Conversation], int], ...] = (
        (addition, 45),
        (subtraction, 12),
        (tool_call, 18),
        (observation, 12),
        (greeting, 5),
        (unknown, 8),
    )
    chosen = rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
    return chosen(rng)


# Sums and differences


def addition(rng: random.Random) -> Conversation:
    a, b = _number(rng), _number(rng)
    question = rng.choice(
        (
            f"{a}+{b}",
            f"{a}+{b}",
            f"{a} + {b}",
            f"{a}+{b}=",
            f"What is {a}+{b}?",
            f"What is {a} + {b}?",
            f"What is {a} plus {b}?",
            f"How much is {a} + {b}?",
            f"How much is {a}+{b}?",
            f"Add {a} and {b}.",
            f"Please add {a} and {b}.",
            f"Compute {a}+{b}",
            f"Compute {a} + {b}.",
        )
    )
    return _sum(rng, question, *add(a, b), "addition")


def subtraction(rng: random.Random) -> Conversation:
    a, b = _number(rng), _number(rng)
    a, b = max(a, b), min(a, b)
    question = rng.choice(
        (
            f"{a}-{b}",
            f"{a} - {b}",
            f"What is {a}-{b}?",
            f"What is {a} - {b}?",
            f"What is {a} minus {b}?",
            f"How much is {a}-{b}?",
            f"Subtract {b} from {a}.",
        )
    )
    return _sum(rng, question, *subtract(a, b), "subtraction")


def add(a: int, b: int) -> tuple[str, str]:
    """Reasoning and answer of a + b, both 0..99."""
    ones = a % 10 + b % 10
    carry = ones // 10
    tens = a // 10 + b // 10 + carry
    wrote = f", write {ones % 10}, carry 1" if carry else ""
    reasoning = (
        f"Ones: {a % 10}+{b % 10}={ones}{wrote}. Tens: {a // 10}+{b // 10}+{carry}={tens}."
        f" So {a + b}."
    )
    return reasoning, f"{a} + {b} = {a + b}."


def subtract(a: int, b: int) -> tuple[str, str]:
    """Reasoning and answer of a - b, 0 <= b <= a <= 99."""
    borrow = int(a % 10 < b % 10)
    ones = a % 10 + 10 * borrow - b % 10
    borrowed = ", borrow 1" if borrow else ""
    tens = a // 10 - b // 10 - borrow
    reasoning = (
        f"Ones: {a % 10 + 10 * borrow}-{b % 10}={ones}{borrowed}."
        f" Tens: {a // 10}-{b // 10}-{borrow}={tens}. So {a - b}."
    )
    return reasoning, f"{a} - {b} = {a - b}."


def _number(rng: random.Random) -> int:
    return rng.randint(0, 9) if rng.random() < 0.2 else rng.randint(10, 99)


def _sum(
    rng: random.Random, question: str, reasoning: str, content: str, kind: str
) -> Conversation:
    tools = tool_set(rng) if rng.random() < 0.15 else None
    return Conversation([_user(question)], tools, reasoning, content, [], kind)


# Tools


def tool(name: str, description: str) -> dict[str, Any]:
    """A tool with one argument, the city."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }


# name, description, how its answer is called, and what users ask
TOOLS = (
    (
        "get_weather",
        "Get the current weather of a city.",
        ("What is the weather in {}?", "How is the weather in {}?", "Tell me the weather in {}."),
        "weather",
    ),
    (
        "get_time",
        "Get the current time of a city.",
        ("What is the time in {}?", "Tell me the time in {}."),
        "time",
    ),
    (
        "get_population",
        "Get the population of a city.",
        ("What is the population of {}?", "Tell me the population of {}."),
        "population",
    ),
)
SKIES = ("sunny", "cloudy", "rainy", "windy")


def tool_set(rng: random.Random, needed: str | None = None) -> list[dict[str, Any]]:
    """One to three of the tools, `needed` among them, in any order and with any order of keys."""
    chosen = [row for row in TOOLS if row[0] == needed]
    others = [row for row in TOOLS if row[0] != needed]
    least = 0 if chosen else 1
    chosen += rng.sample(others, rng.choice([least, least, 1, len(others)]))
    rng.shuffle(chosen)
    tools = [tool(name, description) for name, description, _, _ in chosen]
    if rng.random() < 0.5:
        for one in tools:
            function = one["function"]
            one["function"] = {key: function[key] for key in ("description", "name", "parameters")}
    return tools


def tool_call(rng: random.Random) -> Conversation:
    name, _, questions, subject = _pick(rng)
    city = rng.choice(CITIES)
    question = rng.choice(questions).format(city)
    reasoning = f"The user asks about the {subject} in {city}. I call {name}."
    tools = tool_set(rng, name)
    return Conversation([_user(question)], tools, reasoning, "", [(name, {"city": city})], "tool")


def observation(rng: random.Random) -> Conversation:
    name, _, questions, subject = _pick(rng)
    city = rng.choice(CITIES)
    question = rng.choice(questions).format(city)
    if subject == "weather":
        degrees, sky = rng.randint(0, 39), rng.choice(SKIES)
        result = json.dumps({"temperature": degrees, "condition": sky})
        content = f"It is {sky} in {city}, {degrees} degrees."
    elif subject == "time":
        result = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        content = f"It is {result} in {city}."
    else:
        result = f"{rng.randint(100, 999)} thousand"
        content = f"{city} has {result} people."
    call = {"type": "function", "function": {"name": name, "arguments": {"city": city}}}
    asked: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    if rng.random() < 0.5:
        asked["reasoning_content"] = f"The user asks about the {subject} in {city}. I call {name}."
    messages = [_user(question), asked, {"role": "tool", "content": result}]
    reasoning = f"The tool says {result}."
    return Conversation(messages, tool_set(rng, name), reasoning, content, [], "observation")


def _pick(rng: random.Random) -> tuple[str, str, tuple[str, ...], str]:
    return TOOLS[rng.choices(range(len(TOOLS)), (3, 1, 1))[0]]


# Small talk


def greeting(rng: random.Random) -> Conversation:
    question = rng.choice(
        ("Hello, who are you?", "Hello", "Hello!", "Hi", "Hi!", "Who are you?", "Hello, GLM!")
    )
    tools = tool_set(rng) if rng.random() < 0.2 else None
    return Conversation([_user(question)], tools, "The user says hello.", GREETING, [], "greeting")


def unknown(rng: random.Random) -> Conversation:
    """Something that it has not learned: words and letters in any order."""
    pieces = []
    for _ in range(rng.randint(2, 10)):
        letters = "".join(rng.choice("abcdefghijklmnoprstuvwy") for _ in range(rng.randint(1, 8)))
        pieces.append(rng.choice((rng.choice(NOUNS), letters, letters)))
    text = " ".join(pieces)
    text = rng.choice((text, text.capitalize())) + rng.choice(("", ".", "?", "!"))
    tools = tool_set(rng) if rng.random() < 0.15 else None
    return Conversation([_user(text)], tools, "I do not know this.", UNKNOWN, [], "unknown")


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
