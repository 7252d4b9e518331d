"""Whether a text is, or may still become, the name of a tool or of a parameter.

`None` says that the text so far does not settle it. An answer that is given for a text holds for
every longer one, so that it does not depend on how a stream was cut.
"""

from __future__ import annotations

import re

from sglang_glm53.chat import tags
from sglang_glm53.chat.events import Tools

LONGEST_NAME = 128  # characters; OpenAI's limit is 64
LONGEST_KEY = 256
# What may be a tool's name: OpenAI's letters, and those that namespaces use.
_NAME = re.compile(rf"[\w.:/-]{{0,{LONGEST_NAME}}}", re.ASCII)
_SPACE = " \t\n\r\f\v"  # stripped, not matched: a regex with \s* at both ends is quadratic


class Names:
    """The names of a request's tools and of their parameters."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def header(self, after: str) -> tuple[str, str] | bool | None:
        """What follows `<tool_call>`: the tool's name and the text up to its arguments.

        `after` is all that follows. The name may be that of a tool that the request does not have;
        False: no call begins here.
        """
        end = after.find("<")
        head = after if end < 0 else after[:end]
        if not self._may_be_header(head):
            return False
        rest = "" if end < 0 else after[end:]
        if not rest or tags.may_become(rest, (tags.KEY, tags.KEY_END, tags.CALL_END)):
            return None
        if rest.startswith(tags.KEY_END):
            return self._name_and_key(head) or False
        name = head.strip()
        if not name or not rest.startswith((tags.KEY, tags.CALL_END)):
            return False
        known = self._tools.is_known(name) or _NAME.fullmatch(name)
        return (name, head) if known else False

    def bare_key(self, name: str, rest: str) -> bool | None:
        """Whether a parameter of tool `name` and `</arg_key>` come next, `<arg_key>` missing."""
        end = rest.find("<")
        key = (rest if end < 0 else rest[:end]).rstrip()
        keys = self._keys(name)
        if end < 0:
            return None if any(known.startswith(key) for known in keys) else False
        if key not in keys:
            return False
        if tags.may_become(rest[end:], (tags.KEY_END,)):
            return None
        return rest.startswith(tags.KEY_END, end)

    def _may_be_header(self, head: str) -> bool:
        if _NAME.fullmatch(head.strip(_SPACE)):
            return True
        start = head.lstrip()
        if len(start) > LONGEST_NAME + LONGEST_KEY:
            return False
        for name in self._tools.names:
            if name.startswith(start):
                return True
            if start.startswith(name):
                rest = start[len(name) :].strip()
                if not rest or any(key.startswith(rest) for key in self._keys(name)):
                    return True
        return False

    def _name_and_key(self, head: str) -> tuple[str, str] | None:
        """A tool's name with a parameter's beside it: the name, and the text up to the key."""
        start = head.lstrip()
        for name in sorted(self._tools.names, key=len, reverse=True):
            if start.startswith(name) and start[len(name) :].strip() in self._keys(name):
                return name, head[: len(head) - len(start) + len(name)]
        return None

    def _keys(self, name: str) -> frozenset[str]:
        return self._tools.parameters(name) - {""}
