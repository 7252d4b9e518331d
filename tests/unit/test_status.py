"""The block in the scheduler's state, and reading it from a server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_glm53 import status, support
from sglang_glm53.errors import Glm53Error


def runner(model: object, architecture: str = "GlmMoeDsaForCausalLM") -> Any:
    return SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=[architecture]), dtype="torch.bfloat16"
        ),
        token_to_kv_pool=SimpleNamespace(layout="exact-fp32"),
        attn_backend=object(),
        device="cpu",
    )


def scheduler(target: Any, draft: Any = None) -> Any:
    worker = SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=draft)) if draft else None
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=target), draft_worker=worker)


class Stock:
    __module__ = "sglang.srt.models.glm4_moe"


class Ours:
    __module__ = "sglang_glm53.models.glm_moe_dsa"


@pytest.mark.parametrize(
    ("model", "architecture", "serving"),
    [
        (Ours(), "GlmMoeDsaForCausalLM", "ours"),
        (Stock(), "GlmMoeDsaForCausalLM", "stock"),
        (Stock(), "LlamaForCausalLM", "other model"),
    ],
)
def test_block_says_what_serves(model: object, architecture: str, serving: str) -> None:
    block = status.server_block(scheduler(runner(model, architecture)))
    assert block["serving"] == serving
    assert block["model"].endswith(type(model).__qualname__)
    assert block["layout"] == "exact-fp32" and block["draft"] is None
    json.dumps(block)


def test_block_names_the_kernels_that_the_options_came_to() -> None:
    target = runner(Ours())
    assert status.server_block(scheduler(target))["attention"] is None
    target.attn_backend = SimpleNamespace(
        dsa_prefill_impl="flashmla_sparse", dsa_decode_impl="flashmla_kv"
    )
    block = status.server_block(scheduler(target))
    assert block["attention"] == "flashmla_sparse for prefill, flashmla_kv for decode"


def test_block_names_draft_and_what_stood_down(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in support.FEATURES if row.name == "LoRA")
    monkeypatch.setattr(support, "_decision", support.Decision(support.STANDS_DOWN, (row,)))
    block = status.server_block(scheduler(runner(Stock()), runner(Ours())))
    assert block["draft"] == "sglang_glm53.models.glm_moe_dsa.Ours"
    assert block["stood_down"] == [{"feature": "LoRA", "reason": row.reason, "advice": row.advice}]


@pytest.fixture
def serve() -> Iterator[Any]:
    """A function of a /server_info body to the address that answers it."""
    servers: list[HTTPServer] = []

    def start(body: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *args: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_read_status(serve: Any) -> None:
    state = {"glm53": {"serving": "ours"}, "avg_spec_accept_length": 2.5}
    found = status.read_status(serve(json.dumps({"internal_states": [state]})))
    assert found == {"serving": "ours", "accept_length": 2.5}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (json.dumps({"internal_states": [{}]}), "runs without sglang-glm53; install it"),
        (json.dumps({}), "runs without sglang-glm53"),
        ("<html>", "is no JSON: is this an SGLang server"),
        ("[]", "is not SGLang's"),
        ("null", "is not SGLang's"),
        (json.dumps({"internal_states": 3}), "is not SGLang's"),
        (json.dumps({"internal_states": [3]}), "is not SGLang's"),
    ],
)
def test_read_status_of_another_server(serve: Any, body: str, message: str) -> None:
    with pytest.raises(Glm53Error, match=message):
        status.read_status(serve(body))


def test_read_status_of_nothing() -> None:
    with pytest.raises(Glm53Error, match="no SGLang server answers at http://127.0.0.1:9: "):
        status.read_status("http://127.0.0.1:9/", timeout=2)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.0\r\n", "no SGLang server answers at .*SSH"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "no SGLang server answers"),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "answers with HTTP 401; .*API key"),
        (b"HTTP/1.1 302 Moved\r\nLocation: /server_info\r\n\r\n", "HTTP 302"),
    ],
)
def test_read_status_of_a_server_that_breaks_off(reply: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(Glm53Error, match=message) as error:
            status.read_status(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=5)
        assert "\n" not in str(error.value)
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:abc", "http://127.0.0.1:9/a b"])
def test_read_status_of_an_address_that_is_none(url: str) -> None:
    with pytest.raises(Glm53Error, match="no SGLang server answers"):
        status.read_status(url)
