"""What the earliest hook does to a process without a GPU, and what it leaves alone."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fresh_process import run

torch = pytest.importorskip("torch")

from sglang_glm53 import catalog, host, support, tripwire  # noqa: E402
from sglang_glm53.compat import cpu, torch_attention  # noqa: E402

OURS = SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"])
LLAMA = SimpleNamespace(architectures=["LlamaForCausalLM"])


def test_activate_returns_none_and_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_glm53 import registration

    calls: list[int] = []
    monkeypatch.setattr(host, "_active", False)
    monkeypatch.setattr(registration, "prepare_process", lambda: calls.append(1))
    assert host.activate() is None and host.activate() is None
    assert calls == [1]


def test_activate_ends_the_process_on_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from sglang_glm53 import registration

    def broken() -> None:
        raise OSError("no")

    monkeypatch.delenv("GLM53_ON_ERROR", raising=False)
    monkeypatch.setattr(host, "_active", False)
    monkeypatch.setattr(registration, "prepare_process", broken)
    with pytest.raises(SystemExit):
        host.activate()
    assert "preparing the process for SGLang: OSError: no" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("variables", "cuda", "expected"),
    [({}, False, True), ({}, True, False), ({"SGLANG_USE_CPU_ENGINE": "1"}, True, True)],
)
def test_has_no_gpu(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], cuda: bool, expected: bool
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert cpu.has_no_gpu() is expected


@pytest.mark.parametrize("error", [ImportError("libcuda.so.1"), ModuleNotFoundError("sgl_kernel")])
def test_prepare_stands_in_for_kernels_that_do_not_import(
    monkeypatch: pytest.MonkeyPatch, error: ImportError
) -> None:
    ours = ModuleType("stand_in")

    def import_module(name: str) -> ModuleType:
        if name == "sgl_kernel":
            sys.modules["sgl_kernel.part"] = ModuleType("sgl_kernel.part")
            raise error
        assert name == "sglang_glm53.compat.sgl_kernel_cpu"
        return ours

    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    for name in ("sgl_kernel", "sgl_kernel.part"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # put back after the test
        del sys.modules[name]
    monkeypatch.setattr(cpu.importlib, "import_module", import_module)
    cpu.prepare()
    assert sys.modules["sgl_kernel"] is ours and "sgl_kernel.part" not in sys.modules
    assert cpu.os.environ["SGLANG_USE_CPU_ENGINE"] == "1"


def test_prepare_keeps_kernels_that_import(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("sgl_kernel")
    monkeypatch.setitem(sys.modules, "sgl_kernel", real)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    cpu.prepare()
    assert sys.modules["sgl_kernel"] is real
    assert cpu.os.environ["SGLANG_USE_CPU_ENGINE"] == "0"  # the user's choice stands


def test_backend_is_ours_for_our_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ModuleType("sglang_glm53.backends.torch_dsa")
    ours.TorchDsaBackend = lambda runner: ("ours", runner)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang_glm53.backends.torch_dsa", ours)
    backends: dict[str, Any] = {"torch_native": lambda runner: "stock", "triton": "untouched"}
    torch_attention._add_backend(backends)
    assert backends["triton"] == "untouched"
    runner = SimpleNamespace(model_config=SimpleNamespace(hf_config=OURS))
    assert backends["torch_native"](runner) == ("ours", runner)
    runner = SimpleNamespace(model_config=SimpleNamespace(hf_config=LLAMA))
    assert backends["torch_native"](runner) == "stock"


@pytest.mark.parametrize("decode", [True, False])
def test_draft_backends(monkeypatch: pytest.MonkeyPatch, decode: bool) -> None:
    module = ModuleType("sglang_glm53.backends.torch_dsa")
    module.TorchDsaBackend = lambda runner: "one"  # type: ignore[attr-defined]
    module.TorchDsaMultiStepBackend = lambda runner, k, n: ("steps", k, n)  # type: ignore
    monkeypatch.setitem(sys.modules, "sglang_glm53.backends.torch_dsa", module)
    seen: list[dict[str, Any]] = []

    def original(self: Any, name: str, table: dict[str, Any], text: str, stamps: bool) -> None:
        seen.append(table)

    wrapped = torch_attention._draft_backends(original)
    for config in (OURS, LLAMA):
        factory = SimpleNamespace(
            draft_model_runner=SimpleNamespace(model_config=SimpleNamespace(hf_config=config)),
            topk=1,
            speculative_num_steps=3,
        )
        wrapped(factory, "decode_attention_backend", {"triton": None}, "", stamps_children=decode)
    expected = ("steps", 1, 3) if decode else "one"
    assert seen[0]["torch_native"]() == ("torch_native", expected)
    assert seen[1] == {"triton": None}


def test_torch_attention_on_a_gpu_is_selected_for_our_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declared: list[dict[str, Any]] = []
    overrides = ModuleType("sglang.srt.arg_groups.overrides")
    overrides.model_config_of = lambda args: args  # type: ignore[attr-defined]
    overrides.declare_resolution = (  # type: ignore[attr-defined]
        lambda args, source, **fields: declared.append(fields)
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.overrides", overrides)
    hooks: dict[str, Any] = {}
    torch_attention._select_on_gpu(lambda name: lambda fn: hooks.update({name: fn}))
    passed: list[Any] = []
    for config in (OURS, LLAMA):
        hooks["handle_cuda_graph_config"](SimpleNamespace(hf_config=config), passed.append)
    assert declared == [{"attention_backend": "torch_native", "disable_cuda_graph": True}]
    assert len(passed) == 2


def test_more_ranks_than_nodes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(cpu, "_numa_nodes", lambda: 1)
    monkeypatch.setattr(cpu, "_cores", lambda: [0, 1, 2, 3, 4])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    bind = cpu._share_cores(lambda numa_index, world_size: ("stock", numa_index, world_size))
    assert bind(numa_index=0, world_size=1) == ("stock", 0, 1)
    assert [bind(numa_index=i, world_size=2) for i in (0, 1)] == ["0,1", "2,3"]
    assert bind(numa_index=7, world_size=8) == "2"
    assert threads == [2, 2, 1]
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    assert bind(numa_index=1, world_size=2) == ("stock", 1, 2)


def test_kernel_threads_need_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    start = cpu._without_kernel_threads(lambda **kwargs: kwargs)
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    assert start(local_omp_cpuid="0") == {"local_omp_cpuid": "0"}
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType(cpu._STAND_IN))
    assert start(local_omp_cpuid="0") is None


def test_groups_are_built_without_nccl() -> None:
    build = cpu._without_nccl(lambda *args, **kwargs: (args, kwargs))
    args, kwargs = build([[0, 1]], 0, "gloo", use_pynccl=None, group_name="tp")
    assert args == ([[0, 1]], 0, "gloo", False) and kwargs == {"group_name": "tp"}


def test_the_gpus_capability_is_answered_only_while_sglang_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.cuda.get_device_capability
    with cpu._device_capability((0, 0)):
        assert torch.cuda.get_device_capability() == (0, 0)
    assert torch.cuda.get_device_capability is before


def test_sglang_imports_on_this_machine_and_knows_our_hooks() -> None:
    """One process with everything: shim, platform unchanged, guard, pool hook, registry."""
    if torch.cuda.is_available():
        pytest.skip("a machine with a GPU needs no stand-ins")
    done = run(
        """
        import sglang, sys
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.platforms import current_platform
        from sglang.srt.utils import cpu_has_amx_support, is_cpu
        import sglang.srt.model_loader.loader as loader
        from sglang.srt.models.registry import ModelRegistry
        print(type(current_platform).__module__, is_cpu(), sys.modules["sgl_kernel"].__name__)
        print(loader.get_model_architecture.__wrapped__.__module__)
        print(ModelRegistry.models["GlmMoeDsaForCausalLM"].__module__)
        print(ModelRegistry.models["GlmMoeDsaForCausalLMNextN"].__module__)
        print(ModelRegistry.models["LlamaForCausalLM"].__module__)
        print(*[current_platform.get_kv_pool_cls(kind=kind) for kind in ("dsa", "mha")])
        """
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.split("\n")
    assert lines[0].startswith("sglang.srt.platforms.cpu True ")
    assert lines[1:6] == [
        "sglang.srt.model_loader.utils",
        "sglang_glm53.models.glm_moe_dsa",
        "sglang_glm53.models.glm_moe_dsa_nextn",
        "sglang.srt.models.llama",
        "None None",  # no model of ours is being served in this process
    ]


@pytest.mark.parametrize(
    ("variables", "out"),
    [
        ({}, False),
        ({"SGLANG_PLUGINS": ""}, False),
        ({"SGLANG_PLUGINS": "glm53"}, False),
        ({"SGLANG_PLUGINS": "a, glm53 ,b"}, False),
        ({"SGLANG_PLUGINS": "a,b"}, True),
        ({"SGLANG_PLATFORM": "other"}, True),
    ],
)
def test_tripwire_knows_when_we_are_left_out(variables: dict[str, str], out: bool) -> None:
    assert tripwire.left_out(variables) is out


def test_pool_hook_gives_ours_only_where_ours_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_glm53 import registration

    platform = SimpleNamespace(get_kv_pool_cls=lambda *, kind: f"stock {kind}")
    package = ModuleType("sglang.srt.platforms")
    package.current_platform = platform  # type: ignore[attr-defined]
    pool = ModuleType("sglang_glm53.memory.pool")
    pool.GlmTokenToKVPool = "ours"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.platforms", package)
    monkeypatch.setitem(sys.modules, "sglang_glm53.memory.pool", pool)
    registration._hook_pool(None)
    for decision, expected in (
        (None, "stock dsa"),
        (support.Decision(support.STANDS_DOWN), "stock dsa"),
        (support.Decision(support.RUNS), "ours"),
    ):
        monkeypatch.setattr(support, "_decision", decision)
        assert platform.get_kv_pool_cls(kind="dsa") == expected
        assert platform.get_kv_pool_cls(kind="mha") == "stock mha"
    assert catalog.row_of("sglang.srt.platforms.interface:SRTPlatform.get_kv_pool_cls")
