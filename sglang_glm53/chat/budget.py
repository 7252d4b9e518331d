"""The thinking budget of SGLang's processor for GLM, in the tokens of the model that is served.

SGLang has two ways to end thoughts: --enable-strict-thinking, which reads the id of `</think>` from
the tokenizer, and a custom logit processor (`Glm4MoeThinkingBudgetLogitProcessor`), whose ids are
GLM-4's. In GLM-5's vocabulary those are other words, so it never finds the start and does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

PROCESSOR = "sglang.srt.sampling.custom_logit_processor:ThinkingBudgetLogitProcessor.__call__"
END = "</think>"
GLM = "Glm4MoeThinkingBudgetLogitProcessor"


def with_ids_of_the_tokenizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give the processor of GLM, and only that, the ids of the request's own tokenizer."""

    def __call__(self: Any, logits: Any, custom_param_list: Any) -> Any:
        if any(base.__name__ == GLM for base in type(self).__mro__):
            found = ids(_tokenizer(custom_param_list))
            if found is not None:
                self.THINKING_START_TOKEN_ID, self.THINKING_END_TOKEN_ID = found[:2]
                self.NEW_LINE_TOKEN_ID = found[2]
        return original(self, logits, custom_param_list)

    return __call__


@functools.lru_cache(maxsize=8)
def ids(tokenizer: Any) -> tuple[int, int, int] | None:
    """The ids of `<think>`, `</think>` and a line end; None where one of them is not one token."""
    if tokenizer is None:  # --skip-tokenizer-init
        return None
    found = [tokenizer.encode(text, add_special_tokens=False) for text in ("<think>", END, "\n")]
    if any(len(tokens) != 1 for tokens in found):
        return None
    return found[0][0], found[1][0], found[2][0]


def _tokenizer(parameters: Any) -> Any:
    for given in parameters or ():
        request = (given or {}).get("__req__")
        if getattr(request, "tokenizer", None) is not None:
            return request.tokenizer
    return None
