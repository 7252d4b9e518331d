"""Entry point `glm53` of the group `torch.backends`: says no where SGLang is told to leave us out.

SGLANG_PLUGINS filters both of SGLang's entry point groups, and SGLANG_PLATFORM leaves out every
other package that has a platform plugin: with either set for another package, SGLang runs nothing
of ours and would serve its own class without a word. PyTorch calls its entry points whenever it is
imported; this one returns at once unless one of the two variables leaves us out, and then only sets
the guard over the model classes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

NAME = "glm53"


def arm() -> None:
    """Set the guard if this process would not get it from SGLang."""
    if not left_out(os.environ):
        return
    try:
        from sglang_glm53.registration import guard_left_out

        guard_left_out()
    except Exception as error:
        from sglang_glm53.plugin import give_up

        give_up(error, doing="guarding the model classes")


def left_out(environment: Mapping[str, str]) -> bool:
    """Whether these variables keep SGLang from running our plugin."""
    plugins = [name.strip() for name in environment.get("SGLANG_PLUGINS", "").split(",")]
    named = [name for name in plugins if name]
    platform = environment.get("SGLANG_PLATFORM", "")
    return bool(named and NAME not in named) or bool(platform and platform != NAME)
