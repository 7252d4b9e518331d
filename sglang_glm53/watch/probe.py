"""The start-up acceptance probe: a draft that never agrees is told before the first request.

The server still answers correctly then, only slower: nothing else says so.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from sglang_glm53 import support

logger = logging.getLogger(__name__)

# Four ids over and over: a continuation that any draft guesses. Ids of plain text in GLM's
# vocabulary, and of something in any other. No page of 64 tokens becomes full, so that nothing
# stays in the prefix cache.
PROMPT = (100, 200, 300, 400) * 8
NEW_TOKENS = 24
SECONDS = 120.0

CAUSES = (
    "the MTP layer's tensors are missing, random or of another checkpoint (glm53 check DIR)",
    "a head or scales of the MTP layer that were not loaded",
    "hidden states that the draft is not trained on (--speculative-algorithm EAGLE is for MTP)",
    "a draft's cache that is not written",
)


def before_ready(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ask after SGLang's own warm-up, and before the server says that it is ready."""
    signature = inspect.signature(original)

    def _wait_and_warmup(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        warm_up = bound.arguments["execute_warmup_func"]

        def warm_up_and_probe(server_args: Any) -> bool:
            succeeded = warm_up(server_args)
            if succeeded:
                _probe_while_starting(server_args)
            return succeeded

        bound.arguments["execute_warmup_func"] = warm_up_and_probe
        return original(*bound.args, **bound.kwargs)

    return _wait_and_warmup


def _probe_while_starting(server_args: Any) -> None:
    """Probe a server of ours that speculates; whatever fails here keeps no server from starting."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import ServerStatus
    from sglang.srt.runtime_context import get_context

    try:
        state = http_server._global_state
        manager = getattr(state, "tokenizer_manager", None)
        given = get_context().resolved_server_args_dict()
        if manager is None or not _speculates(manager, given):
            return
        ready = manager.server_status
        manager.server_status = ServerStatus.Starting
        try:
            rows = manager.model_config.vocab_size
            tell(ask(server_args, rows=rows, api_key=given.get("api_key")))
        finally:
            manager.server_status = ready
    except Exception as error:
        logger.warning("sglang-glm53 watch: the start-up probe could not ask: %s", error)


def _speculates(manager: Any, given: Mapping[str, Any]) -> bool:
    return (
        support.is_ours(manager.model_config.hf_config)
        and bool(given.get("speculative_algorithm"))
        and given.get("disaggregation_mode", "null") == "null"
    )


def ask(server_args: Any, *, rows: int, api_key: str | None) -> dict[str, Any]:
    """SGLang's meta_info of a greedy answer to the probe's prompt.

    Args:
        rows: of the vocabulary, which the prompt's ids must not leave.
        api_key: that the server asks for.
    """
    import requests
    from sglang.srt.arg_groups.serving_hook import ssl_verify_of

    response = requests.post(
        server_args.url() + "/generate",
        json={
            "input_ids": [token % rows for token in PROMPT],
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": NEW_TOKENS,
                "ignore_eos": True,
            },
        },
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=SECONDS,
        verify=ssl_verify_of(server_args),
    )
    response.raise_for_status()
    return response.json()["meta_info"]


def tell(meta: dict[str, Any]) -> None:
    """Log what the probe found: a line at level WARNING where no draft was right."""
    passes = int(meta.get("spec_verify_ct") or 0)
    right = int(meta.get("spec_num_correct_drafts") or 0)
    tokens = int(meta.get("completion_tokens") or 0)
    if not passes:
        return
    if right:
        logger.info(
            "sglang-glm53 watch: start-up probe: %d drafts right in %d target passes, "
            "accept length %.2f",
            right,
            passes,
            (tokens - 1) / passes,
        )
        return
    logger.warning(
        "sglang-glm53 watch: start-up probe: no draft was right in %d target passes, each of "
        "which gave one token; answers are right and slow. Likely: %s. Serve without "
        "--speculative-algorithm until it is found",
        passes,
        "; ".join(CAUSES),
    )
