"""Tests against the real ``sglang serve``."""
