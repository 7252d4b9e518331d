"""Constrained answers on a CPU: SGLang's xgrammar backend applies its masks on accelerators alone.

On a CPU the first request with a JSON schema, a grammar or a thinking budget would end the
scheduler. xgrammar itself has the function for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_glm53 import catalog


def install() -> None:
    """Set the changes (rows of the catalog)."""
    catalog.wrap(
        "sglang.srt.constrained.xgrammar_backend:XGrammarGrammar.apply_vocab_mask", _of_a_grammar
    )
    catalog.wrap(
        "sglang.srt.constrained.xgrammar_backend:XGrammarGrammarBackend.apply_vocab_mask",
        _of_the_backend,
    )


def _of_a_grammar(original: Callable[..., None]) -> Callable[..., None]:
    def apply_vocab_mask(self: Any, logits: Any, vocab_mask: Any) -> None:
        if not _masked_on_cpu(logits, vocab_mask):
            original(self, logits, vocab_mask)

    return apply_vocab_mask


def _of_the_backend(original: Callable[..., None]) -> Callable[..., None]:
    def apply_vocab_mask(logits: Any, vocab_mask: Any) -> None:
        if not _masked_on_cpu(logits, vocab_mask):
            original(logits, vocab_mask)

    return apply_vocab_mask


def _masked_on_cpu(logits: Any, vocab_mask: Any) -> bool:
    """Mask logits [rows, vocabulary] by the bits of vocab_mask [rows, vocabulary / 32]."""
    if logits.device.type != "cpu":
        return False
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)
    return True
