"""Gives our model its plain-torch attention backend; every other model keeps SGLang's.

On a CPU SGLang selects the name `torch_native` by itself. On a GPU the user asks for it with
GLM53_ATTENTION=torch, and it runs there without CUDA graphs. The name is SGLang's because its
allocator takes a Triton path for any other one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang_glm53 import catalog, support

BACKEND = "torch_native"


def asked_on_gpu() -> bool:
    """Whether the user wants the plain-torch attention on a GPU."""
    return os.environ.get("GLM53_ATTENTION") == "torch"


def serves_plain_torch() -> bool:
    """Whether the model being built runs on the plain-torch attention: no GPU, or asked for."""
    import torch

    return torch.get_default_device().type == "cpu" or asked_on_gpu()


def install() -> None:
    """Set the changes (rows of the catalog)."""
    catalog.on_load(
        "sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS", _add_backend
    )
    catalog.wrap(
        "sglang.srt.speculative.draft_utils:DraftBackendFactory._create_backend", _draft_backends
    )


def install_on_gpu() -> None:
    """As `install`, and select the backend while SGLang resolves its arguments."""
    install()
    catalog.on_load(
        "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook", _select_on_gpu
    )


def _select_on_gpu(register: Callable[[str], Callable[[Any], Any]]) -> None:
    @register("handle_cuda_graph_config")
    def _select(server_args: Any, previous: Callable[[Any], None]) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of

        if support.is_ours(model_config_of(server_args).hf_config):
            declare_resolution(
                server_args, "sglang-glm53", attention_backend=BACKEND, disable_cuda_graph=True
            )
        previous(server_args)


def _add_backend(backends: dict[str, Callable[[Any], Any]]) -> None:
    """Under SGLang's name for plain-torch attention: our backend for our model, else SGLang's."""
    stock = backends[BACKEND]

    def create(runner: Any) -> Any:
        if not support.is_ours(runner.model_config.hf_config):
            return stock(runner)
        from sglang_glm53.backends.torch_dsa import TorchDsaBackend

        return TorchDsaBackend(runner)

    backends[BACKEND] = create


def _draft_backends(original: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang has no draft backend under that name; ours is added for our model."""

    def _create_backend(
        self: Any,
        backend_name: str,
        backend_map: dict[str, Callable[[], Any]],
        error_template: str,
        stamps_children: bool = False,
    ) -> Any:
        runner = self.draft_model_runner

        def create() -> tuple[str, Any]:
            from sglang_glm53.backends.torch_dsa import TorchDsaBackend, TorchDsaMultiStepBackend

            if stamps_children:  # the backend of the draft's decode steps, one child a step
                steps = self.speculative_num_steps
                return BACKEND, TorchDsaMultiStepBackend(runner, self.topk, steps)
            return BACKEND, TorchDsaBackend(runner)

        if support.is_ours(runner.model_config.hf_config):
            backend_map = {**backend_map, BACKEND: create}
        return original(self, backend_name, backend_map, error_template, stamps_children)

    return _create_backend
