"""What happens in a process of SGLang because this package is installed, in order.

`prepare_process` runs while SGLang is being imported (see host.py), `register_all` when SGLang
loads its plugins (see plugin.py). Both only set hooks and return: the model code is imported when
SGLang imports its own model registry, and not at all in processes that have none.
"""

from __future__ import annotations

from typing import Any

from sglang_glm53 import catalog, support
from sglang_glm53.compat import require_supported
from sglang_glm53.errors import Glm53Error, announce_process, degraded, failed

MODELS = "sglang_glm53.models"
LEFT_OUT = (
    "SGLang did not run our plugin; add glm53 to SGLANG_PLUGINS and unset SGLANG_PLATFORM, or "
    "uninstall sglang-glm53 (GLM53_ON_ERROR=stock lets SGLang's own class serve)"
)

_registered = False


def prepare_process() -> None:
    """Make SGLang importable without a GPU, and guard the model classes in this process."""
    from sglang_glm53.compat import cpu

    if cpu.has_no_gpu():
        cpu.prepare()
    guard_architecture()
    read_requests()


def read_requests() -> None:
    """Refuse what would end the server, and parse what GLM-5 says with our parsers.

    Here and not in `register_all`: SGLang runs no plugin in its extra tokenizer workers.
    """
    from sglang_glm53 import guards
    from sglang_glm53.chat import install

    try:
        require_supported()
    except Glm53Error:
        return  # register_all says so
    install.install()
    guards.install_for_requests()


def guard_architecture() -> None:
    """Verify, wherever SGLang resolves a model class in this process, that it is ours."""
    catalog.wrap("sglang.srt.model_loader.utils:get_model_architecture", _guarded_architecture)


def guard_left_out() -> None:
    """The guard for a process in which SGLang runs nothing of ours (see tripwire.py)."""
    guard_architecture()
    catalog.on_load(
        "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook", _hook_first_check
    )


def _hook_first_check(register: Any) -> None:
    """Say so before SGLang fails for want of a GPU, or starts its workers."""

    @register("handle_model_source_paths")
    def _check(server_args: Any, previous: Any) -> None:
        from sglang.srt.arg_groups.overrides import model_config_of

        previous(server_args)
        config = model_config_of(server_args).hf_config
        if support.is_ours(config):
            failed(
                Glm53Error(f"{config.architectures[0]} would be served by SGLang: {LEFT_OUT}"),
                doing="checking the model",
            )


def register_all() -> None:
    """Register the model classes, the KV pool, the status block and, without a GPU, the CPU cures.

    Raises:
        Glm53Error: unsupported SGLang, or a catalog row that the installed SGLang does not meet.
    """
    global _registered
    from sglang_glm53 import guards, host, processes, status
    from sglang_glm53.compat import cpu, torch_attention
    from sglang_glm53.memory import hicache
    from sglang_glm53.watch import hooks as watch

    if _registered:
        return
    _registered = True
    announce_process()
    host.activate()  # SGLang skips platform plugins where SGLANG_PLATFORM names one
    require_supported()
    catalog.check_sources()
    if cpu.has_no_gpu():
        cpu.cure()
    elif torch_attention.asked_on_gpu():
        torch_attention.install_on_gpu()
    catalog.on_load("sglang.srt.models.registry:_ModelRegistry.register", _register_models)
    catalog.on_load("sglang.srt.platforms.interface:SRTPlatform.get_kv_pool_cls", _hook_pool)
    catalog.wrap(
        "sglang.srt.model_executor.pool_configurator:"
        "DefaultPoolConfigurator._compute_dsa_indexer_cell_size",
        _count_exact_bytes,
    )
    catalog.on_load(
        "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook", _hook_last_check
    )
    hicache.install()
    guards.install_for_updates()
    processes.watch()
    watch.install()
    status.publish()


def _hook_last_check(register: Any) -> None:
    """Refuse in the first process, before a worker is started or a weight is read."""

    @register("handle_other_validations")
    def _check(server_args: Any, previous: Any) -> None:
        previous(server_args)
        try:
            support.check_arguments(server_args)
            _preflight(server_args)
        except Exception as error:
            failed(error, doing="checking the configuration")


def _preflight(server_args: Any) -> None:
    """Hold the doctor's rules against a server of ours (see checks/preflight.py)."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import model_config_of

    from sglang_glm53.checks import preflight

    model = model_config_of(server_args)
    if support.is_ours(model.hf_config):
        preflight.check(resolving_view(server_args), model.hf_config, model.model_path)


def _register_models(_: Any) -> None:
    from sglang.srt.models.registry import ModelRegistry

    try:
        ModelRegistry.register(MODELS, overwrite=True, strict=True)
    except Exception as error:
        failed(error, doing="importing the model classes")


def _hook_pool(original: Any) -> None:
    from sglang.srt.platforms import current_platform

    before = current_platform.get_kv_pool_cls

    def get_kv_pool_cls(*, kind: str) -> type | None:
        if kind == "dsa" and support.serves_our_model():
            from sglang_glm53.memory.pool import GlmTokenToKVPool

            return GlmTokenToKVPool
        return before(kind=kind)

    current_platform.get_kv_pool_cls = get_kv_pool_cls


def _count_exact_bytes(original: Any) -> Any:
    def _compute_dsa_indexer_cell_size(self: Any, **kwargs: Any) -> int:
        if not support.serves_our_model():
            return original(self, **kwargs)
        from sglang_glm53.memory.pool import count_exact_index_bytes

        return count_exact_index_bytes(original)(self, **kwargs)

    return _compute_dsa_indexer_cell_size


def _guarded_architecture(original: Any) -> Any:
    def get_model_architecture(model_config: Any) -> tuple[type, str]:
        model_class, name = original(model_config)
        if name not in support.ARCHITECTURES:
            return model_class, name
        try:
            return _checked(model_class, name, model_config), name
        except Exception as error:
            failed(error, doing=f"resolving {name}")
            return support.stock_class(name), name

    return get_model_architecture


def _checked(model_class: type, name: str, model_config: Any) -> type:
    """The class to build: ours, or SGLang's own where this server stands down.

    Raises:
        Glm53Error: ours is not registered in this process, or the server's options are refused.
    """
    if degraded() is not None:
        return support.stock_class(name)
    if not model_class.__module__.startswith("sglang_glm53."):
        later = "another plugin registered it later; leave that one out (SGLANG_PLUGINS=glm53)"
        raise Glm53Error(
            f"{name} would be served by {model_class.__module__}.{model_class.__qualname__}: "
            f"{later if _registered else LEFT_OUT}"
        )
    decision = support.decide(model_config)
    if decision.kind == support.RUNS:
        from sglang_glm53.compat import cpu

        if cpu.has_no_gpu():
            cpu.run_eagerly()
        return model_class
    return support.stock_class(name)
