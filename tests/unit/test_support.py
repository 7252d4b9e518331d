"""The table of features: what runs, stands down and is refused, and how it is told."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_glm53 import support
from sglang_glm53.errors import Glm53Error
from sglang_glm53.support import REFUSED, RUNS, STANDS_DOWN, Situation, evaluate

CONFIG = SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"])
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLM53_STRICT", "GLM53_ATTENTION", "GLM53_SERVE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(support, "_decision", None)


def situation(
    device: str = "cpu",
    dtype: str = "bfloat16",
    capability: tuple[int, int] | None = (9, 0),
    rocm: bool = False,
    environment: dict[str, str] | None = None,
    **args: Any,
) -> Situation:
    os.environ.update(environment or {})  # what the fixture above has noted for its undoing
    quantization = args.pop("checkpoint", None)
    capability = None if device != "cuda" or rocm else capability
    config = SimpleNamespace(architectures=CONFIG.architectures, quantization_config=quantization)
    return Situation(args.get, config, device, f"torch.{dtype}", capability, rocm)


# One way to ask for each row of the table.
ASKED: dict[str, dict[str, Any]] = {
    "tensor parallelism": {"tp_size": 2},
    "attention data parallelism": {"attn_dp_size": 2},
    "MTP speculation": {"speculative_algorithm": "EAGLE"},
    "FP8 checkpoint": {"checkpoint": FP8},
    "indexer selections in the answer": {"enable_return_indexer_topk": True},
    "GLM53_SERVE=stock": {"environment": {"GLM53_SERVE": "stock"}},
    "another GPU than Hopper": {"device": "cuda", "capability": (10, 0)},
    "LoRA": {"lora_paths": ["a"]},
    "two-batch overlap": {"enable_two_batch_overlap": True},
    "context parallelism": {"attn_cp_size": 2},
    "pipeline parallelism": {"pp_size": 2},
    "expert parallelism": {"ep_size": 2},
    "hierarchical cache": {"enable_hierarchical_cache": True},
    "disaggregated prefill and decode": {"disaggregation_mode": "prefill"},
    "another quantization": {"checkpoint": {"quant_method": "modelopt"}},
    "another FP8 scheme": {"checkpoint": {"quant_method": "fp8"}},
    "FP8 checkpoint in float32": {"checkpoint": FP8, "dtype": "float32"},
    "float16": {"dtype": "float16"},
    "float32 on a GPU": {"device": "cuda", "dtype": "float32"},
    "FP8 cache on a CPU": {"kv_cache_dtype": "fp8_e4m3"},
    "another attention backend": {"attention_backend": "triton"},
    "compiled model on a CPU": {"enable_torch_compile": True},
    "another speculative algorithm on a CPU": {"speculative_algorithm": "NGRAM"},
    "tree of drafts on a CPU": {"speculative_eagle_topk": 4},
}


# Rows that ask what GPU there is.
ON_GPU = ("another GPU than Hopper", "float32 on a GPU")


def test_every_row_is_tested_and_complete() -> None:
    names = [row.name for row in support.FEATURES]
    assert sorted(names) == sorted(ASKED) and len(set(names)) == len(names)
    for row in support.FEATURES:
        assert row.decision in (RUNS, STANDS_DOWN, REFUSED)
        assert row.reason and row.advice and not row.reason.endswith(".")


@pytest.mark.parametrize("row", support.FEATURES, ids=lambda row: row.name)
def test_row_is_asked_for_by_its_option_and_not_by_default(row: support.Feature) -> None:
    assert not row.asked(situation())
    assert row.asked(situation(**ASKED[row.name]))


@pytest.mark.parametrize("row", support.FEATURES, ids=lambda row: row.name)
def test_decision_without_a_gpu(row: support.Feature) -> None:
    asked = {**ASKED[row.name], "device": "cpu"}
    if row.decision == RUNS or row.name in ON_GPU:
        assert evaluate(situation(**asked)).kind == RUNS
        return
    with pytest.raises(Glm53Error) as caught:
        evaluate(situation(**asked))
    line = str(caught.value)
    assert line.startswith(f"{row.name}: {row.reason}") and line.endswith(row.advice)
    assert ("cannot run without a GPU" in line) == (row.decision == STANDS_DOWN)


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


@pytest.mark.parametrize(
    ("gpu", "stands_down"),
    [
        ({"capability": (9, 0)}, False),
        ({"capability": None}, False),  # it could not be read: SGLang fails by itself
        ({"capability": (8, 0)}, True),
        ({"capability": (10, 3)}, True),
        ({"rocm": True}, True),
        ({"device": "xpu"}, True),
        ({"device": "npu"}, True),
    ],
)
def test_other_gpus_are_left_to_sglang(
    gpu: dict[str, Any], stands_down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"device": "cuda", **gpu}
    assert (evaluate(situation(**asked)).kind == STANDS_DOWN) == stands_down
    monkeypatch.setenv("GLM53_ATTENTION", "torch")  # needs no kernel of ours
    assert evaluate(situation(**asked)).kind == RUNS


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

    def note(name: str) -> None:
        read.add(name)

    for quantization in (None, FP8, {"quant_method": "other"}):
        for device in ("cpu", "cuda"):
            config = SimpleNamespace(quantization_config=quantization)
            for row in support.FEATURES:
                row.asked(Situation(note, config, device, "torch.bfloat16"))
    assert len(read) > 20
    assert read <= known, sorted(read - known)


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
    ],
)
def test_ranks_share_evenly(args: dict[str, Any], names: str | None) -> None:
    config = SimpleNamespace(num_attention_heads=4, intermediate_size=128, moe_intermediate_size=64)
    if names is None:
        support.check_ranks(situation(**args), config)
        return
    with pytest.raises(Glm53Error, match=names):
        support.check_ranks(situation(**args), config)
