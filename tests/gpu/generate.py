"""Asks one engine all requests of a file; SGLang's own class or ours serves it.

usage: GLM53_SERVE=stock python -m gpu.generate SIDE CHECKPOINT REQUESTS OUT.json '{"option": ...}'
SIDE is stock, ours or default (see `check_side`); the options are `sglang.Engine`'s arguments. The
process fails if another side serves than the one it was told to ask.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from .prompts import Group, read_requests


def ask(engine: Any, group: Group) -> list[dict[str, Any]]:
    """The answers to one group, in the order of its prompts.

    Returns:
        tokens: the ids generated. logprobs: theirs. top: for each the two best as
        [log-probability, id]. prompt_logprobs: of prompt tokens 1 to n - 1, where asked for.
        cached: prompt tokens from the prefix cache. verifies: target passes of a request with
        speculation, else 0.
    """
    replies = engine.generate(
        input_ids=group.prompts,
        sampling_params={
            "temperature": 0.0,
            "max_new_tokens": group.new_tokens,
            "ignore_eos": True,
        },
        return_logprob=True,
        logprob_start_len=0 if group.prompt_logprobs else -1,
        top_logprobs_num=2,
    )
    return [
        _answer(reply, tokens, group) for reply, tokens in zip(replies, group.prompts, strict=True)
    ]


def _answer(reply: dict[str, Any], prompt: list[int], group: Group) -> dict[str, Any]:
    meta, tokens = reply["meta_info"], list(reply["output_ids"])
    output = meta["output_token_logprobs"]
    assert [entry[1] for entry in output] == tokens, "log-probabilities are of other tokens"
    answer = {
        "tokens": tokens,
        "logprobs": [entry[0] for entry in output],
        "top": [
            [[value, token] for value, token, *_ in best] if best else []
            for best in meta.get("output_top_logprobs") or [[]] * len(tokens)
        ],
        "prompt_logprobs": [],
        "cached": meta.get("cached_tokens", 0),
        "verifies": meta.get("spec_verify_ct") or 0,
    }
    if group.prompt_logprobs:
        given = meta["input_token_logprobs"]
        assert [entry[1] for entry in given] == prompt, "the prompt's log-probabilities misalign"
        answer["prompt_logprobs"] = [entry[0] for entry in given[1:]]
    return answer


def served_by(engine: Any) -> dict[str, Any]:
    """The engine's status block: which classes serve (see `sglang_glm53/status.py`)."""
    return engine.get_server_info()["internal_states"][0]["glm53"]


def check_side(block: dict[str, Any], side: str) -> None:
    """Raises AssertionError unless the right side serves.

    side: "stock", "ours", or "default": ours, or stock where ours stood down and says why.
    """
    wanted = "stock" if side == "default" and block["stood_down"] else side
    wanted = "ours" if wanted == "default" else wanted
    assert block["serving"] == wanted, f"asked for {side}, but {block['model']} serves: {block}"
    assert not block["error"], block["error"]


def run(side: str, checkpoint: str, requests: Path, out: Path, options: dict[str, Any]) -> None:
    """Start the engine, ask everything, and write `out` after every group."""
    import sglang

    began = time.monotonic()
    engine = sglang.Engine(
        model_path=checkpoint, skip_tokenizer_init=True, log_level="warning", **options
    )
    try:
        block = served_by(engine)
        check_side(block, side)
        record: dict[str, Any] = {
            "side": side,
            "options": options,
            "status": block,
            "started_seconds": round(time.monotonic() - began, 1),
            "groups": {},
            "complete": False,
        }
        name = out.stem
        print(f"{name}: {block['model']} after {record['started_seconds']} s", flush=True)
        for group in read_requests(requests):
            began = time.monotonic()
            record["groups"][group.name] = ask(engine, group)
            print(f"{name}: {group.name} {time.monotonic() - began:.1f} s", flush=True)
            out.write_text(json.dumps(record))
        record["complete"] = True
        out.write_text(json.dumps(record))
    finally:
        engine.shutdown()


def main() -> None:
    """See the module's usage line."""
    side, checkpoint, requests, out, options = sys.argv[1:]
    assert side in ("stock", "ours", "default"), side
    run(side, checkpoint, Path(requests), Path(out), json.loads(options))


if __name__ == "__main__":
    main()
