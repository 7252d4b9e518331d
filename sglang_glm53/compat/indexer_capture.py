"""`--enable-return-indexer-topk` on a CPU: SGLang's recorder, which it switches off there.

SGLang's own indexer feeds the recorder on some devices only; our model feeds it on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_glm53 import catalog, support


def install() -> None:
    """Let the recorder be built for our model without a GPU."""
    catalog.on_load("sglang.srt.mem_cache.pool_host.common:ALLOC_MEMORY_FUNCS", _plain_memory)
    catalog.wrap("sglang.srt.state_capturer.indexer_topk:create_indexer_capturer", _also_on_a_cpu)


def _plain_memory(functions: dict[str, Callable[..., Any]]) -> None:
    """Host memory for the device "cpu": the default would register it with CUDA."""
    import torch

    def allocate(dims: tuple[int, ...], dtype: Any, device: str, *_: Any, **__: Any) -> Any:
        return torch.empty(dims, dtype=dtype, device=device)

    functions["cpu"] = allocate


def _also_on_a_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_indexer_capturer(
        *, model_config: Any, num_tokens: int, max_running_requests: int, device: str
    ) -> Any:
        if device != "cpu" or not support.serves_our_model():
            return original(
                model_config=model_config,
                num_tokens=num_tokens,
                max_running_requests=max_running_requests,
                device=device,
            )
        from sglang.srt.runtime_context import get_exec
        from sglang.srt.state_capturer.indexer_topk import IndexerTopkCapturer

        if not get_exec().features.enable_return_indexer_topk:
            return None
        config = model_config.hf_text_config
        return IndexerTopkCapturer(
            num_tokens=num_tokens,
            num_indexer_layers=config.num_hidden_layers,
            index_topk=config.index_topk,
            max_running_requests=max_running_requests,
            device=device,
        )

    return create_indexer_capturer
