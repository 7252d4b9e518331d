"""What SGLang's chat endpoint is told about GLM-5's prompts and the ends of its answers.

Each function takes a method of OpenAIServingChat and gives the one that stands in its place; for a
server without our reasoning parser it does what it did.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

THINK = "<think>"
LOWEST_EFFORT = "low"
_NO_THINKING = ("none", "minimal", "off")


def parses(chat: Any) -> bool:
    """Whether our reasoning detector serves this endpoint."""
    from sglang_glm53.chat.glm45 import Glm53ReasoningDetector

    return isinstance(getattr(chat, "_reasoning_detector", None), Glm53ReasoningDetector)


# --- what a prompt opens ------------------------------------------------------------------------


def ask_the_prompt(original: Callable[..., bool]) -> Callable[..., bool]:
    """Whether an answer begins inside a think block: the rendered prompt says so.

    SGLang goes by words of the template, and by the request's switches: with an edited header it
    takes enable_thinking for a switch that GLM-5.3 does not have, and the reasoning, closed by
    `</think>`, comes as the answer.
    """

    def _get_reasoning_from_request(self: Any, request: Any) -> bool:
        if parses(self):
            opened = opens_thinking(self, _template_arguments(request))
            if opened is not None:
                return opened
        return original(self, request)

    return _get_reasoning_from_request


def opens_thinking(chat: Any, arguments: dict[str, Any]) -> bool | None:
    """Whether the template's generation prompt leaves `<think>` open; None: it cannot be tried.

    Args:
        chat: SGLang's OpenAIServingChat.
        arguments: what a request gives the template, by name.
    """
    if getattr(chat.template_manager, "chat_template_name", None) is not None:
        return None  # a conversation template of SGLang's own: there is no template to render
    tokenizer = chat.tokenizer_manager.tokenizer
    try:
        # Clients choose the arguments: neither their number nor their length is kept.
        asked = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).digest()
        key = (getattr(tokenizer, "chat_template", None), asked)
        known = chat.__dict__.setdefault("_glm53_opens_thinking", {})
        if key not in known:
            if len(known) >= 64:
                known.clear()
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": "?"}],
                tokenize=False,
                add_generation_prompt=True,
                **arguments,
            )
            known[key] = str(prompt).rstrip().endswith(THINK)
        return known[key]
    except Exception as error:  # a template is anybody's program
        logger.debug("the chat template cannot be tried with %s: %s", arguments, error)
        return None


def _template_arguments(request: Any) -> dict[str, Any]:
    given = dict(getattr(request, "chat_template_kwargs", None) or {})
    effort = getattr(request, "reasoning_effort", None)
    return {"reasoning_effort": effort, **given} if effort is not None else given


# --- what is asked for and cannot be ------------------------------------------------------------


def ask_for_what_it_can(original: Callable[..., Any]) -> Callable[..., Any]:
    """No thinking, of a template that always thinks, becomes the lowest effort, with a note.

    Its template takes an effort that it does not know for the highest.
    """

    def _process_messages(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if parses(self):
            defaults = getattr(self, "default_chat_template_kwargs", None) or {}
            lower_effort(self, request, defaults)
        return original(self, request, *args, **kwargs)

    return _process_messages


def lower_effort(chat: Any, request: Any, defaults: dict[str, Any]) -> None:
    """Ask for the lowest effort where the request or the server's defaults ask for no thinking."""
    asked = {**defaults, **_template_arguments(request)}
    effort = asked.get("reasoning_effort")
    is_none = isinstance(effort, str) and effort.lower() in _NO_THINKING
    switches = [name for name in ("enable_thinking", "thinking") if asked.get(name) is False]
    if not (is_none or switches) or not opens_thinking(chat, asked):
        return
    off = f"reasoning_effort={effort}" if is_none else f"{switches[0]}=false"
    if effort is None or is_none:
        request.reasoning_effort = LOWEST_EFFORT
        # Here too: the server's defaults and the template's arguments come after the field.
        given = dict(request.chat_template_kwargs or {})
        request.chat_template_kwargs = {**given, "reasoning_effort": LOWEST_EFFORT}
    if off not in chat.__dict__.setdefault("_glm53_told", set()):
        chat._glm53_told.add(off)
        logger.warning(
            "sglang-glm53: a request asks for %s, but this chat template always opens <think>: it "
            "is answered with reasoning_effort=%s, its thoughts in reasoning_content (told once)",
            off,
            request.reasoning_effort or effort,
        )


# --- how an answer ended ------------------------------------------------------------------------


def tell_how_streams_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the detector know whether a stream ended by itself (see think.py)."""

    def _process_reasoning_stream(
        self: Any,
        index: int,
        delta: str,
        reasoning_parser_dict: dict[int, Any],
        content: dict[str, Any],
        request: Any,
        finish_reason_type: str | None = None,
    ) -> Any:
        from sglang_glm53.chat.glm45 import ended_by_itself

        reason = content.get("meta_info", {}).get("finish_reason")
        with ended_by_itself(_by_itself(reason)):
            return original(
                self, index, delta, reasoning_parser_dict, content, request, finish_reason_type
            )

    return _process_reasoning_stream


def tell_how_answers_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """Close the think block of answers that ended by themselves without one.

    SGLang parses a whole answer without its finish reason, several of a request in one call: the
    tag in front of the text says for each what the reason would.
    """

    def _build_chat_response(self: Any, request: Any, ret: Any, created: int) -> Any:
        if parses(self) and request.separate_reasoning:
            thinks = self._get_reasoning_from_request(request)
            ret = [_closed(item) if thinks else item for item in ret]
        return original(self, request, ret, created)

    return _build_chat_response


def _by_itself(reason: dict[str, Any] | None) -> bool:
    """Whether a token ended the answer, and not a limit, an abort or a client's stop string."""
    reason = reason or {}
    return reason.get("type") == "stop" and not isinstance(reason.get("matched"), str)


def _closed(item: dict[str, Any]) -> dict[str, Any]:
    from sglang_glm53.chat.think import THINK_END, ThinkReader

    text = item.get("text")
    ended = _by_itself(item.get("meta_info", {}).get("finish_reason"))
    if not ended or not isinstance(text, str) or THINK_END in text:
        return item
    reader = ThinkReader(thinks=True)
    parts = [reader.feed(text), reader.finish(by_itself=False)]
    answered = any(answer for _, answer in parts)
    return item if answered else {**item, "text": THINK + THINK_END + text.removeprefix(THINK)}
