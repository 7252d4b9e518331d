"""`glm53 tiny`: a small GLM-5.3 checkpoint with random weights and real structure.

Everything that serves the large model serves this one: the same architecture name, config fields,
tensor names, tokenizer files and chat template. It is made to be tested with, so its weights are
random but not arbitrary (see `structure.py`): greedy tokens have a margin, attention matters,
and the MTP layer's proposals are accepted most of the time.
"""

from __future__ import annotations

from sglang_glm53.tiny.checkpoint import make_checkpoint
from sglang_glm53.tiny.options import TinyOptions

__all__ = ["TinyOptions", "make_checkpoint"]
