"""docs/troubleshooting.md, written from the rules.

python -m sglang_glm53.checks.document docs/troubleshooting.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_glm53.checks.rule import FAIL, Rule
from sglang_glm53.checks.rules import ALL

HEAD = """\
# Troubleshooting

What goes wrong with GLM-5.3 in SGLang, by what you see. This page is written from the rules of
`glm53 doctor` (`python -m sglang_glm53.checks.document docs/troubleshooting.md`), so each entry is
also a check:

```console
$ glm53 doctor                                          # this environment and machine
$ glm53 doctor --model DIR                              # and a checkpoint's config and tokenizer
$ glm53 doctor -- sglang serve --model-path DIR ...     # and a server's command line
$ glm53 check DIR                                       # a checkpoint's files, by their headers
```

**fail**: the server would not start, would hang or would give garbage; `glm53 doctor` exits with 1.
**warn**: it serves, slower or otherwise than you expect. Rules marked *at start* also run inside
the server: a failure ends it with one line before a weight is loaded, a warning is logged once.
`GLM53_DOCTOR=warn` logs failures too, `GLM53_DOCTOR=off` asks nothing. In what the doctor says, …
stands for your values. [known-issues.md](known-issues.md) has the problems that were reported in
public and where each stands: fixed here, seen by one of these rules, or why neither.
"""

_THREAD = re.compile(r"^([\w.-]+/[\w.-]+)#(\d+)(.*)$")
_VALUE = re.compile(r"(?<!\{)\{(\w+)(?:!r)?\}(?!\})")
_BARE = re.compile(r"^\{\w+\}$")
_TAG = re.compile(r"(?<!`)(</?[\w|]+>)(?!`)")


def document() -> str:
    """The page."""
    parts = [HEAD, _contents()]
    for subject, rules in ALL.items():
        parts.append(f"## {subject}\n")
        parts.extend(_entry(rule) for rule in rules)
    return "\n".join(parts).rstrip() + "\n"


def link(source: str) -> str:
    """A thread ("owner/repo#12") as a link, anything else as it is."""
    found = _THREAD.match(source)
    if not found:
        return source
    repository, number, rest = found.groups()
    text = f"{repository.removeprefix('sgl-project/')}#{number}"
    return f"[{text}](https://github.com/{repository}/issues/{number}){rest}"


def _contents() -> str:
    """One line a subject, with links to its rules."""
    lines = ["| | |", "|---|---|"]
    for subject, rules in ALL.items():
        names = ", ".join(f"[{rule.id}](#{rule.id})" for rule in rules)
        lines.append(f"| {subject} | {names} |")
    return "\n".join(lines) + "\n"


def _entry(rule: Rule) -> str:
    level = "fail" if rule.severity == FAIL else "warn"
    where = ", at start" if rule.at_start else ""
    rows = (
        ("Symptom", rule.symptom),
        ("Cause", rule.cause),
        ("The doctor says", _plain(rule.message)),
        ("Cure", "as the doctor says" if _BARE.match(rule.cure) else _plain(rule.cure)),
        ("Source", ", ".join(link(source) for source in rule.source)),
    )
    lines = [f"- {name}: {_quoted(text)}" for name, text in rows if text.strip("…")]
    return f"### {rule.id}\n\n*{level}{where}.* Checks that {rule.title}.\n\n" + "\n".join(
        [*lines, ""]
    )


def _plain(text: str) -> str:
    """A format string for readers: … stands for its values."""
    return re.sub("…+", "…", _VALUE.sub("…", text)).replace("{{", "{").replace("}}", "}")


def _quoted(text: str) -> str:
    """Tags in backticks, since Markdown would take them for HTML."""
    return _TAG.sub(r"`\1`", text)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m sglang_glm53.checks.document FILE", file=sys.stderr)
        return 1
    Path(argv[0]).write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
