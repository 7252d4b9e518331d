"""The doctor's memory rules beyond their smallest examples, and the sizes that they rest on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctor_examples_memory import DEEPEP, GIB, graphs, known

from sglang_glm53.checks import deployment, engine
from sglang_glm53.checks.engine import PASS, SKIPPED
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.memory_rules import RULES
from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.glm53 import config_json
from sglang_glm53.ledger.outside import Use, outside
from sglang_glm53.ledger.topology import PRESETS

ROOT = Path(__file__).resolve().parents[2]
BY_ID = {rule.id: rule for rule in RULES}


def verdict(name: str, **said: object) -> engine.Result:
    return engine.check(BY_ID[name], Facts.only(**said))


# --- the account ---------------------------------------------------------------------------------


def test_the_arguments_become_a_topology() -> None:
    said = known(attn_dp_size=8, ep_size=8, moe_a2a_backend="deepep", moe_dense_tp_size=1)
    found = deployment.account(Facts.only(**said))
    assert found is not None
    assert found.topology.name == "tp=8,ep=8,dp=8,a2a=deepep,dense_tp=1"
    assert found.mem_fraction == 0.85 and not found.workload.drafts
    mtp = known(speculative_algorithm="EAGLE", speculative_num_draft_tokens=6)
    found = deployment.account(Facts.only(**mtp))
    assert found is not None and (found.workload.steps, found.workload.tokens) == (5, 6)


@pytest.mark.parametrize(
    ("changed", "kv"),
    [
        ({}, "fp8"),
        ({"dsa_prefill_backend": "trtllm", "dsa_decode_backend": "trtllm"}, "fp8-raw"),
        ({"kv_cache_dtype": "bfloat16"}, "bf16"),
        ({"kv_cache_dtype": None}, "bf16"),
    ],
)
def test_the_caches_form_follows_from_kernels(changed: dict[str, object], kv: str) -> None:
    assert deployment.cache_form(Facts.only(**known(**changed))) == kv


@pytest.mark.parametrize(
    "changed",
    [
        {"device": "cpu"},
        {"mem_fraction_static": None},
        {"pp_size": 2},
        {"dcp_size": 2},
        {"cpu_offload_gb": 20},
        {"enable_hisparse": True},
        {"quantization": "modelopt_fp4"},
        {"tp_size": 7},
    ],
)
def test_nothing_is_said_of_what_is_not_counted(changed: dict[str, object]) -> None:
    facts = Facts.only(**known(**changed), given=frozenset(), host_memory_bytes=GIB)
    assert deployment.account(facts) is None
    for rule in RULES:
        if "hardware" in rule.reads:
            wanted = SKIPPED if changed.get("quantization") else PASS
            assert engine.check(rule, facts).status == wanted


def test_the_graphs_are_read_from_json_and_from_sglangs_own_record() -> None:
    backend = SimpleNamespace(value="full")
    record = SimpleNamespace(decode=SimpleNamespace(bs=[8, 1], backend=backend))
    for config in (record, {"decode": {"bs": [8, 1], "backend": "full"}}):
        facts = Facts.only(args={"cuda_graph_config": config})
        assert deployment.graph_sizes(facts) == [1, 8]
    off = Facts.only(args={"cuda_graph_config": {"decode": {"bs": [8], "backend": "disabled"}}})
    assert deployment.graph_sizes(off) == []


# --- what lies outside the fraction --------------------------------------------------------------


def beside(**use: object) -> dict[str, float]:
    config = Glm53Config.from_hf(config_json())
    memory = 139.8 * GIB
    return dict(
        outside(
            config,
            PRESETS["tp8"],
            Use(**{"context": 2**20, "pool_tokens": 500_000, **use}),
            memory=memory,
            outside=0.15 * memory,
        )
    )


def test_the_table_of_requests_is_the_logs() -> None:
    """What a 10-layer slice lacks after its pools, beside the pools: 0.52 GiB."""
    rows = json.loads((ROOT / "docs/benchmarks/memory.json").read_text())["rows"]
    (row,) = (r for r in rows if (r["name"], r["side"]) == ("10-fp8-prefill", "stock"))
    seen = row["seen"]
    missing = seen["free"] - seen["target"] - seen["pool"] - seen["after_pool"]
    sheet = beside(context=row["shape"]["context"], pool_tokens=seen["tokens"])
    assert sheet["request_table"] / GIB == pytest.approx(missing, abs=0.03)


def test_the_scores_of_a_prefill_are_bounded_and_those_of_graphs_are_not() -> None:
    assert beside(chunk=1024)["prefill_scores"] == pytest.approx(1024 * 2**20 * 4)
    assert beside(chunk=8192)["prefill_scores"] == pytest.approx(0.2 * 0.15 * 139.8 * GIB)
    assert beside(chunk=16384, budget=9.0)["prefill_scores"] == pytest.approx(0.3 * 139.8 * GIB)
    rows = beside(graph_batch=48, tokens=6, steps=5)
    assert rows["graph_scores"] == pytest.approx(48 * 6 * 2**20 * 4, rel=1e-3)
    assert rows["graph_tables"] == pytest.approx((2 * 48 * 6 + 4 * 48) * 2**20 * 4, rel=1e-3)
    assert beside(graph_batch=48)["graph_tables"] == 0


def test_deepeps_buffers() -> None:
    """2 x (send + receive) of 256 experts x 128 rows x 12,480 B."""
    assert beside(dispatch_limit=128)["deepep"] == 4 * 256 * 128 * (12288 + 48 * 4)
    assert beside()["deepep"] == 0


def test_sglang_makes_a_table_of_thousands_of_requests_unless_told() -> None:
    assert beside()["requests"] == 2048
    assert beside(requests=64)["request_table"] < beside()["request_table"] / 30
    assert beside(context=32_768)["requests"] == 4096
    assert beside(context=32_768, pool_tokens=640)["requests"] == 320


# --- verdicts ------------------------------------------------------------------------------------


def test_more_memory_is_asked_for_where_no_fraction_helps() -> None:
    said = {**known(tp_size=4), "given": frozenset()}
    assert "use more GPUs" in verdict("memory-does-not-fit", **said).cure


def test_a_capped_cache_holds_what_it_is_capped_at() -> None:
    said = known(context_length=262_144, max_total_tokens=100_000)
    result = verdict("memory-long-context", **said)
    assert "the 100,000 that the cache" in result.message


def test_the_longest_context_is_the_configs_where_none_is_given() -> None:
    result = verdict("memory-long-context", **known())
    assert result.status == "warn" and "1,048,576 tokens (config.json's" in result.message
    small = {**known()["raw_config"], "max_position_embeddings": 131_072}
    assert verdict("memory-long-context", **{**known(), "raw_config": small}).status == PASS


@pytest.mark.parametrize(("kv", "advised"), [("fp8_e4m3", False), ("bfloat16", True)])
def test_an_fp8_cache_is_advised_to_those_who_have_none(kv: str, advised: bool) -> None:
    result = verdict("memory-long-context", **known(kv_cache_dtype=kv))
    assert result.status == "warn" and ("FP8 cache" in result.cure) == advised


@pytest.mark.parametrize(
    ("args", "limit", "words"),
    [
        (graphs(1, 512), None, "RANK=1024"),
        ({**graphs(1, 1024), "max_running_requests": 8192}, None, "--max-running-requests 4096"),
        ({"max_running_requests": 64}, "2048", "set it to 1024"),
        ({"max_running_requests": 1024}, "256", None),
        ({"max_running_requests": 4096, "deepep_mode": "normal"}, None, None),
        ({"max_running_requests": 4096, "disaggregation_mode": "prefill"}, None, None),
        ({"max_running_requests": 512, "attn_dp_size": 1}, None, None),
    ],
)
def test_deepeps_limit(args: dict[str, object], limit: str | None, words: str | None) -> None:
    name = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
    result = verdict(
        "deepep-dispatch-limit",
        args={**DEEPEP, **args},
        environment={} if limit is None else {name: limit},
    )
    assert (result.status == PASS) == (words is None), result.message
    assert words is None or words in result.cure


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tp_size": 8, "attn_dp_size": 2, **graphs(1, 2, 3)}, "none of 1, 2, 3 requests"),
        ({"tp_size": 8, "attn_dp_size": 2, **graphs(1, 2, 4)}, None),
        ({"tp_size": 8, **graphs(1, 2, 3)}, None),
        ({"tp_size": 8, "max_running_requests": 64}, None),
        (
            {"tp_size": 8, "attn_dp_size": 8, "max_running_requests": 64, **graphs(1, 8)},
            None,
        ),
        (
            {"tp_size": 8, "attn_dp_size": 8, "max_running_requests": 128, **graphs(1, 8)},
            "--max-running-requests 64",
        ),
    ],
)
def test_graph_sizes(args: dict[str, object], words: str | None) -> None:
    result = verdict("graph-sizes-miss-verify", args=args)
    assert (result.status == PASS) == (words is None), result.message
    assert words is None or words in f"{result.message}; {result.cure}"


def test_a_fixed_host_size_is_each_ranks() -> None:
    args = {"enable_hierarchical_cache": True, "hicache_size": 40}
    assert verdict("hicache-host-memory", **known(**args), host_memory_bytes=400 * GIB).status == (
        PASS
    )
    bad = verdict("hicache-host-memory", **known(**args), host_memory_bytes=300 * GIB)
    assert "--hicache-size 40" in bad.message and "--hicache-size 38 or less" in bad.cure
    two = known(**args, nnodes=2)
    assert verdict("hicache-host-memory", **two, host_memory_bytes=300 * GIB).status == PASS
