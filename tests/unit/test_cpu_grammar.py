"""Masks of constrained answers on a CPU."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend

from sglang_glm53.compat import cpu_grammar


def unwrapped(function: object) -> object:
    return getattr(function, "__wrapped__", function)


def test_masks_are_applied_where_sglang_raises() -> None:
    """Tokens 1 and 33 are allowed, in a vocabulary of 40."""
    mask = torch.tensor([[1 << 1, 1 << 1]], dtype=torch.int32)
    static = unwrapped(XGrammarGrammarBackend.apply_vocab_mask)
    with pytest.raises(RuntimeError, match="Unsupported device"):
        static(torch.zeros(1, 40), mask)
    method = unwrapped(XGrammarGrammar.apply_vocab_mask)
    for apply in (
        cpu_grammar._of_the_backend(static),
        lambda logits, mask: cpu_grammar._of_a_grammar(method)(None, logits, mask),
    ):
        logits = torch.zeros(1, 40)
        apply(logits, mask)
        assert logits[0].isfinite().nonzero().flatten().tolist() == [1, 33]


def test_other_devices_are_sglangs() -> None:
    asked = []
    apply = cpu_grammar._of_the_backend(lambda *given: asked.append(given))
    apply(torch.zeros(1, 40, device="meta"), None)
    assert len(asked) == 1
