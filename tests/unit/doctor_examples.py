"""For each of the doctor's rules: the smallest facts that trigger it, and the nearest that do not.

A fact that is not said is unknown. The module of the memory rules' examples is merged in by the
test.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from sglang_glm53.checkpoint import SCALE_SUFFIX, checkpoint_tensors
from sglang_glm53.checks.headers import Headers, Tensor
from sglang_glm53.checks.packages import Plugin
from sglang_glm53.compat.versions import GPU_TESTED, SUPPORTED
from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.glm53 import config_json

Said = dict[str, Any]


class Example(NamedTuple):
    """Facts that trigger a rule, facts that do not, and words that the message must have."""

    bad: Said
    good: Said
    words: tuple[str, ...] = ()


CONFIG = config_json()
# Two layers, the second of which takes the first one's selection; one MTP layer; one expert a rank.
SMALL = {
    **CONFIG,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "indexer_types": ["full", "shared"],
    "mlp_layer_types": None,
    "index_topk_freq": None,
    "index_skip_topk_offset": None,
    "quantization_config": None,
}
PINS = {
    "torch": "==2.14.1",
    "transformers": "==5.19.0",
    "sglang-kernel": "==0.4.10",
    "xgrammar": "==0.2.7",
    "nvshmem4py-cu13": "",
}
RIGHT = {
    "torch": "2.14.1",
    "transformers": "5.19.0",
    "sglang-kernel": "0.4.10",
    "xgrammar": "0.2.7",
}
NVIDIA = {"device": "cuda", "modules": frozenset()}
HOPPER = {"device": "cuda", "capability": (9, 0)}
EAGLE = {"speculative_algorithm": "EAGLE"}
OURS = tuple(
    Plugin(f"sglang.srt.{group}", "glm53", "sglang_glm53.plugin:register", "sglang-glm53")
    for group in ("plugins", "platforms")
)
OTHER = Plugin("sglang.srt.plugins", "smg-zmq", "smg:register", "smg-grpc-servicer")
TEMPLATE = "[gMASK]<sop> Reasoning Effort: <tool_call> <arg_key> <arg_value>"
TOKENS = {"10": {"content": "<|user|>"}, "11": {"content": "<|observation|>"}}


def without(values: Said, *names: str) -> Said:
    return {name: value for name, value in values.items() if name not in names}


def tensors(**changed: Tensor | None) -> Headers:
    """The headers of a whole checkpoint of SMALL, but for some tensors; None takes one out."""
    whole = {
        name: Tensor("BF16", shape, "model.safetensors")
        for name, shape in checkpoint_tensors(Glm53Config.from_hf(SMALL))
    }
    whole.update(changed)
    return Headers({name: tensor for name, tensor in whole.items() if tensor is not None})


def checkpoint(headers: Headers) -> Said:
    return {"headers": headers, "raw_config": SMALL}


WHOLE = checkpoint(tensors())
WK = "model.layers.0.self_attn.indexer.wk.weight"
HERE = Path(__file__).parent  # a folder without a checkpoint's files

LOGIN_NODE: Said = {"device": "cpu", "machine_named": False, "given": frozenset()}
QUESTIONS: dict[str, Example] = {
    "judged-for-a-cpu": Example(
        {**LOGIN_NODE, "args": {"tp_size": 8}},
        {**LOGIN_NODE, "args": {"tp_size": 8}, "machine_named": True},
        ("8 ranks", "--gpu h200"),
    ),
}

VERSIONS: dict[str, Example] = {
    "sglang-version": Example(
        {"versions": {"sglang": "0.5.1"}}, {"versions": {"sglang": SUPPORTED[0]}}, ("0.5.1",)
    ),
    "torch-version": Example(
        {"versions": {"torch": "2.13.0"}, "pins": PINS, **NVIDIA},
        {"versions": {"torch": "2.14.0"}, "pins": PINS, **NVIDIA},
        ("2.13.0", "2.14.1"),
    ),
    "cuda-of-kernels": Example(
        {"torch_cuda": "12.9", "pins": PINS, **NVIDIA},
        {"torch_cuda": "13.0", "pins": PINS, **NVIDIA},
        ("12.9", "13"),
    ),
    "driver-version": Example(
        {"torch_cuda": "13.0", "driver_cuda": "12.8"},
        {"torch_cuda": "13.1", "driver_cuda": "13.0"},
        ("12.8", "13.0"),
    ),
    "kernel-packages": Example(
        {"versions": {**RIGHT, "sglang-kernel": "0.4.9"}, "pins": PINS, **NVIDIA},
        {
            "versions": {**RIGHT, "sglang-kernel": None},
            "pins": PINS,
            "device": "cuda",
            "modules": frozenset({"sgl_kernel"}),
        },
        ("sglang-kernel is 0.4.9", "==0.4.10"),
    ),
    "deepep-version": Example(
        {
            "versions": {"sgl-deep-ep": "0.1.1"},
            "pins": {"sgl-deep-ep": "==0.1.2.post1"},
            "args": {"moe_a2a_backend": "deepep"},
        },
        {
            "versions": {"sgl-deep-ep": "0.1.2.post1"},
            "pins": {"sgl-deep-ep": "==0.1.2.post1"},
            "args": {"moe_a2a_backend": "deepep"},
        },
        ("sgl-deep-ep 0.1.1", "==0.1.2.post1"),
    ),
    "other-pins": Example(
        {"versions": {**RIGHT, "xgrammar": "0.2.6"}, "pins": PINS, **NVIDIA},
        {"versions": {**RIGHT, "sglang-kernel": "0.4.9"}, "pins": PINS, **NVIDIA},
        ("xgrammar is 0.2.6",),
    ),
    "same-module": Example(
        {"versions": {"sglang-kernel": "0.4.10", "sgl-kernel": "0.3.0"}},
        {"versions": {"sglang-kernel": "0.4.10", "sgl-kernel": None}},
        ("sgl_kernel",),
    ),
    "flashinfer-parts": Example(
        {"versions": {"flashinfer-python": "0.7.2", "flashinfer-cubin": "0.7.1"}},
        {"versions": {"flashinfer-python": "0.7.2", "flashinfer-cubin": "0.7.2"}},
        ("flashinfer-cubin 0.7.1",),
    ),
    "flashinfer-fusion-accuracy": Example(
        {
            "versions": {"flashinfer-python": "0.6.14"},
            "args": {"flashinfer_allreduce_fusion_backend": "auto"},
        },
        {
            "versions": {"flashinfer-python": "0.6.15"},
            "args": {"flashinfer_allreduce_fusion_backend": "auto"},
        },
        ("0.6.14",),
    ),
    "transformers-without-glm": Example(
        {"versions": {"transformers": "5.1.0"}, "pins": PINS},
        {"versions": {"transformers": "5.2.0"}, "pins": PINS},
        ("5.1.0",),
    ),
    "transformers-half-split-indexer": Example(
        {"versions": {"transformers": "5.12.1"}, "pins": PINS},
        {"versions": {"transformers": "5.13.0"}, "pins": PINS},
        ("5.12.1",),
    ),
}

LOADING: dict[str, Example] = {
    "plugin-left-out": Example(
        {"environment": {"SGLANG_PLUGINS": "smg-zmq"}},
        {"environment": {"SGLANG_PLUGINS": "smg-zmq, glm53"}},
        ("SGLANG_PLUGINS=smg-zmq",),
    ),
    "plugin-unknown": Example(
        {"environment": {"SGLANG_PLUGINS": "glm5"}, "entry_points": OURS},
        {"environment": {"SGLANG_PLUGINS": "glm53"}, "entry_points": OURS},
        ("glm5", "glm53 is meant"),
    ),
    "plugin-switched-off": Example(
        {"environment": {"SGLANG_PLUGINS": "glm53"}, "entry_points": (*OURS, OTHER)},
        {"environment": {}, "entry_points": (*OURS, OTHER)},
        ("smg-zmq",),
    ),
    "plugin-not-installed": Example(
        {"entry_points": OURS[:1]}, {"entry_points": OURS}, ("sglang.srt.platforms",)
    ),
    "plugin-broken": Example(
        {"entry_points": (*OURS, replace(OTHER, problem="there is no module smg"))},
        {"entry_points": (*OURS, OTHER)},
        ("no module smg",),
    ),
    "plugin-contested": Example(
        {"contested": ("other (pkg): GlmMoeDsaForCausalLM",)}, {"contested": ()}, ("other (pkg)",)
    ),
    "plugin-external-models": Example(
        {"environment": {"SGLANG_EXTERNAL_MODEL_PACKAGE": "atom.models"}},
        {"environment": {}},
        ("atom.models",),
    ),
    "catalog-drift": Example(
        {"catalog_problems": ("sglang.x:f: symbol is missing",)},
        {"catalog_problems": ()},
        ("1 of",),
    ),
    "our-variables": Example(
        {"environment": {"GLM53_STRIKT": "1"}},
        {"environment": {"GLM53_STRICT": "1"}},
        ("GLM53_STRIKT",),
    ),
    "sglang-variables": Example(
        {
            "environment": {"SGLANG_DSA_FUSED_TOPK": "0"},
            "variables": frozenset({"SGLANG_DSA_FUSE_TOPK"}),
        },
        {
            "environment": {"SGLANG_DSA_FUSE_TOPK": "0"},
            "variables": frozenset({"SGLANG_DSA_FUSE_TOPK"}),
        },
        ("SGLANG_DSA_FUSED_TOPK",),
    ),
    "other-architecture": Example(
        {"raw_config": {"architectures": ["Glm5NextForConditionalGeneration"]}},
        {"raw_config": {"architectures": ["GlmMoeDsaForCausalLM"]}},
        ("Glm5Next",),
    ),
}

CONFIGS: dict[str, Example] = {
    "config-garbage": Example(
        {"raw_config": {**CONFIG, "indexer_rope_interleave": False}},
        {"raw_config": CONFIG},
        ("indexer_rope_interleave",),
    ),
    "config-definition-missing": Example(
        {"raw_config": without(CONFIG, "scoring_func")}, {"raw_config": CONFIG}, ("scoring_func",)
    ),
    "config-indexer-layout": Example(
        {
            "raw_config": without(CONFIG, "indexer_rope_interleave"),
            "args": {"enable_lora": True},
            "environment": {},
        },
        {
            "raw_config": without(CONFIG, "indexer_rope_interleave"),
            "args": {"enable_lora": False},
            "environment": {},
        },
        ("LoRA",),
    ),
    "config-override-ignored": Example(
        {"argv": ("--json-model-override-args", '{"index_topk_freq": 4}')},
        {"argv": ("--json-model-override-args", '{"index_topk_freq": 4, "indexer_types": null}')},
        ("index_topk_freq",),
    ),
    "tokenizer-class": Example(
        {
            "tokenizer_config": {"tokenizer_class": "TokenizersBackend"},
            "versions": {"transformers": "4.57.0"},
        },
        {
            "tokenizer_config": {"tokenizer_class": "TokenizersBackend"},
            "versions": {"transformers": "5.0.0"},
        },
        ("4.57.0",),
    ),
    "tokenizer-missing": Example(
        {"checkpoint": HERE, "raw_config": CONFIG},
        {
            "checkpoint": HERE,
            "raw_config": CONFIG,
            "given": frozenset({"tokenizer_path"}),
        },
    ),
    "tokenizer-beyond-vocabulary": Example(
        {
            "tokenizer_config": {"added_tokens_decoder": {"154880": {"content": "<|x|>"}}},
            "raw_config": CONFIG,
        },
        {
            "tokenizer_config": {"added_tokens_decoder": {"154879": {"content": "<|x|>"}}},
            "raw_config": CONFIG,
        },
        ("<|x|>", "154880"),
    ),
    "turn-does-not-end": Example(
        {
            "tokenizer_config": {"added_tokens_decoder": TOKENS},
            "raw_config": {"eos_token_id": 10},
        },
        {
            "tokenizer_config": {"added_tokens_decoder": TOKENS},
            "raw_config": {"eos_token_id": [10]},
            "generation_config": {"eos_token_id": [11]},
        },
        ("<|observation|>",),
    ),
    "integer-shared-expert": Example(
        {"raw_config": {"quantization_config": {"quant_method": "auto-round"}}, "args": {}},
        {
            "raw_config": {"quantization_config": {"quant_method": "auto-round"}},
            "args": {"disable_shared_experts_fusion": True},
        },
        ("auto-round",),
    ),
}

FLAGS: dict[str, Example] = {
    "flags-unknown": Example(
        {
            "argv": ("--cuda-graph-max-bs", "16"),
            "flag_names": frozenset({"--cuda-graph-max-bs-decode", "--cuda-graph-max-bs-prefill"}),
        },
        {"argv": ("--tp", "8"), "flag_names": frozenset({"--tp-size", "--dp-size"})},
        ("--cuda-graph-max-bs",),
    ),
    "flags-refused": Example(
        {"args_problem": "two-batch overlap is not supported"},
        {"args_problem": ""},
        ("two-batch",),
    ),
    "flags-deprecated": Example(
        {"argv": ("--dp", "8", "--enable-dp-attention")},
        {"argv": ("--attn-dp-size", "8")},
        ("--enable-dp-attention",),
    ),
    "flags-replaced": Example(
        {
            "argv": ("--hicache-mem-layout", "layer_first"),
            "args": {"hicache_mem_layout": "page_first"},
            "given": frozenset({"hicache_mem_layout"}),
        },
        {
            "argv": ("--kv-cache-dtype", "bf16"),
            "args": {"kv_cache_dtype": "bfloat16"},
            "given": frozenset({"kv_cache_dtype"}),
        },
        ("layer_first became page_first",),
    ),
    "mtp-draft-path": Example(
        {"argv": ("--speculative-draft-model-path", "x"), "args": EAGLE},
        {"argv": (), "args": EAGLE},
        ("x",),
    ),
}

SERVED_BY_OURS = {
    **HOPPER,
    "raw_config": CONFIG,
    "versions": {"sglang": GPU_TESTED[-1]},
    "environment": {},
}
FEATURES: dict[str, Example] = {
    "feature-refused": Example(
        {"args": {"device": "cuda", "enable_deterministic_inference": True}, "raw_config": CONFIG},
        {"args": {"device": "cuda"}, "raw_config": CONFIG},
        ("deterministic",),
    ),
    "feature-stands-down": Example(
        {"args": {"device": "cuda", "enable_two_batch_overlap": True}, "raw_config": CONFIG},
        {
            "args": {"device": "cuda", "tp_size": 8},
            "raw_config": CONFIG,
            "versions": {"sglang": GPU_TESTED[-1]},
        },
        ("batch overlap",),
    ),
    "several-gpus-unmeasured": Example(
        {**SERVED_BY_OURS, "args": {"device": "cuda", "tp_size": 8}},
        {**SERVED_BY_OURS, "args": {"device": "cuda", "tp_size": 1}},
        ("8 GPUs", "GLM53_SERVE=stock"),
    ),
}

RANKS: dict[str, Example] = {
    "ranks-uneven": Example(
        {"args": {"tp_size": 5}, "raw_config": CONFIG},
        {"args": {"tp_size": 8}, "raw_config": CONFIG},
        ("num_attention_heads",),
    ),
    "ranks-without-gpus": Example(
        {"args": {"tp_size": 8, "dp_size": 2}, "gpus": 8},
        {"args": {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, "gpus": 8},
        ("2 copies", "16 GPUs"),
    ),
    "nodes-without-address": Example(
        {"args": {"nnodes": 2}}, {"args": {"nnodes": 2, "dist_init_addr": "h:1"}}, ("--nnodes 2",)
    ),
    "mtp-with-uneven-groups": Example(
        {"args": {**EAGLE, "tp_size": 16, "attn_dp_size": 2, "nnodes": 2}},
        {"args": {**EAGLE, "tp_size": 16, "attn_dp_size": 16, "nnodes": 2}},
        ("2 attention groups of 16",),
    ),
    "prefill-cp-limits": Example(
        {"args": {"enable_prefill_cp": True, "tp_size": 16}},
        {"args": {"enable_prefill_cp": True, "tp_size": 8}},
        ("--tp-size is 16",),
    ),
    "prefill-cp-untested-gpu": Example(
        {"args": {"enable_prefill_cp": True}, "capability": (10, 0)},
        {"args": {"enable_prefill_cp": True}, "capability": (9, 0)},
    ),
    "decode-cp-limits": Example(
        {"args": {"dcp_size": 2, "enable_hierarchical_cache": True}},
        {"args": {"dcp_size": 2, "speculative_eagle_topk": 1}},
        ("--enable-hierarchical-cache",),
    ),
    "two-batch-overlap": Example(
        {"args": {"enable_two_batch_overlap": True}, "raw_config": SMALL},
        {
            "args": {"enable_two_batch_overlap": True},
            "raw_config": {**SMALL, "indexer_types": ["full", "full"]},
        },
    ),
    "small-prefill-chunks": Example(
        {"args": {"attn_dp_size": 8, "chunked_prefill_size": 1024}},
        {"args": {"attn_dp_size": 8, "chunked_prefill_size": 4096}},
        ("1024", "8 attention groups"),
    ),
}

COLLECTIVES: dict[str, Example] = {
    "allreduce-fusion-off": Example(
        {"args": {"tp_size": 16, "nnodes": 2}, **HOPPER},
        {"args": {"tp_size": 8, "nnodes": 1}, **HOPPER},
        ("Blackwell alone",),
    ),
    "allreduce-fusion-multicast": Example(
        {
            "args": {"tp_size": 2, "flashinfer_allreduce_fusion_backend": "auto"},
            "gpu_name": "NVIDIA H200 NVL",
            **HOPPER,
        },
        {
            "args": {"tp_size": 2, "flashinfer_allreduce_fusion_backend": "auto"},
            "gpu_name": "NVIDIA H200",
            **HOPPER,
        },
        ("H200 NVL",),
    ),
    "deepep-single-rank": Example(
        {"args": {"moe_a2a_backend": "deepep", "tp_size": 1}},
        {"args": {"moe_a2a_backend": "deepep", "tp_size": 2}},
    ),
    "module-missing": Example(
        {"args": {"moe_a2a_backend": "deepep"}, "modules": frozenset()},
        {"args": {"moe_a2a_backend": "deepep"}, "modules": frozenset({"deep_ep"})},
        ("deep_ep",),
    ),
    "deepgemm-not-compiled": Example(
        {"environment": {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}, "args": {}},
        {"environment": {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "1"}, "args": {}},
    ),
}

FP8_TRTLLM = {"kv_cache_dtype": "fp8_e4m3", "dsa_decode_backend": "trtllm"}
FP8_FLASHMLA = {"kv_cache_dtype": "fp8_e4m3", "dsa_decode_backend": "flashmla_kv"}
CACHE: dict[str, Example] = {
    "kv-requantised": Example(
        {"args": {"kv_cache_dtype": "bfloat16", "dsa_decode_backend": "flashmla_kv"}},
        {"args": {"kv_cache_dtype": "fp8_e4m3", "dsa_decode_backend": "flashmla_kv"}},
        ("--dsa-decode-backend",),
    ),
    "kv-dequantised": Example(
        {"args": {"kv_cache_dtype": "fp8_e4m3", "dsa_prefill_backend": "flashmla_sparse"}},
        {"args": {"kv_cache_dtype": "bfloat16", "dsa_prefill_backend": "flashmla_sparse"}},
    ),
    "kv-padded-heads": Example(
        {
            "args": {"tp_size": 8, **FP8_FLASHMLA},
            "raw_config": CONFIG,
            **HOPPER,
        },
        {
            "args": {"tp_size": 8, "attn_dp_size": 8, **FP8_FLASHMLA},
            "raw_config": CONFIG,
            **HOPPER,
        },
        ("a rank has 8",),
    ),
    "kv-without-scales": Example(
        {"args": FP8_TRTLLM, "raw_config": {}},
        {
            "args": FP8_TRTLLM,
            "raw_config": {"quantization_config": {"kv_cache_quant_algo": "FP8"}},
        },
        ("trtllm",),
    ),
    "kv-mixed-layouts": Example(
        {
            "args": {
                "kv_cache_dtype": "fp8_e4m3",
                "dsa_prefill_backend": "tilelang",
                "dsa_decode_backend": "flashmla_kv",
            }
        },
        {
            "args": {
                "kv_cache_dtype": "fp8_e4m3",
                "dsa_prefill_backend": "tilelang",
                "dsa_decode_backend": "tilelang",
            }
        },
    ),
    "kv-other-vendor": Example(
        {"args": {"dsa_decode_backend": "triton"}, "device": "cuda"},
        {"args": {"dsa_decode_backend": "triton"}, "device": "rocm"},
        ("AMD",),
    ),
    "kv-page-size": Example(
        {"argv": ("--page-size", "32"), "args": {"page_size": 64}},
        {"argv": ("--page-size", "64"), "args": {"page_size": 64}},
        ("32",),
    ),
    "topk-needs-unfused": Example(
        {"args": {"dsa_topk_backend": "torch"}, "environment": {}},
        {"args": {"dsa_topk_backend": "torch"}, "environment": {"SGLANG_DSA_FUSE_TOPK": "0"}},
    ),
    "topk-lossy": Example(
        {"args": {}, "environment": {"SGLANG_DSA_FUSE_TOPK": "0"}},
        {"args": {}, "environment": {}},
    ),
    "dense-threshold": Example(
        {
            "environment": {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "2049"},
            "raw_config": CONFIG,
        },
        {
            "environment": {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "2048"},
            "raw_config": CONFIG,
        },
        ("2049",),
    ),
}

SPECULATION: dict[str, Example] = {
    "mtp-without-layer": Example(
        {"args": EAGLE, "raw_config": {**CONFIG, "num_nextn_predict_layers": 0}},
        {"args": EAGLE, "raw_config": CONFIG},
    ),
    "mtp-tree": Example(
        {"args": {**EAGLE, "speculative_eagle_topk": 2}, "raw_config": CONFIG},
        {"args": {**EAGLE, "speculative_eagle_topk": 1}, "raw_config": CONFIG},
        ("index_share_for_mtp_iteration",),
    ),
    "mtp-half-given": Example(
        {"argv": ("--speculative-eagle-topk", "1"), "args": EAGLE},
        {
            "argv": ("--speculative-eagle-topk", "1", "--speculative-num-steps", "5"),
            "args": EAGLE,
        },
        ("--speculative-eagle-topk",),
    ),
    "mtp-default-steps": Example(
        {"args": {**EAGLE, "speculative_num_steps": 3}, "given": frozenset()},
        {
            "args": {**EAGLE, "speculative_num_steps": 3},
            "given": frozenset({"speculative_num_steps"}),
        },
        ("3-1-4",),
    ),
    "mtp-tokens-adjusted": Example(
        {
            "argv": ("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "3"),
            "args": EAGLE,
        },
        {
            "argv": ("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4"),
            "args": EAGLE,
        },
        ("replaced by 4",),
    ),
    "mtp-few-requests": Example(
        {
            "args": {**EAGLE, "max_running_requests": 48, "attn_dp_size": 8},
            "given": frozenset(),
        },
        {
            "args": {**EAGLE, "max_running_requests": 48, "attn_dp_size": 8},
            "given": frozenset({"max_running_requests"}),
        },
        ("6 for each of 8",),
    ),
    "mtp-deep-with-groups": Example(
        {"args": {**EAGLE, "attn_dp_size": 8, "speculative_num_steps": 5}},
        {"args": {**EAGLE, "attn_dp_size": 8, "speculative_num_steps": 1}},
        ("6 rows",),
    ),
    "mtp-mixed-chunks": Example(
        {"args": {**EAGLE, "enable_mixed_chunk": True}}, {"args": {"enable_mixed_chunk": True}}
    ),
    "mtp-simulated": Example(
        {"environment": {"SGLANG_SIMULATE_ACC_LEN": "3.5"}},
        {"environment": {"SGLANG_SIMULATE_ACC_LEN": "-1"}},
        ("3.5",),
    ),
}

TIERS: dict[str, Example] = {
    "hicache-draft-copy": Example(
        {
            "args": {
                **EAGLE,
                "enable_hierarchical_cache": True,
                "kv_cache_dtype": "fp8_e4m3",
                "speculative_draft_kv_cache_dtype": "bfloat16",
            }
        },
        {"args": {**EAGLE, "enable_hierarchical_cache": True, "kv_cache_dtype": "fp8_e4m3"}},
        ("draft's cache is bfloat16", "target's is fp8_e4m3"),
    ),
    "hicache-storage-draft": Example(
        {"args": {**EAGLE, "hicache_storage_backend": "mooncake"}}, {"args": EAGLE}, ("mooncake",)
    ),
    "hicache-storage-crash": Example(
        {"args": {"hicache_storage_backend": "file"}}, {"args": {}}, ("file",)
    ),
}

CHATS: dict[str, Example] = {
    "chat-template-missing": Example(
        {"checkpoint": HERE, "raw_config": CONFIG},
        {"checkpoint": HERE, "raw_config": CONFIG, "chat_template": TEMPLATE},
    ),
    "chat-template-unknown": Example(
        {
            "args": {"reasoning_parser": "glm45"},
            "chat_template": TEMPLATE.replace("Reasoning Effort:", "Effort:"),
            "environment": {"GLM53_PARSERS": "stock"},
        },
        {
            "args": {"reasoning_parser": "glm45"},
            "chat_template": TEMPLATE.replace("Reasoning Effort:", "Effort:"),
            "environment": {},
        },
        ("Reasoning Effort:",),
    ),
    "tool-call-parser": Example(
        {"args": {"tool_call_parser": "glm45"}}, {"args": {"tool_call_parser": "glm47"}}, ("glm45",)
    ),
    "reasoning-parser": Example({"args": {}}, {"args": {"reasoning_parser": "glm45"}}, ("not",)),
    "reasoning-parser-name": Example(
        {"args": {"reasoning_parser": "glm47"}}, {"args": {"reasoning_parser": "glm45"}}
    ),
    "thinking-cannot-be-switched-off": Example(
        {
            "args": {"default_chat_template_kwargs": {"enable_thinking": False}},
            "chat_template": TEMPLATE,
        },
        {
            "args": {"default_chat_template_kwargs": {"reasoning_effort": "low"}},
            "chat_template": TEMPLATE,
        },
        ("enable_thinking",),
    ),
}

GATE = "model.layers.1.mlp.experts.0.down_proj.weight"
CHECKPOINTS: dict[str, Example] = {
    "checkpoint-files": Example(
        {"headers": Headers({}, problems=("a.safetensors: truncated",))},
        {"headers": Headers({})},
        ("a.safetensors",),
    ),
    "checkpoint-twice": Example(
        {
            "headers": Headers(
                {"lm_head.weight": Tensor("BF16", (1,), "b")},
                twice=("lm_head.weight",),
                also={"lm_head.weight": "a"},
            )
        },
        {"headers": Headers({})},
        ("lm_head.weight of b",),
    ),
    "checkpoint-index": Example(
        {"headers": Headers({"a": Tensor("BF16", (1,), "f")}, promised={"a": "g"})},
        {"headers": Headers({"a": Tensor("BF16", (1,), "f")}, promised={"a": "f"})},
        ("first a of f",),
    ),
    "checkpoint-stray-files": Example(
        {"headers": Headers({}, strays=("old.safetensors",))},
        {"headers": Headers({})},
        ("old.safetensors",),
    ),
    "checkpoint-quantisation": Example(
        {
            "headers": tensors(),
            "raw_config": {
                **SMALL,
                "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
            },
        },
        WHOLE,
        ("no matrix is F8_E4M3",),
    ),
    "checkpoint-missing": Example(
        checkpoint(tensors(**{WK: None})), WHOLE, ("1 tensors", WK, "layers 0")
    ),
    "checkpoint-mtp-missing": Example(
        checkpoint(Headers({n: t for n, t in tensors().tensors.items() if ".layers.2." not in n})),
        WHOLE,
        ("layer 2",),
    ),
    "checkpoint-shared-indexer": Example(
        checkpoint(tensors(**{WK.replace(".0.", ".1."): Tensor("BF16", (128, 6144), "f")})),
        WHOLE,
        ("first layer 1",),
    ),
    "checkpoint-unknown": Example(
        checkpoint(tensors(**{"model.strange.weight": Tensor("BF16", (1,), "f")})),
        checkpoint(tensors(**{"model.layers.0.rotary_emb.inv_freq": Tensor("F32", (32,), "f")})),
        ("model.strange.weight",),
    ),
    "checkpoint-shape": Example(
        checkpoint(tensors(**{WK: Tensor("BF16", (64, 6144), "f")})), WHOLE, ("[64, 6144]", WK)
    ),
    "checkpoint-scales": Example(
        checkpoint(tensors(**{WK: Tensor("F8_E4M3", (128, 6144), "f")})),
        checkpoint(
            tensors(
                **{
                    WK: Tensor("F8_E4M3", (128, 6144), "f"),
                    WK + SCALE_SUFFIX: Tensor("F32", (1, 48), "f"),
                }
            )
        ),
        (WK,),
    ),
    "checkpoint-precision": Example(
        checkpoint(tensors(**{"model.norm.weight": Tensor("F8_E4M3", (6144,), "f")})),
        WHOLE,
        ("model.norm.weight",),
    ),
    "checkpoint-dtype": Example(
        checkpoint(tensors(**{GATE: Tensor("I16", (6144, 2048), "f")})), WHOLE, ("I16",)
    ),
    "checkpoint-shared-expert-dtype": Example(
        checkpoint(tensors(**{GATE: Tensor("F8_E4M3", (6144, 2048), "f")})), WHOLE, ("layer 1",)
    ),
}

EXAMPLES: dict[str, Example] = {
    **QUESTIONS,
    **VERSIONS,
    **LOADING,
    **CONFIGS,
    **FLAGS,
    **FEATURES,
    **RANKS,
    **COLLECTIVES,
    **CACHE,
    **SPECULATION,
    **TIERS,
    **CHATS,
    **CHECKPOINTS,
}
