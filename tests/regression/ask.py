"""Greedy requests to a running server: token ids to /generate, messages to /v1/chat/completions."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import requests
from server.harness import Server, ServerFailed

TOKENS_AT_ONCE = 65_536  # of the prompts of one HTTP request: it must end before its time is up
SECONDS = 600


@dataclass(frozen=True)
class Reply:
    """What came back for one prompt.

    tokens: generated. cached: prompt tokens that came from the prefix cache. retractions: how often
    the request was retracted. verifies: target passes with speculation, else 0. rank: the
    data-parallel rank that answered. logprob: of the expected first token, nats. selection:
    [prompt + tokens - 1, layers, index_topk] int32, what each row's indexer chose, where it was
    asked for.
    """

    tokens: list[int]
    cached: int
    retractions: int
    verifies: int
    rank: int = 0
    logprob: float | None = None
    selection: np.ndarray | None = None


def ask(
    server: Server,
    prompts: Sequence[list[int]],
    new_tokens: int,
    *,
    expected: Sequence[int] | None = None,
    rids: Sequence[str] | None = None,
    rank: int | None = None,
) -> list[Reply]:
    """Greedy replies of exactly `new_tokens` tokens, in the order of the prompts.

    Args:
        expected: for each prompt the first token whose log-probability is wanted.
        rids: names of the requests.
        rank: the data-parallel rank that must answer.
    """
    replies: list[Reply] = []
    for part in batches(prompts):
        body = _body([prompts[i] for i in part], new_tokens)
        if rank is not None:
            body["routed_dp_rank"] = rank
        if rids is not None:
            body["rid"] = [rids[i] for i in part]
        if expected is not None:
            wanted = [[expected[i]] for i in part]
            body |= {"return_logprob": True, "logprob_start_len": -1, "token_ids_logprob": wanted}
        replies += [_reply(reply) for reply in post(server, "/generate", body)]
    return replies


def ask_with_selection(server: Server, prompt: list[int], layers: int, index_topk: int) -> Reply:
    """One reply of one token, with what the indexers chose.

    The server runs with --enable-return-indexer-topk.
    """
    body = _body([prompt], 1) | {"return_indexer_topk": True}
    (reply,) = post(server, "/generate", body)
    packed = np.frombuffer(base64.b64decode(reply["meta_info"]["indexer_topk"]), dtype=np.int32)
    return _reply(reply, packed.reshape(-1, layers, index_topk))


def chat(
    server: Server,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    max_tokens: int = 256,
) -> dict[str, Any]:
    """The greedy reply's message, in OpenAI's form; reasoning_content is SGLang's."""
    body: dict[str, Any] = {
        "model": "miniature",
        "messages": list(messages),
        "temperature": 0.0,
        "max_tokens": max_tokens,
    }
    if tools:
        body["tools"] = list(tools)
    return post(server, "/v1/chat/completions", body)["choices"][0]["message"]


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    """POST, as JSON; raises ServerFailed with the end of the log."""
    try:
        response = requests.post(server.url + path, json=body, timeout=SECONDS)
    except requests.RequestException as error:
        raise ServerFailed(f"{path}: {error}\n{server.tail()}") from error
    if response.status_code != 200:
        raise ServerFailed(f"{path}: {response.status_code} {response.text}\n{server.tail()}")
    return response.json()


def batches(prompts: Sequence[list[int]], most: int = TOKENS_AT_ONCE) -> Iterator[list[int]]:
    """Indices of the prompts, in order, in parts of at most `most` tokens or one prompt."""
    part: list[int] = []
    filled = 0
    for index, prompt in enumerate(prompts):
        if part and filled + len(prompt) > most:
            yield part
            part, filled = [], 0
        part.append(index)
        filled += len(prompt)
    if part:
        yield part


def _body(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    return {
        "input_ids": prompts,
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
        },
    }


def _reply(reply: dict[str, Any], selection: np.ndarray | None = None) -> Reply:
    meta = reply["meta_info"]
    asked = meta.get("output_token_ids_logprobs") or []
    return Reply(
        tokens=list(reply["output_ids"]),
        cached=int(meta.get("cached_tokens") or 0),
        retractions=int(meta.get("num_retractions") or 0),
        verifies=int(meta.get("spec_verify_ct") or 0),
        rank=int(meta.get("dp_rank") or 0),
        logprob=float(asked[0][0][0]) if asked and asked[0] else None,
        selection=selection,
    )


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call's arguments; empty where they are no JSON object."""
    try:
        read = json.loads(call["function"]["arguments"])
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
