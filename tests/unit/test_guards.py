"""guards.py: requests that must not end the server."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_glm53 import guards, support
from sglang_glm53.errors import Glm53Error


@pytest.mark.parametrize(
    ("architecture", "ids", "refused"),
    [
        ("GlmMoeDsaForCausalLM", [], "no tokens"),
        ("GlmMoeDsaForCausalLM", [0, 96], "from 0 to 96; the model has 0 to 95"),
        ("GlmMoeDsaForCausalLM", [-1], "-1"),
        ("GlmMoeDsaForCausalLM", [0, 95], None),
        ("GlmMoeDsaForCausalLM", None, None),
        ("LlamaForCausalLM", [], None),
    ],
)
def test_a_prompt_that_would_end_the_scheduler_is_refused(
    architecture: str, ids: list[int] | None, refused: str | None
) -> None:
    seen: list[object] = []
    validate = guards.refuse_bad_tokens(lambda self, obj, input_ids: seen.append(input_ids))
    config = SimpleNamespace(architectures=[architecture])
    manager = SimpleNamespace(model_config=SimpleNamespace(hf_config=config, vocab_size=96))
    request = SimpleNamespace(input_embeds=None)
    if refused:
        with pytest.raises(ValueError, match=refused):
            validate(manager, request, ids)
    else:
        validate(manager, request, ids)
    assert seen == ([] if refused else [ids])


@pytest.mark.parametrize("ours", [True, False])
def test_a_failed_update_loads_the_old_weights_again(
    monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    monkeypatch.setattr(support, "serves_our_model", lambda: ours)
    loaded: list[str] = []

    def original(self: SimpleNamespace, model_path: str, load_format: str) -> tuple[bool, str]:
        self.model_config.model_path = model_path  # as SGLang does first of all
        loaded.append(model_path)
        if model_path == "wrong":
            raise Glm53Error("checkpoint: x has shape [3]")
        return model_path != "nowhere", "said"

    update = guards.keep_old_weights(original)
    updater = SimpleNamespace(model_config=SimpleNamespace(model_path="old"))
    if not ours:
        with pytest.raises(Glm53Error):
            update(updater, "wrong", "auto")
        return
    success, message = update(updater, "wrong", "auto")
    assert not success and "x has shape [3]" in message and "those of old again" in message
    assert loaded == ["wrong", "old"] and updater.model_config.model_path == "old"
    assert update(updater, "nowhere", "auto") == (False, "said")
    assert updater.model_config.model_path == "old"
    assert update(updater, "new", "auto") == (True, "said")
    assert updater.model_config.model_path == "new"


@pytest.mark.parametrize("ours", [True, False])
def test_a_tensor_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    monkeypatch.setattr(support, "serves_our_model", lambda: ours)

    def original(self: object, named_tensors: list[str]) -> tuple[bool, str]:
        if "wrong" in named_tensors:
            raise Glm53Error("checkpoint: wrong is not a tensor of this configuration")
        return True, "said"

    update = guards.tell_what_does_not_fit(original)
    assert update(None, named_tensors=["right"]) == (True, "said")
    if not ours:
        with pytest.raises(Glm53Error):
            update(None, named_tensors=["wrong"])
        return
    success, message = update(None, named_tensors=["wrong"])
    assert not success and "wrong is not a tensor" in message


@pytest.mark.parametrize(("ours", "status"), [(True, 400), (False, 500)])
@pytest.mark.parametrize("body", ["null", "[]", '"text"', "7"])
def test_a_body_that_is_no_object_is_refused(
    monkeypatch: pytest.MonkeyPatch, ours: bool, status: int, body: str
) -> None:
    """By a class that asks the body for a field first, as SGLang's do."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from pydantic import BaseModel, model_validator

    monkeypatch.setattr(guards, "_serves_ours", lambda: ours)
    source = "def early(values):\n    values.get('response_format')\n    return values\n"
    made: dict[str, Callable[[Any], Any]] = {}
    exec(compile(source, "sglang/srt/entrypoints/openai/protocol.py", "exec"), made)

    class Asked(BaseModel):
        text: str

        @model_validator(mode="before")
        @classmethod
        def early(cls, values: Any) -> Any:
            return made["early"](values)

    app = FastAPI()
    guards.refuse_bodies(app)

    def answered(asked: Asked) -> str:
        return asked.text

    answered.__annotations__["asked"] = Asked
    app.post("/ask")(answered)

    @app.post("/broken")
    def broken() -> None:
        None.get("x")  # type: ignore[attr-defined]

    client = TestClient(app, raise_server_exceptions=False)
    headers = {"content-type": "application/json"}
    reply = client.post("/ask", content=body, headers=headers)
    assert reply.status_code == status
    if ours:
        assert reply.json()["message"] == "The request's body must be a JSON object."
    assert client.post("/ask", json={"text": "x"}).json() == "x"
    assert client.post("/broken").status_code == 500  # an error of the server's stays one
