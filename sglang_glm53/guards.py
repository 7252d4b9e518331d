"""Requests that would end the server: refused, or undone."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from sglang_glm53 import catalog, support
from sglang_glm53.errors import describe


def install_for_requests() -> None:
    """Set the changes of a process that reads requests (rows of the catalog)."""
    catalog.on_load("sglang.srt.entrypoints.http_server:app", refuse_bodies)
    catalog.wrap(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager._validate_one_request",
        refuse_bad_tokens,
    )


def install_for_updates() -> None:
    """Set the changes of a process that holds weights (rows of the catalog)."""
    catalog.wrap(
        "sglang.srt.model_executor.model_runner_components.weight_updater:"
        "WeightUpdater.update_weights_from_disk",
        keep_old_weights,
    )
    catalog.wrap(
        "sglang.srt.model_executor.model_runner_components.weight_updater:"
        "WeightUpdater.update_weights_from_tensor",
        tell_what_does_not_fit,
    )


def refuse_bad_tokens(original: Callable[..., None]) -> Callable[..., None]:
    """A batch without rows, or an id without a row in the embedding, ends the scheduler.

    SGLang refuses empty `input_ids`, but not an empty text, which is no token where the tokenizer
    adds none.
    """

    def _validate_one_request(self: Any, obj: Any, input_ids: list[int] | None) -> None:
        if input_ids is not None and support.is_ours(self.model_config.hf_config):
            if len(input_ids) == 0 and getattr(obj, "input_embeds", None) is None:
                raise ValueError("The prompt is empty: it has no tokens.")
            rows = self.model_config.vocab_size
            if len(input_ids) and not 0 <= min(input_ids) <= max(input_ids) < rows:
                raise ValueError(
                    f"The prompt has token ids from {min(input_ids)} to {max(input_ids)}; the "
                    f"model has 0 to {rows - 1}."
                )
        original(self, obj, input_ids)

    return _validate_one_request


def refuse_bodies(app: Any) -> None:
    """A body that is JSON and no object (`null`, a list) is refused with a reason.

    SGLang's request classes ask it for its fields before they look at what it is, which ends in
    HTTP 500. The server goes on either way.
    """
    from starlette.responses import JSONResponse

    async def refuse(request: Any, error: Exception) -> Any:
        if not (_serves_ours() and _raised_by_a_request_class(error)):
            raise error
        message = "The request's body must be a JSON object."
        content = {"object": "error", "message": message, "type": "BadRequest", "code": 400}
        return JSONResponse(content, status_code=400)

    app.add_exception_handler(AttributeError, refuse)
    app.add_exception_handler(TypeError, refuse)


def _serves_ours() -> bool:
    from sglang.srt.entrypoints import http_server

    manager = getattr(http_server._global_state, "tokenizer_manager", None)
    return manager is not None and support.is_ours(manager.model_config.hf_config)


def _raised_by_a_request_class(error: Exception) -> bool:
    """Whether FastAPI was reading the body, and a class of SGLang's protocol raised."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return (
        bool(frames)
        and frames[-1].endswith(("entrypoints/openai/protocol.py", "managers/io_struct.py"))
        and any("fastapi/dependencies" in name for name in frames)
    )


def keep_old_weights(original: Callable[..., tuple[bool, str]]) -> Callable[..., tuple[bool, str]]:
    """An update with a checkpoint that does not fit leaves the server with the weights it had.

    SGLang rolls back too, but from `model_config.model_path`, which names the new checkpoint by
    then: the second failure ends the scheduler.
    """

    def update_weights_from_disk(
        self: Any, model_path: str, load_format: str, *args: Any, **kwargs: Any
    ) -> tuple[bool, str]:
        if not support.serves_our_model():
            return original(self, model_path, load_format, *args, **kwargs)
        from sglang_glm53.models.weights import whole_checkpoint

        before = self.model_config.model_path
        try:
            with whole_checkpoint():
                success, message = original(self, model_path, load_format, *args, **kwargs)
        except Exception as error:
            original(self, before, load_format, *args, **kwargs)
            success = False
            message = f"{model_path}: {describe(error)}. The weights are those of {before} again."
        if not success:
            self.model_config.model_path = before
        return success, message

    return update_weights_from_disk


def tell_what_does_not_fit(
    original: Callable[..., tuple[bool, str]],
) -> Callable[..., tuple[bool, str]]:
    """A tensor that the model does not have, or of another shape, is told to the one who sent it.

    Our loader refuses it. SGLang catches that for weights from other sources, but not here, where
    it would end the scheduler. What came before it in the same request has been written.
    """

    def update_weights_from_tensor(self: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        if not support.serves_our_model():
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            return False, f"{describe(error)}. Tensors before this one have been written."

    return update_weights_from_tensor
