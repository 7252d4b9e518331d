"""One measurement in a process of its own: `python -m sglang_glm53.bench.child JOB RESULT`.

JOB is a JSON file with `kind` and what that kind needs; RESULT is written as the measurement goes
on, so that what a killed run has measured stays. Exit code 0 means that the result is whole.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from sglang_glm53.bench.jobs import write_json
from sglang_glm53.errors import PREFIX, Glm53Error


class Result:
    """The JSON file of a result; `save` replaces it in one step."""

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self._path = path
        self.values: dict[str, Any] = {"job": job, "complete": False}

    def save(self, **values: Any) -> None:
        self.values.update(values)
        write_json(self._path, self.values)


def progress(line: str) -> None:
    """A line that the parent shows."""
    print(f"bench: {line}", flush=True)


def main(argv: list[str]) -> int:
    job = json.loads(Path(argv[0]).read_text())
    job.setdefault("spawned", time.time())
    result = Result(Path(argv[1]), job)
    result.save()
    try:
        _work(job["kind"])(job, result)
    except Glm53Error as error:
        print(f"{PREFIX}{error}", file=sys.stderr, flush=True)
        return 1
    result.save(complete=True)
    return 0


def _work(kind: str) -> Any:
    if kind == "machine":
        from sglang_glm53.bench.machine import measure
    elif kind == "decode":
        from sglang_glm53.bench.runner import decode as measure
    elif kind == "prefill":
        from sglang_glm53.bench.runner import prefill as measure
    elif kind == "mtp":
        from sglang_glm53.bench.engine import mtp as measure
    elif kind == "startup":
        from sglang_glm53.bench.engine import startup as measure
    else:
        raise Glm53Error(f"no measurement is called {kind!r}")
    return measure


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing of SGLang's keeps a finished measurement from ending
