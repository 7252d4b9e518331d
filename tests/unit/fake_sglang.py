"""Stands in for the `sglang` command: the same log lines, routes and process tree, no model.

    python fake_sglang.py BEHAVIOUR serve --model-path DIR --host H --port P ...

BEHAVIOUR: `answers` (sums and weather as the miniature does, anything else by saying it again),
`dies` (at start, with a line of ours in the log), `hangs` (never ready), `stubborn` (answers,
ignores SIGTERM), `refuses` (HTTP 400 to the question), `vanishes` (dies when asked). One of WRONG
answers like the miniature but for one thing. Each starts a child that would outlive it; the
child's pid and its own are the first lines of the log.
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


WRONG = ("wrong sum", "no reasoning", "no call", "wrong city", "wrong weather")


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
        self.send_response(200)
        self.end_headers()
        if self.behaviour != "no reasoning":
            self.event(delta={"reasoning_content": "Let me think."})
        time.sleep(0.2)
        last = body["messages"][-1]
        if last["role"] == "tool":
            self.event(delta={"content": self.weather(body["messages"])}, finish_reason="stop")
        elif "tools" in body and self.behaviour != "no call":
            self.call(body["tools"][0]["function"]["name"])
        else:
            self.event(delta={"content": self.answer(last["content"])}, finish_reason="stop")
        self.wfile.write(b'data: {"choices": [], "usage": {"completion_tokens": 11}}\n\n')
        self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, question: str) -> str:
        if question == "What is 17+25?":
            return "17 + 25 = 32." if self.behaviour == "wrong sum" else "17 + 25 = 42."
        return f"You said: {question}"

    def call(self, name: str) -> None:
        """A tool call as SGLang streams it: the name first, then the arguments in pieces."""
        city = "Rome" if self.behaviour == "wrong city" else "Paris"
        first = {"index": 0, "id": "call_1", "function": {"name": name, "arguments": ""}}
        self.event(delta={"tool_calls": [first]})
        for piece in ('{"city": "', f'{city}"', "}"):
            self.event(delta={"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
        self.event(delta={}, finish_reason="tool_calls")

    def weather(self, messages: list[dict[str, Any]]) -> str:
        user, call, result = messages
        (asked,) = call["tool_calls"]
        assert asked["id"] == result["tool_call_id"] and call["role"] == "assistant"
        assert json.loads(asked["function"]["arguments"]) == {"city": "Paris"}
        told = json.loads(result["content"])
        degrees = 3 if self.behaviour == "wrong weather" else told["temperature"]
        return f"It is {told['condition']} in Paris, {degrees} degrees."

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
