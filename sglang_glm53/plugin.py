"""Entry point `glm53` of the group `sglang.srt.plugins`: SGLang calls it once in each process.

Nothing of ours is imported at module level: whatever fails must fail inside `register`, where it
ends the process. SGLang itself would only log it and serve its own class.
"""

from __future__ import annotations


def register() -> None:
    """Register our classes with SGLang; on any failure print one line and end the process."""
    try:
        from sglang_glm53.registration import register_all

        register_all()
    except Exception as error:
        give_up(error, doing="registering with SGLang")


def give_up(error: Exception, *, doing: str) -> None:
    """End the process (see errors.failed), also where our own errors module does not import."""
    try:
        from sglang_glm53.errors import failed
    except Exception as broken:
        import sys

        sys.stderr.write(f"sglang-glm53: {doing}: {error}; and errors.py: {broken}\n")
        raise SystemExit(1) from error
    failed(error, doing=doing)
