"""Requests of a fault run: healthy ones, aborted ones, and such as a server must refuse."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import requests

SECONDS = 240  # without a byte: a hang
MESSY = (
    "Grüße, Ωμέγα, 你好, שלום, ",
    "👩‍👩‍👧‍👦 and 🏴󠁧󠁢󠁷󠁬󠁳󠁿",
    "zero\u200bwidth and e\u0301\u0327\u0323" * 9,
    "<think></think><tool_call>f<arg_key>",
    "\u202eright to left",
    "nul \u0000 in it",
    "\ufffe \ufeff",
)


@dataclass(frozen=True)
class Outcome:
    """What a request came to.

    status: of HTTP; 0 where this side left. tokens: that came back. wrong: what must not be, or "".
    """

    kind: str
    status: int
    tokens: int = 0
    wrong: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Target:
    """The server that is asked: its address, port, and the limits of its checkpoint."""

    url: str
    port: int
    context: int
    vocabulary: int


Kind = Callable[[Target, random.Random], Outcome]


def _ids(target: Target, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, target.vocabulary - 10) for _ in range(count)]


def _generate(target: Target, rng: random.Random, **parameters: Any) -> dict[str, Any]:
    return {
        "input_ids": _ids(target, rng, rng.randrange(5, 300)),
        "stream": True,
        "rid": f"run-{rng.getrandbits(60):x}",
        "sampling_params": {
            "temperature": rng.choice((0.0, 0.7, 1.0)),
            "max_new_tokens": rng.randrange(4, 64),
            "ignore_eos": True,
            **parameters,
        },
    }


def _events(reply: requests.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line.startswith(b"data:") and not line.endswith(b"[DONE]"):
            yield json.loads(line[5:])


def _finish(event: dict[str, Any]) -> str:
    return ((event.get("meta_info") or {}).get("finish_reason") or {}).get("type", "")


# --- what must be answered -----------------------------------------------------------------------


def stream(target: Target, rng: random.Random) -> Outcome:
    """Read to its end."""
    body = _generate(target, rng)
    return _read(target, body, "stream", pause=lambda: 0.0)


def slow_reader(target: Target, rng: random.Random) -> Outcome:
    """Pauses between events: the server must not wait for it."""
    return _read(target, _generate(target, rng), "slow reader", pause=lambda: 0.4 * rng.random())


def _read(
    target: Target, body: dict[str, Any], kind: str, *, pause: Callable[[], float]
) -> Outcome:
    wanted = body["sampling_params"]["max_new_tokens"]
    event: dict[str, Any] = {}
    url = target.url + "/generate"
    with requests.post(url, json=body, stream=True, timeout=SECONDS) as reply:
        if reply.status_code != 200:
            return Outcome(kind, reply.status_code, wrong=f"refused: {reply.text[:200]}")
        for told in _events(reply):
            event = told
            time.sleep(pause())
    tokens = len(event.get("output_ids") or ())
    wrong = "" if tokens == wanted and _finish(event) == "length" else f"{tokens} of {wanted}"
    return Outcome(kind, 200, tokens, wrong and f"{wrong} tokens: {str(event)[:200]}")


def chat(target: Target, rng: random.Random) -> Outcome:
    """Any Unicode, with and without a tool, in one piece."""
    text = " ".join(rng.choices(MESSY, k=rng.randrange(1, 4)))
    body = _chat([{"role": "user", "content": text}], rng)
    if rng.random() < 0.3:
        body["tools"] = [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ]
    reply = _post(target, "/v1/chat/completions", body)
    if reply.status_code != 200:
        return Outcome("chat", reply.status_code, wrong=f"refused: {reply.text[:200]}")
    return Outcome("chat", 200, reply.json()["usage"]["completion_tokens"])


def constrained(target: Target, rng: random.Random) -> Outcome:
    """An answer that must be JSON of a schema, and one that is no schema."""
    schema: Any = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
    broken = rng.random() < 0.3
    if broken:
        schema = {"type": rng.choice(("poem", "\ud83d", 7))}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = _chat([{"role": "user", "content": "x"}], rng, response_format=form)
    reply = _post(target, "/v1/chat/completions", body)
    if broken:
        return _answered_or_refused(reply, "no schema")
    if reply.status_code != 200:
        return Outcome("constrained", reply.status_code, wrong=f"refused: {reply.text[:200]}")
    return Outcome("constrained", 200, reply.json()["usage"]["completion_tokens"])


def surrogate(target: Target, rng: random.Random) -> Outcome:
    """Half of a surrogate pair, which JSON can say and UTF-8 cannot."""
    text = json.dumps(_chat([{"role": "user", "content": "half \ud83d"}], rng))
    return _answered_or_refused(_post_text(target, text), "lone surrogate")


def _chat(messages: Any, rng: random.Random, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": messages, "max_tokens": rng.randrange(4, 48), **fields}


# --- what is left or ended before its time -------------------------------------------------------


def leave(target: Target, rng: random.Random) -> Outcome:
    """Close the connection after some events, or before the first."""
    body = _generate(target, rng, max_new_tokens=400)
    most = rng.choice((0, 0, 1, 3, 9))
    url = target.url + "/generate"
    seen = 0
    if most == 0:
        try:
            requests.post(url, json=body, timeout=(10, 0.05 + rng.random()))
        except (
            requests.RequestException
        ):  # a timeout while the body is read has no class of its own
            pass
        return Outcome("client leaves", 0)
    with requests.post(url, json=body, stream=True, timeout=SECONDS) as reply:
        for event in _events(reply):
            seen = len(event.get("output_ids") or ())
            most -= 1
            if most <= 0:
                break
    return Outcome("client leaves", 0, seen)


def abort(target: Target, rng: random.Random) -> Outcome:
    """/abort_request after the first event: the stream must end, with the reason."""
    body = _generate(target, rng, max_new_tokens=400)
    event: dict[str, Any] = {}
    url = target.url + "/generate"
    with requests.post(url, json=body, stream=True, timeout=SECONDS) as reply:
        for told in _events(reply):
            if not event:
                _post(target, "/abort_request", {"rid": body["rid"]})
            event = told
    kind = _finish(event)
    wrong = "" if kind in ("abort", "length") else f"ended by {kind!r}: {str(event)[:200]}"
    return Outcome("abort", reply.status_code, len(event.get("output_ids") or ()), wrong)


# --- what must be refused ------------------------------------------------------------------------


def oversized(target: Target, rng: random.Random) -> Outcome:
    count = target.context + rng.randrange(1, 2000)
    if rng.random() < 0.5:
        return _refused(
            _post(target, "/generate", {"input_ids": _ids(target, rng, count)}), "oversized prompt"
        )
    body = _chat([{"role": "user", "content": "word " * count}], rng)
    return _refused(_post(target, "/v1/chat/completions", body), "oversized prompt")


def huge_max_tokens(target: Target, rng: random.Random) -> Outcome:
    """More than the context holds: refused, or cut to it. Cut ones are left."""
    most = rng.choice((10**6, 2**31, 2**63, 10**30, -5))
    body = _chat([{"role": "user", "content": "go"}], rng, max_tokens=most)
    return _answered_or_refused(_post(target, "/v1/chat/completions", body), "huge max_tokens")


def bad_json(target: Target, rng: random.Random) -> Outcome:
    whole = json.dumps(_chat([{"role": "user", "content": "x"}], rng))
    text = rng.choice((whole[: rng.randrange(1, len(whole))], "", "[]", "null", "{'a': 1}", "\x00"))
    path = rng.choice(("/v1/chat/completions", "/v1/completions", "/generate"))
    return _refused(_post_text(target, text, path), "bad JSON")


def wrong_role(target: Target, rng: random.Random) -> Outcome:
    role = rng.choice(("wizard", "", 7, None, ["user"]))
    body = _chat([{"role": role, "content": "x"}], rng)
    return _refused(_post(target, "/v1/chat/completions", body), "wrong role")


def wrong_field(target: Target, rng: random.Random) -> Outcome:
    """A field of a wrong type or range."""
    messages = [{"role": "user", "content": "x"}]
    field: dict[str, Any] = rng.choice(
        (
            {"temperature": "hot"},
            {"temperature": -1},
            {"top_p": 5},
            {"top_p": 0},
            {"messages": "x"},
            {"messages": []},
            {"messages": [7]},
            {"n": 0},
            {"stop": 7},
            {"tools": "f"},
            {"response_format": {"type": "poem"}},
            {"top_logprobs": "many"},
        )
    )
    body = {**_chat(messages, rng), **field}
    return _refused(_post(target, "/v1/chat/completions", body), f"wrong field {sorted(field)[0]}")


def wrong_place(target: Target, rng: random.Random) -> Outcome:
    if rng.random() < 0.5:
        return _refused(_post(target, "/v1/no_such_place", {}), "wrong address")
    reply = requests.get(target.url + "/v1/chat/completions", timeout=SECONDS)
    return _refused(reply, "wrong method")


def half_a_request(target: Target, rng: random.Random) -> Outcome:
    """A body that is announced and never comes."""
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=5)
    try:
        connection.putrequest("POST", "/generate")
        connection.putheader("Content-Length", "100000")
        connection.endheaders(b'{"text": "')
        time.sleep(rng.random())
    finally:
        connection.close()
    return Outcome("half a request", 0)


def _post(target: Target, path: str, body: Any) -> requests.Response:
    return requests.post(target.url + path, json=body, timeout=SECONDS)


def _post_text(target: Target, text: str, path: str = "/v1/chat/completions") -> requests.Response:
    headers = {"Content-Type": "application/json"}
    url = target.url + path
    return requests.post(url, data=text.encode(), headers=headers, timeout=SECONDS)


def _refused(reply: requests.Response, kind: str) -> Outcome:
    """It must be a 4xx that says why."""
    reason = _reason(reply)
    if not 400 <= reply.status_code < 500:
        return Outcome(kind, reply.status_code, wrong=f"not refused: {reply.text[:200]}")
    wrong = "" if reason else f"no reason: {reply.text[:200]!r}"
    return Outcome(kind, reply.status_code, wrong=wrong, reason=reason)


def _answered_or_refused(reply: requests.Response, kind: str) -> Outcome:
    return Outcome(kind, 200) if reply.status_code == 200 else _refused(reply, kind)


def _reason(reply: requests.Response) -> str:
    try:
        said = reply.json()
    except ValueError:
        return reply.text.strip()
    if not isinstance(said, dict):
        return str(said)
    error = said.get("error")
    inner = error.get("message") if isinstance(error, dict) else error
    found = inner or said.get("message") or said.get("detail") or ""
    return found if isinstance(found, str) else json.dumps(found)


# Of 64 streams about half are healthy at any time; a refusal is quick.
KINDS: tuple[tuple[Kind, int], ...] = (
    (stream, 30),
    (slow_reader, 8),
    (chat, 12),
    (constrained, 4),
    (surrogate, 2),
    (leave, 12),
    (abort, 10),
    (oversized, 4),
    (huge_max_tokens, 3),
    (bad_json, 5),
    (wrong_role, 4),
    (wrong_field, 6),
    (wrong_place, 2),
    (half_a_request, 2),
)
