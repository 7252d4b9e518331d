"""Stands in for the `sglang` command: the same log lines, routes and process tree, no model.

    python fake_sglang.py BEHAVIOUR serve --model-path DIR --host H --port P ...

BEHAVIOUR: `answers`, `dies` (at start, with a line of ours in the log), `hangs` (never ready),
`stubborn` (answers, ignores SIGTERM), `refuses` (HTTP 400 to the question), `vanishes` (dies when
asked). Each starts a child that would outlive it; the child's pid and its own
are the first lines of the log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

STATUS = {
    "package": "0.1.0",
    "sglang": "0.5.23",
    "serving": "ours",
    "model": "sglang_glm53.models.glm_moe_dsa.GlmMoeDsaForCausalLM",
    "pool": "sglang_glm53.memory.pool.GlmTokenToKVPool",
    "backend": "sglang_glm53.backends.torch_dsa.TorchDsaBackend",
    "draft": None,
    "stood_down": [{"feature": "GPU", "reason": "no kernels", "advice": "use a CPU"}],
}


class Handler(BaseHTTPRequestHandler):
    behaviour = "answers"

    def do_GET(self) -> None:
        if self.path == "/server_info":
            self.reply({"internal_states": [{"glm53": STATUS, "avg_spec_accept_length": 3.25}]})
        else:
            self.reply({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.behaviour == "vanishes":
            os._exit(7)
        if self.behaviour == "refuses":
            self.reply({"message": "the prompt is too long"}, code=400)
            return
        assert self.path == "/v1/chat/completions" and body["stream"], self.path
        question = body["messages"][0]["content"]
        self.send_response(200)
        self.end_headers()
        self.event(delta={"reasoning_content": "Let me think."})
        time.sleep(0.2)
        self.event(delta={"content": f"You said: {question}"}, finish_reason="stop")
        self.wfile.write(b'data: {"choices": [], "usage": {"completion_tokens": 11}}\n\n')
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, **choice: Any) -> None:
        self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        self.wfile.flush()

    def reply(self, value: Any, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *args: Any) -> None:
        pass


def main() -> None:
    behaviour, arguments = sys.argv[1], sys.argv[2:]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    print(child.pid, os.getpid(), sep="\n", flush=True)
    print("arguments:", *arguments, flush=True)
    print("[2026-01-01 00:00:00] Load weight begin. avail mem=1 GB", flush=True)
    if behaviour == "dies":
        print("sglang-glm53: config.json: index_topk is missing; add it", flush=True)
        print("Traceback (most recent call last):\nRuntimeError: something else", flush=True)
        sys.exit(3)
    if behaviour == "hangs":
        time.sleep(300)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Handler.behaviour = behaviour
    host, port = (arguments[arguments.index(flag) + 1] for flag in ("--host", "--port"))
    HTTPServer((host, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
