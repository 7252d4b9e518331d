"""Our parsers under SGLang's names for them, in servers of our architecture.

`glm47` (tool calls) and `glm45` (reasoning) are replaced in SGLang's registries when a server of
GLM-5 builds its chat endpoint, so other models keep SGLang's own; GLM53_PARSERS=stock keeps them
for GLM-5 too. The thinking budget's token ids are read from the tokenizer in any case.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_glm53 import catalog, support
from sglang_glm53.errors import Glm53Error, degraded

TOOLS, REASONING = "glm47", "glm45"
VARIABLE = "GLM53_PARSERS"


def install() -> None:
    """Set the changes (rows of the catalog).

    Raises:
        Glm53Error: GLM53_PARSERS says nothing that is known.
    """
    from sglang_glm53.chat import budget, serving

    wanted()  # a wrong value is told before weights are read
    for symbol, factory in (
        (
            "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat.__init__",
            _with_our_parsers,
        ),
        (
            "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat._get_reasoning_from_request",
            serving.ask_the_prompt,
        ),
        (
            "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat._process_messages",
            serving.ask_for_what_it_can,
        ),
        (
            "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat._process_reasoning_stream",
            serving.tell_how_streams_end,
        ),
        (
            "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat._build_chat_response",
            serving.tell_how_answers_end,
        ),
    ):
        catalog.wrap(symbol, factory)
    catalog.wrap(budget.PROCESSOR, budget.with_ids_of_the_tokenizer)


def wanted() -> bool:
    """Whether our parsers are to serve (GLM53_PARSERS).

    Raises:
        Glm53Error: the variable has another value than "ours" or "stock".
    """
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "ours", "stock"):
        raise Glm53Error(f"{VARIABLE}={wish} is unknown; use {VARIABLE}=ours or stock, or unset it")
    return wish != "stock" and degraded() is None


def _with_our_parsers(original: Any) -> Any:
    def __init__(self: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> None:
        if wanted() and support.is_ours(tokenizer_manager.model_config.hf_config):
            register()
        original(self, tokenizer_manager, *args, **kwargs)

    return __init__


def register() -> None:
    """Put our parsers into SGLang's registries (items of two dicts)."""
    catalog.on_load(
        "sglang.srt.function_call.function_call_parser:FunctionCallParser.ToolCallParserEnum",
        _register_tools,
    )
    catalog.on_load(
        "sglang.srt.parser.reasoning_parser:ReasoningParser.DetectorMap", _register_reasoning
    )


def _register_tools(parsers: dict[str, type]) -> None:
    from sglang_glm53.chat.glm47 import Glm53ToolDetector

    parsers[TOOLS] = Glm53ToolDetector


def _register_reasoning(parsers: dict[str, type]) -> None:
    from sglang_glm53.chat.glm45 import Glm53ReasoningDetector

    parsers[REASONING] = Glm53ReasoningDetector
