"""Entry point `glm53` of the group `sglang.srt.platforms`: the earliest hook that SGLang has.

SGLang asks for platforms while `sglang.srt.utils` is being imported, in every process and before
it imports a kernel, so this is where a machine without a GPU is made usable, and where the guard
over the model classes is set. `activate` returns None: the platform stays SGLang's own.

Nothing of ours is imported at module level (see plugin.py).
"""

from __future__ import annotations

_active = False


def activate() -> None:
    """Prepare this process; idempotent. On any failure print one line and end the process."""
    global _active
    if _active:
        return None
    _active = True
    try:
        from sglang_glm53.registration import prepare_process

        prepare_process()
    except Exception as error:
        from sglang_glm53.plugin import give_up

        give_up(error, doing="preparing the process for SGLang")
    return None
