"""Smallest facts for the rules on memory (see doctor_examples)."""

from __future__ import annotations

from doctor_examples import CONFIG, Example, Said

from sglang_glm53.ledger import hardware

GIB = 2**30
# GLM-5.3 in FP8 on eight H200, as SGLang resolves it.
EIGHT: Said = {
    "tp_size": 8,
    "mem_fraction_static": 0.85,
    "kv_cache_dtype": "fp8_e4m3",
    "dsa_decode_backend": "flashmla_kv",
    "dsa_prefill_backend": "flashmla_kv",
    "chunked_prefill_size": 8192,
}
FP8 = {**CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def known(**changed: object) -> Said:
    return {"raw_config": FP8, "hardware": hardware.load("h200"), "args": {**EIGHT, **changed}}


def graphs(*sizes: int) -> Said:
    return {"cuda_graph_config": {"decode": {"backend": "full", "bs": list(sizes)}}}


DEEPEP: Said = {
    "tp_size": 8,
    "attn_dp_size": 8,
    "moe_a2a_backend": "deepep",
    "speculative_algorithm": "EAGLE",
    "speculative_num_draft_tokens": 2,
}
HIERARCHICAL = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}

EXAMPLES: dict[str, Example] = {
    "memory-does-not-fit": Example(
        known(mem_fraction_static=0.6),
        known(mem_fraction_static=0.7),
        ("88.8 GiB", "137.3", "0.6", "above 0.647"),
    ),
    "memory-long-context": Example(
        known(context_length=1_048_576),
        known(context_length=262_144),
        ("1,048,576", "GiB more"),
    ),
    "memory-indexer-logits": Example(
        known(mem_fraction_static=0.97, max_running_requests=1024, **graphs(1, 1024)),
        known(max_running_requests=64, **graphs(1, 64)),
        ("1,048,576", "0.97"),
    ),
    "deepep-dispatch-limit": Example(
        {"args": {**DEEPEP, "max_running_requests": 1024}, "environment": {}},
        {"args": {**DEEPEP, "max_running_requests": 512}, "environment": {}},
        ("256 rows", "128 requests x 2 tokens", "RANK=256"),
    ),
    "graph-sizes-miss-verify": Example(
        {"args": {"tp_size": 1, "max_running_requests": 64, **graphs(1, 8, 16)}},
        {"args": {"tp_size": 1, "max_running_requests": 16, **graphs(1, 8, 16)}},
        ("16 requests", "64 may run"),
    ),
    "hicache-host-memory": Example(
        {**known(**HIERARCHICAL), "host_memory_bytes": 128 * GIB},
        {**known(**HIERARCHICAL), "host_memory_bytes": 2048 * GIB},
        ("8 ranks", "--hicache-ratio 2", "128"),
    ),
}
