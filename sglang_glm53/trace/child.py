"""The process that holds SGLang's Engine: `python -m sglang_glm53.trace.child JOB`.

JOB is a JSON file: `arguments` for SGLang, `prompts` (token ids), `new_tokens`, `result`: a file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(path: str) -> int:
    """Generate for every prompt, one after another, then for all of them at once."""
    job = json.loads(Path(path).read_text())
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    engine = Engine(server_args=prepare_server_args(list(job["arguments"])))
    sampling = {"temperature": 0, "max_new_tokens": job["new_tokens"], "ignore_eos": True}
    for prompt in job["prompts"]:
        engine.generate(input_ids=prompt, sampling_params=sampling)
    if len(job["prompts"]) > 1:
        engine.generate(input_ids=job["prompts"], sampling_params=sampling)
    info = engine.get_server_info()
    served = info["internal_states"][0].get("glm53", {})
    Path(job["result"]).write_text(json.dumps({"served": served}))
    engine.shutdown()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing of SGLang's keeps a finished run from ending
