"""The table of features: what runs, stands down and is refused, and how it is told."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_glm53 import support
from sglang_glm53.compat import sglang_version
from sglang_glm53.errors import Glm53Error
from sglang_glm53.features import REFUSED, RUNS, STANDS_DOWN, UNTESTED, Situation
from sglang_glm53.support import evaluate

CONFIG = SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"])
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("GLM53_STRICT", "GLM53_ATTENTION", "GLM53_SERVE", "GLM53_POOL")
    sglangs = (row.name.partition("=")[0] for row in support.FEATURES if "SGLANG_" in row.name)
    for name in (*ours, *sglangs):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(support, "_decision", None)


def situation(
    device: str = "cpu",
    dtype: str = "bfloat16",
    capability: tuple[int, int] | None = (9, 0),
    rocm: bool = False,
    environment: dict[str, str] | None = None,
    sglang: str | None = "0.5.23",
    **args: Any,
) -> Situation:
    os.environ.update(environment or {})  # what the fixture above has noted for its undoing
    quantization = args.pop("checkpoint", None)
    capability = None if device != "cuda" or rocm else capability
    config = SimpleNamespace(architectures=CONFIG.architectures, quantization_config=quantization)
    return Situation(args.get, config, device, f"torch.{dtype}", capability, rocm, sglang)


GPU = {"device": "cuda"}


def graphs(**backends: str) -> SimpleNamespace:
    return SimpleNamespace(**{phase: SimpleNamespace(backend=b) for phase, b in backends.items()})


# Ways to ask for each row of the table; the first also stands for the row where one is enough.
ASKED: dict[str, list[dict[str, Any]]] = {
    "tensor parallelism": [{"tp_size": 2}],
    "attention data parallelism": [{"attn_dp_size": 2}, {"enable_dp_attention": True}],
    "pipeline parallelism": [{"pp_size": 2}],
    "expert parallelism": [{"ep_size": 2}],
    "head split over attention ranks": [{"enable_dp_lm_head": True}],
    "mixed chunks": [{"enable_mixed_chunk": True}],
    "MTP speculation": [{"speculative_algorithm": "EAGLE"}, {"speculative_algorithm": "NEXTN"}],
    "FP8 checkpoint": [{"checkpoint": FP8}],
    "indexer selections in the answer": [{"enable_return_indexer_topk": True}],
    "routed experts in the answer": [{"enable_return_routed_experts": True}],
    "hidden states in the answer": [
        {"enable_return_hidden_states": True},
        {"return_hidden_states_mode": "last"},
    ],
    "GLM53_SERVE=stock": [{"environment": {"GLM53_SERVE": "stock"}}],
    "another GPU than Hopper": [
        {**GPU, "capability": (10, 0)},
        {**GPU, "capability": (8, 0)},
        {**GPU, "rocm": True},
        {"device": "xpu"},
        {"device": "npu"},
    ],
    "another SGLang on a GPU": [{**GPU, "sglang": "0.5.22"}],
    "LoRA": [{"lora_paths": ["a"]}, {"enable_lora": True}],
    "batch overlap": [{"enable_two_batch_overlap": True}, {"enable_single_batch_overlap": True}],
    "context parallelism": [{"attn_cp_size": 2}, {"dcp_size": 2}, {"enable_prefill_cp": True}],
    "all-to-all between experts": [
        {"moe_a2a_backend": "deepep"},
        {"speculative_moe_a2a_backend": "deepep"},
    ],
    "another all-to-all between experts": [
        {"moe_a2a_backend": "mooncake"},
        {"speculative_moe_a2a_backend": "flashinfer"},
    ],
    "shared expert fused under expert parallelism": [
        {**GPU, "enforce_shared_experts_fusion": True, "ep_size": 2},
        {**GPU, "enforce_shared_experts_fusion": True, "moe_a2a_backend": "deepep"},
    ],
    "rebalanced experts": [
        {"enable_eplb": True},
        {**GPU, "ep_num_redundant_experts": 2},
        {**GPU, "init_expert_location": "map.json"},
        {**GPU, "ep_dispatch_algorithm": "static"},
    ],
    "hierarchical cache": [{"enable_hierarchical_cache": True}],
    "another tier of the cache": [
        {"enable_hisparse": True},
        {"enable_lmcache": True},
        {"enable_flexkv": True},
        {"enable_unified_cache_external_linker": True},
    ],
    "disaggregated prefill and decode": [{"disaggregation_mode": "prefill"}],
    "another quantization": [
        {"checkpoint": {"quant_method": "modelopt"}},
        {"quantization": "w4afp8"},
        {"quantization": "nvfp4_online"},
    ],
    "another FP8 scheme": [{"checkpoint": {"quant_method": "fp8"}}, {"quantization": "fp8"}],
    "another attention backend on a GPU": [
        {**GPU, "attention_backend": "fa3"},
        {**GPU, "prefill_attention_backend": "triton"},
        {**GPU, "speculative_draft_attention_backend": "fa3"},
    ],
    "another sparse attention kernel": [
        {**GPU, "dsa_prefill_backend": "tilelang"},
        {**GPU, "dsa_decode_backend": "trtllm"},
    ],
    "another indexer kernel": [
        {**GPU, "dsa_topk_backend": "torch"},
        {**GPU, "speculative_dsa_topk_backend": "flashinfer"},
        {**GPU, "dsa_paged_mqa_logits_backend": "cutedsl"},
    ],
    "another cache layout": [
        {**GPU, "enable_kv_cache_sharding": True},
        {**GPU, "kv_canary": "log"},
    ],
    "another CUDA graph backend": [
        {**GPU, "cuda_graph_config": graphs(prefill="full", decode="full")},
        {**GPU, "cuda_graph_config": graphs(prefill="tc_piecewise", decode="full")},
        {**GPU, "cuda_graph_config": {"decode": {"backend": "breakable"}}},
    ],
    "compiled model on a GPU": [{**GPU, "enable_torch_compile": True}],
    "another model kernel": [{**GPU, "enable_nvidia_megakernel": True}],
    "split prefill": [{**GPU, "enable_pdmux": True}],
    "deterministic inference": [
        {**GPU, "enable_deterministic_inference": True},
        {**GPU, "rl_on_policy_target": "fsdp"},
    ],
    "TF32 products": [{**GPU, "enable_tf32_matmul": True}],
    "another MoE kernel": [
        {**GPU, "moe_runner_backend": "flashinfer_cutlass"},
        {**GPU, "speculative_moe_runner_backend": "marlin"},
    ],
    "another placement of experts": [
        {**GPU, "moe_dp_size": 2},
        {**GPU, "enable_paged_experts": True},
        {**GPU, "elastic_ep_backend": "mooncake"},
    ],
    "another split of the shared expert or the dense layers": [
        {**GPU, "shared_experts_tp_size": 1},
        {**GPU, "enable_dense_mlp_attn_tp": True},
    ],
    "another speculative algorithm on a GPU": [
        {**GPU, "speculative_algorithm": name}
        for name in ("EAGLE3", "DFLASH", "STANDALONE", "NGRAM")
    ],
    "tree of drafts on a GPU": [{**GPU, "speculative_eagle_topk": 4}],
    "another draft": [
        {**GPU, "speculative_algorithm": "EAGLE", **draft}
        for draft in (
            {"enable_multi_layer_eagle": True},
            {"speculative_adaptive": True},
            {"model_path": "a", "speculative_draft_model_path": "b"},
            {"kv_cache_dtype": "fp8_e4m3", "speculative_draft_kv_cache_dtype": "bfloat16"},
            {"speculative_draft_model_quantization": "unquant"},
            {"speculative_draft_load_format": "dummy", "load_format": "auto"},
            {"decoupled_spec_role": "draft"},
        )
    ],
    "hidden states of inner layers": [{**GPU, "enable_return_aux_hidden_states": True}],
    "CPU offload": [{**GPU, "cpu_offload_gb": 4}, {**GPU, "offload_group_size": 2}],
    "memory saver": [{**GPU, "enable_memory_saver": True}],
    "another way to load weights": [
        {**GPU, "load_format": "sharded_state"},
        {**GPU, "weight_cache_mode": "client"},
        {**GPU, "startup_weight_load_mode": "overlap"},
    ],
    "hooks on modules": [{**GPU, "forward_hooks": [{}]}],
    **{
        name: [{**GPU, "environment": {name.partition("=")[0]: name.partition("=")[2] or "1"}}]
        for name in (
            "SGLANG_USE_DEEPGEMM_BMM",
            "SGLANG_ENABLE_DSA_Q8KV8_BORN_FP8_Q",
            "SGLANG_DSA_TOPK_BROADCAST",
            "SGLANG_DISABLE_DSA_INDEXER_FUSION",
            "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH",
            "SGLANG_SHARED_EXPERT_TP1",
            "SGLANG_DP_SHARED_EXPERT_LOCAL",
            "SGLANG_OPT_MOE_QUANT_ONCE",
            "SGLANG_ENABLE_PCG_DSV2_DUAL_STREAM",
            "SGLANG_DSA_FUSE_TOPK=0",
        )
    },
    "FP8 checkpoint in float32": [{"checkpoint": FP8, "dtype": "float32"}],
    "float16": [{"dtype": "float16"}],
    "float32 on a GPU": [{**GPU, "dtype": "float32"}],
    "another cache dtype": [{**GPU, "kv_cache_dtype": name} for name in ("nvfp4", "fp8_e5m2")],
    "FP8 cache on a CPU": [{"kv_cache_dtype": "fp8_e4m3"}],
    "another attention backend": [
        {"attention_backend": "triton"},
        {**GPU, "attention_backend": "fa3", "environment": {"GLM53_ATTENTION": "torch"}},
    ],
    "compiled model on a CPU": [{"enable_torch_compile": True}],
    "another speculative algorithm on a CPU": [{"speculative_algorithm": "NGRAM"}],
    "tree of drafts on a CPU": [{"speculative_eagle_topk": 4}],
}

# What SGLang's own defaults resolve to on a Hopper GPU: no row may take it for a wish.
HOPPER_DEFAULTS = {
    "attention_backend": "dsa",
    "dsa_prefill_backend": "flashmla_sparse",
    "dsa_decode_backend": "fa3",
    "dsa_topk_backend": "sgl-kernel",
    "speculative_dsa_topk_backend": "sgl-kernel",
    "dsa_paged_mqa_logits_backend": "auto",
    "kv_cache_dtype": "bfloat16",
    "cuda_graph_config": graphs(prefill="breakable", decode="full"),
    "moe_runner_backend": "auto",
    "speculative_moe_runner_backend": "auto",
    "moe_a2a_backend": "none",
    "speculative_moe_a2a_backend": "none",
    "enable_tf32_matmul": False,
    "load_format": "auto",
    "weight_cache_mode": "off",
    "startup_weight_load_mode": "serial",
    "kv_canary": "none",
    "init_expert_location": "trivial",
    "ep_num_redundant_experts": 0,
    "decoupled_spec_role": "null",
    "disaggregation_mode": "null",
    "offload_group_size": -1,
    "quantization": "fp8",
    "model_path": "a",
}
HOPPER_MTP = {
    **HOPPER_DEFAULTS,
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 1,
    "speculative_draft_model_path": "a",
    "speculative_draft_model_quantization": "fp8",
}

# Arguments that only some supported SGLang has: {name: the first release}.
ONLY_SINCE = {
    "enable_nvidia_megakernel": "0.5.23",
    "enable_amd_monokernel": "0.5.23",
    "enable_paged_experts": "0.5.23",
    "enable_return_aux_hidden_states": "0.5.23",
}
for _asked, _ways in (
    ("a cache in bfloat16", [{"kv_cache_dtype": "bfloat16"}]),
    (
        "another sparse attention kernel than flashmla_kv",
        [
            {"kv_cache_dtype": "fp8_e4m3", "dsa_decode_backend": "fa3"},
            {"kv_cache_dtype": "fp8_e4m3", "dsa_prefill_backend": "flashmla_sparse"},
        ],
    ),
    ("pipeline parallelism", [{"device": "cpu", "pp_size": 2}]),
):
    ASKED[f"GLM53_POOL=page with {_asked}"] = [
        {**GPU, **way, "environment": {"GLM53_POOL": "page"}} for way in _ways
    ]

WAYS = [
    pytest.param(row, ask, id=f"{row.name}-{i}")
    for row in support.FEATURES
    for i, ask in enumerate(ASKED.get(row.name, ()))
]


def test_every_row_is_tested_and_complete() -> None:
    names = [row.name for row in support.FEATURES]
    assert sorted(names) == sorted(ASKED) and len(set(names)) == len(names)
    for row in support.FEATURES:
        assert row.decision in (RUNS, STANDS_DOWN, REFUSED)
        assert row.reason and row.advice and not row.reason.endswith(".")


@pytest.mark.parametrize(("row", "ask"), WAYS)
def test_row_is_asked_for_by_its_option_and_not_by_default(
    row: support.Feature, ask: dict[str, Any]
) -> None:
    for args in ({}, HOPPER_DEFAULTS, HOPPER_MTP):
        if row.decision != RUNS:
            assert not row.asked(situation("cuda" if args else "cpu", checkpoint=FP8, **args))
    assert not row.asked(situation()) and not row.asked(situation("cuda"))
    assert row.asked(situation(**ask))


@pytest.mark.parametrize(("row", "ask"), WAYS)
def test_decision(row: support.Feature, ask: dict[str, Any]) -> None:
    """What is told: on a CPU a row that stands down refuses, on a GPU SGLang's class serves."""
    asked = situation(**ask)
    if row.decision == RUNS:
        assert evaluate(asked).kind == RUNS
        return
    if row.decision == STANDS_DOWN and asked.device != "cpu":
        decision = evaluate(asked)
        assert decision.kind == STANDS_DOWN and row in decision.rows
        return
    with pytest.raises(Glm53Error) as caught:
        evaluate(asked)
    line = str(caught.value)
    assert line.startswith(f"{row.name}: {row.reason}") and line.endswith(row.advice)
    assert ("cannot run without a GPU" in line) == (row.decision == STANDS_DOWN)


@pytest.mark.parametrize(("row", "ask"), WAYS)
def test_a_cpu_does_not_ask_for_what_only_a_gpu_can_have(
    row: support.Feature, ask: dict[str, Any]
) -> None:
    if any(way.get("device", "cpu") == "cpu" for way in ASKED[row.name]):
        return
    on_a_cpu = situation(**{**ask, "device": "cpu"})
    assert not row.asked(on_a_cpu)


def test_every_default_runs_on_a_hopper_gpu() -> None:
    for args in (HOPPER_DEFAULTS, HOPPER_MTP):
        assert evaluate(situation("cuda", checkpoint=FP8, **args)).kind == RUNS


@pytest.mark.parametrize("value", ["0", "false", "", "no"])
def test_a_variable_that_is_switched_off_asks_for_nothing(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_DEEPGEMM_BMM", value)
    assert evaluate(situation("cuda")).kind == RUNS


def test_ours_on_purpose_lifts_what_was_not_tested_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLM53_SERVE", "ours")
    for row in support.FEATURES:
        for ask in ASKED[row.name]:
            if row.decision != STANDS_DOWN or "environment" in ask:
                continue
            if situation(**ask).device == "cpu" and row.reason != UNTESTED:
                with pytest.raises(Glm53Error, match=f"^{row.name}:"):
                    evaluate(situation(**ask))
                continue
            decision = evaluate(situation(**ask))
            assert (decision.kind == RUNS) == (row.reason == UNTESTED), row.name


def test_decision_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert evaluate(situation(device="cuda")).kind == RUNS
    decision = evaluate(situation(device="cuda", enable_lora=True))
    assert decision.kind == STANDS_DOWN
    assert [row.name for row in decision.rows] == ["LoRA"]
    monkeypatch.setenv("GLM53_ATTENTION", "torch")
    assert evaluate(situation(device="cuda")).kind == RUNS
    assert evaluate(situation(device="cuda", enable_lora=True)).kind == STANDS_DOWN
    monkeypatch.setenv("GLM53_STRICT", "1")
    with pytest.raises(Glm53Error, match=r"LoRA: .* \(GLM53_STRICT=1\); leave the option out"):
        evaluate(situation(device="cuda", enable_lora=True))
    with pytest.raises(Glm53Error, match="float16"):
        evaluate(situation(device="cuda", dtype="float16"))


@pytest.mark.parametrize("gpu", ASKED["another GPU than Hopper"])
def test_the_torch_attention_runs_on_any_gpu(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM53_ATTENTION", "torch")  # needs no kernel
    assert evaluate(situation(**gpu)).kind == RUNS
    assert evaluate(situation(**gpu, moe_runner_backend="flashinfer_cutlass")).kind == RUNS


def test_a_gpu_that_does_not_say_what_it_is_is_left_to_sglang() -> None:
    assert evaluate(situation("cuda", capability=None)).kind == RUNS


def test_stock_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM53_SERVE", "stock")
    monkeypatch.setenv("GLM53_STRICT", "1")  # of what was not asked for
    decision = evaluate(situation(device="cuda", enable_lora=True))
    assert decision.kind == STANDS_DOWN
    assert [row.name for row in decision.rows] == ["GLM53_SERVE=stock", "LoRA"]
    with pytest.raises(Glm53Error, match="^GLM53_SERVE=stock: .* without a GPU; unset GLM53_SERVE"):
        evaluate(situation())
    monkeypatch.setenv("GLM53_SERVE", "ours")
    assert evaluate(situation()).kind == RUNS
    monkeypatch.setenv("GLM53_SERVE", "theirs")
    with pytest.raises(Glm53Error, match='GLM53_SERVE is "theirs"; it can be "ours" or "stock"'):
        evaluate(situation())


def test_refused_comes_before_stands_down() -> None:
    with pytest.raises(Glm53Error, match="^float16"):
        evaluate(situation(device="cuda", dtype="float16", enable_lora=True))


def test_predicates_read_real_arguments() -> None:
    """A misspelt field would never be asked for: every name read is a ServerArgs field."""
    fields_of = pytest.importorskip("sglang.srt.arg_groups.arg_utils").field_names
    from sglang.srt.server_args import ServerArgs

    known = fields_of(ServerArgs)
    read: set[str] = set()

    def note(name: str) -> Any:
        read.add(name)
        return "EAGLE" if name == "speculative_algorithm" else None

    for quantization in (None, FP8, {"quant_method": "other"}):
        for device in ("cpu", "cuda"):
            config = SimpleNamespace(quantization_config=quantization)
            for row in support.FEATURES:
                row.asked(Situation(note, config, device, "torch.bfloat16", (9, 0)))
    assert len(read) > 60
    missing = read - known
    assert missing <= ONLY_SINCE.keys(), sorted(missing)
    installed = tuple(int(part) for part in str(sglang_version()).split("."))
    for name in missing:
        assert installed < tuple(int(part) for part in ONLY_SINCE[name].split(".")), name


def test_decide_logs_once_and_remembers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GLM53_SERVE", "stock")
    monkeypatch.setattr(support, "situation_of", lambda config: situation(device="cuda"))
    monkeypatch.setattr(support, "_first_rank", lambda: True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert support.decide(None).kind == STANDS_DOWN
    (record,) = caplog.records
    assert (
        "stands down (GLM53_SERVE=stock)" in record.message and "own class serves" in record.message
    )
    assert not support.serves_our_model() and support.current().kind == STANDS_DOWN


def test_decide_waits_for_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "situation_of", lambda config: None)
    assert support.decide(None).kind == RUNS
    assert support.current() is None and not support.serves_our_model()


def test_is_ours() -> None:
    assert support.is_ours(CONFIG)
    assert not support.is_ours(SimpleNamespace(architectures=["LlamaForCausalLM"]))
    assert not support.is_ours(SimpleNamespace(architectures=None))


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ({}, None),
        ({"tp_size": 4}, None),
        ({"tp_size": 3}, "num_attention_heads is 4, which 3 ranks"),
        ({"tp_size": 8, "attn_dp_size": 2}, None),
        ({"tp_size": 8, "enable_dp_attention": True, "dp_size": 2}, None),
        ({"tp_size": 8}, "num_attention_heads"),
        ({"tp_size": 3, "attn_dp_size": 3}, "intermediate_size is 128"),
        ({"tp_size": 3, "attn_dp_size": 3, "moe_dense_tp_size": 1}, "moe_intermediate_size"),
        ({"tp_size": 2, "ep_size": 2}, None),
        ({"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 2}, None),
        ({"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 1}, "--ep-size 2: 9 experts"),
        ({"tp_size": 3, "attn_dp_size": 3, "moe_dense_tp_size": 1, "ep_size": 3}, "8 experts"),
    ],
)
def test_ranks_share_evenly(args: dict[str, Any], names: str | None) -> None:
    config = SimpleNamespace(
        num_attention_heads=4, intermediate_size=128, moe_intermediate_size=64, n_routed_experts=8
    )
    if names is None:
        support.check_ranks(situation(**args), config)
        return
    with pytest.raises(Glm53Error, match=names):
        support.check_ranks(situation(**args), config)


# Fields that a row reads only to compare another one with.
BESIDE = {
    "another draft": ("speculative_algorithm", "load_format", "model_path", "quantization"),
}


def arguments_of(row: support.Feature) -> list[str]:
    """The names of the server arguments, and of the variables, that ask for a row."""
    read: list[str] = []

    def note(name: str) -> Any:
        read.append(name)
        return "EAGLE" if name == "speculative_algorithm" and row.name == "another draft" else None

    for device in ("cpu", "cuda"):
        config = SimpleNamespace(quantization_config=None)
        row.asked(Situation(note, config, device, "torch.bfloat16", (9, 0)))
    left_out = BESIDE.get(row.name, ())
    return [name for name in dict.fromkeys(read) if name not in left_out]


def as_documented(row: support.Feature) -> str:
    """A row as docs/compatibility.md has it."""
    name = f"`{row.name}`" if row.name.startswith(("SGLANG_", "GLM53_")) else row.name
    names = ", ".join(f"`{argument}`" for argument in arguments_of(row)) or "–"
    return f"| {name} | {names} | {row.decision} | {row.reason} | {row.advice} |"


def test_docs_say_the_same() -> None:
    """The table in docs/compatibility.md has each row of the table, in order, and no other."""
    text = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    _, _, section = text.partition("<!-- the table of features -->\n")
    assert section, "docs/compatibility.md has no table of features"
    lines = section.partition("\n\n")[0].splitlines()
    assert lines[:2] == [
        "| feature | server arguments | decision | why | what you can do |",
        "|---|---|---|---|---|",
    ]
    wanted = [as_documented(row) for row in support.FEATURES]
    assert lines[2:] == wanted, "the table should be:\n" + "\n".join(wanted)


def test_a_weight_update_is_no_other_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang notes the new folder in the arguments of its process; the draft's is the old one."""
    runtime = pytest.importorskip("sglang.srt.runtime_context")
    first = {**HOPPER_MTP, "device": "cuda"}
    context = SimpleNamespace(
        server_args=SimpleNamespace(resolved_dict=lambda: dict(first)),
        resolved_server_args_dict=lambda: {**first, "model_path": "b", "load_format": "remote"},
    )
    monkeypatch.setattr(runtime, "get_context", lambda: context)
    config = SimpleNamespace(quantization_config=FP8)
    seen = support.situation_of(SimpleNamespace(hf_config=config, dtype="torch.bfloat16"))
    assert seen is not None and evaluate(seen).kind == RUNS
