"""guards.py: requests that must not end the server."""

from __future__ import annotations

from types import SimpleNamespace

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
