"""What SGLang needs to run on a machine without a GPU, and without a CPU build of its kernels.

`prepare` runs while SGLang is being imported: after it, importing SGLang's modules works. `cure`
runs at registration and changes, through the catalog, the places that ask a GPU although the server
runs on a CPU, and gives our model its attention backend. Any other model keeps SGLang's own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from sglang_glm53 import catalog, support
from sglang_glm53.compat import cpu_grammar, indexer_capture, local_experts, torch_attention
from sglang_glm53.errors import failed

_STAND_IN = "sglang_glm53.compat.sgl_kernel_cpu"

# Tokens of KV cache by default for our model on a CPU, at least; SGLang would take all of the RAM.
MIN_TOKENS = 32_768


def has_no_gpu() -> bool:
    """Whether this process serves on the CPU: no accelerator, or the user asked for the CPU."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return True
    if torch.cuda.is_available():
        return False
    others = ("xpu", "npu", "mps", "hpu", "musa")
    return not any(
        getattr(torch, name, None) is not None and getattr(torch, name).is_available()
        for name in others
        if hasattr(getattr(torch, name, None), "is_available")
    )


def prepare() -> None:
    """Select SGLang's CPU engine and stand in for `sgl_kernel` where it does not import."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    catalog.row_of("sgl_kernel")
    if "sgl_kernel" in sys.modules:
        return
    try:
        # The CUDA wheel prints nothing, but looks for libraries that need a driver.
        importlib.import_module("sgl_kernel")
    except Exception:
        for name in [n for n in sys.modules if n.partition(".")[0] == "sgl_kernel"]:
            del sys.modules[name]
        # With the stand-in, SGLang's probe for AMX kernels says no: they are not among its ops.
        sys.modules["sgl_kernel"] = importlib.import_module(_STAND_IN)


def cure() -> None:
    """Set the changes that serving on a CPU needs (rows of the catalog)."""
    catalog.on_load(
        "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook", _hook_arguments
    )
    torch_attention.install()
    indexer_capture.install()
    local_experts.install()
    cpu_grammar.install()
    catalog.wrap("sglang.srt.utils.numa_utils:init_threads_binding", _share_cores)
    catalog.wrap("sglang.srt.distributed.bootstrap:_init_cpu_threads_env", _without_kernel_threads)
    catalog.wrap("sglang.srt.distributed.parallel_state:init_model_parallel_group", _without_nccl)


def run_eagerly() -> None:
    """Leave SGLang's small `torch.compile`d functions uncompiled in this process.

    On a CPU each costs seconds at its first call and needs a C++ compiler on the user's machine.
    """
    import torch

    torch.compiler.set_stance("force_eager")


# --- arguments -------------------------------------------------------------------------------


@contextlib.contextmanager
def _device_capability(value: tuple[int, int]) -> Iterator[None]:
    import torch

    original = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda *args, **kwargs: value
    try:
        yield
    finally:
        torch.cuda.get_device_capability = original


def _hook_arguments(register: Callable[[str], Callable[[Any], Any]]) -> None:
    """SGLang's own hooks round two steps of the resolution of the server's arguments."""
    register("handle_model_specific_adjustments")(_answer_for_the_gpu)
    register("handle_gpu_memory_settings")(_small_cache)


def _answer_for_the_gpu(server_args: Any, previous: Callable[[Any], None]) -> None:
    """SGLang asks the GPU's compute capability for every DSA model; a CPU has (0, 0).

    It also sets the cache of every DSA model to bfloat16 where the user named no dtype. Our pool
    has an exact layout, and `--dtype float32` means exact.
    """
    import torch
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of

    asked = resolving_view(server_args).kv_cache_dtype
    with _device_capability((0, 0)):
        previous(server_args)
    config = model_config_of(server_args)
    if not support.is_ours(config.hf_config):
        return
    try:
        support.check_speculation(server_args)
    except Exception as error:
        failed(error, doing="checking the configuration")
    # OpenMP threads that spin at barriers make a busy machine ten times slower. The processes
    # that compute start after this one and read it then.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if asked == "auto" and config.dtype == torch.float32:
        declare_resolution(server_args, "sglang-glm53", kv_cache_dtype="auto")


def _small_cache(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Our model on a CPU gets a cache of two contexts; SGLang would fill 95 % of the RAM.

    The cache is written at start, and each rank of a parallel group takes as much again.
    `--max-total-tokens` and `--mem-fraction-static` are left as the user set them.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of

    view = resolving_view(server_args)
    if view.max_total_tokens is None and view.mem_fraction_static is None:
        config = model_config_of(server_args)
        if support.is_ours(config.hf_config):
            tokens = max(2 * int(config.context_len), MIN_TOKENS)
            declare_resolution(server_args, "sglang-glm53", max_total_tokens=tokens)
    previous(server_args)


# --- parallel groups -------------------------------------------------------------------------


def _share_cores(original: Callable[..., Any]) -> Callable[..., Any]:
    """More ranks than NUMA nodes: give each rank its share of the cores instead of failing."""

    def init_threads_binding(*, numa_index: int, world_size: int) -> Any:
        if os.environ.get("SGLANG_CPU_OMP_THREADS_BIND") or world_size <= _numa_nodes():
            return original(numa_index=numa_index, world_size=world_size)
        import torch

        cores = _cores()
        share = max(1, len(cores) // world_size)
        first = (numa_index * share) % len(cores)
        mine = cores[first : first + share]
        torch.set_num_threads(len(mine))
        return ",".join(str(core) for core in mine)

    return init_threads_binding


def _cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _numa_nodes() -> int:
    from sglang.srt.utils.numa_utils import get_cpu_ids_by_node

    return max(1, len(get_cpu_ids_by_node()))


def _without_kernel_threads(original: Callable[..., Any]) -> Callable[..., Any]:
    """On arm64 SGLang sets up its CPU kernels' threads without asking whether they are there."""

    def _init_cpu_threads_env(**kwargs: Any) -> Any:
        if sys.modules["sgl_kernel"].__name__ == _STAND_IN:
            return None
        return original(**kwargs)

    return _init_cpu_threads_env


def _without_nccl(original: Callable[..., Any]) -> Callable[..., Any]:
    """With torch's CUDA wheel NCCL's library is there, and SGLang would open it on a CPU."""

    def init_model_parallel_group(
        group_ranks: Any,
        local_rank: int,
        backend: str,
        use_pynccl: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(group_ranks, local_rank, backend, False, *args, **kwargs)

    return init_model_parallel_group
