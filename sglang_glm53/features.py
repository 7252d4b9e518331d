"""The table of features: what of SGLang runs with our classes, stands down, or is refused; and why.

One row a feature. `asked` reads the server's resolved arguments by the names of their ServerArgs
fields (one that the installed SGLang does not have reads as None), the checkpoint's config, the
device and the environment. A row says "runs" only where a test of ours runs it. What is done with
a row is in support.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_glm53.compat.versions import GPU_TESTED
from sglang_glm53.errors import Glm53Error
from sglang_glm53.memory import mode

RUNS, STANDS_DOWN, REFUSED = "runs", "stands down", "refused"

# The reason of a row that GLM53_SERVE=ours lifts: nothing is known to be wrong with it.
UNTESTED = "not tested with our classes"

SERVE_VARIABLE = "GLM53_SERVE"
STOCK_ON_PURPOSE = "GLM53_SERVE=stock"
HOPPER = (9, 0)


@dataclass(frozen=True)
class Situation:
    """What the table's predicates read.

    Attributes:
        read: the effective value of a server argument, by the name of its ServerArgs field.
        config: the checkpoint's config (`hf_config`).
        device: "cpu", "cuda" (NVIDIA and AMD), or another of PyTorch's names.
        dtype: served dtype, e.g. "torch.bfloat16".
        capability: compute capability of the NVIDIA GPU, (9, 0) on Hopper; None elsewhere.
        rocm: whether this is a ROCm build of PyTorch.
        sglang: SGLang's version.
    """

    read: Callable[[str], Any]
    config: Any
    device: str
    dtype: str
    capability: tuple[int, int] | None = None
    rocm: bool = False
    sglang: str | None = None

    def get(self, name: str, default: Any = None) -> Any:
        value = self.read(name)
        return default if value is None else value


@dataclass(frozen=True)
class Feature:
    """One row: where `asked(situation)` is true, `decision` holds for `reason`; `advice` is what
    the user can do."""

    name: str
    asked: Callable[[Situation], bool]
    decision: str
    reason: str
    advice: str


def serve_wish() -> str:
    """The value of GLM53_SERVE: "", "ours" or "stock".

    Raises:
        Glm53Error: it has a value that means nothing.
    """
    value = os.environ.get(SERVE_VARIABLE, "")
    if value not in ("", "ours", "stock"):
        raise Glm53Error(f'{SERVE_VARIABLE} is "{value}"; it can be "ours" or "stock"')
    return value


# --- predicates ------------------------------------------------------------------------------

Predicate = Callable[[Situation], bool]


def _on_cpu(s: Situation) -> bool:
    return s.device == "cpu"


def _torch_attention(s: Situation) -> bool:
    """Whether the plain-torch attention would serve."""
    return _on_cpu(s) or os.environ.get("GLM53_ATTENTION") == "torch"


def _any(*names: str) -> Predicate:
    """Any of these arguments is set to something true."""
    return lambda s: any([bool(s.get(name)) for name in names])


def _above_one(*names: str) -> Predicate:
    """Any of these sizes is above 1."""
    return lambda s: any([s.get(name, 1) > 1 for name in names])


def _beyond(names: tuple[str, ...], *known: Any) -> Predicate:
    """Any of these arguments has a value that is none of `known` (unset is known)."""
    return lambda s: any([s.get(name) not in (None, *known) for name in names])


def _either(*predicates: Predicate) -> Predicate:
    return lambda s: any([predicate(s) for predicate in predicates])


def _with_kernels(predicate: Predicate) -> Predicate:
    """The same, where our classes would run on a GPU's kernels."""
    return lambda s: not _torch_attention(s) and predicate(s)


def _without_a_gpu(predicate: Predicate) -> Predicate:
    return lambda s: _on_cpu(s) and predicate(s)


def _other_gpu(s: Situation) -> bool:
    return s.device != "cuda" or s.rocm or s.capability not in (None, HOPPER)


def _quant_method(s: Situation) -> str | None:
    """The checkpoint's quantization method, as its config names it."""
    declared = getattr(s.config, "quantization_config", None) or {}
    return declared.get("quant_method") if isinstance(declared, dict) else None


def _other_quantization(s: Situation) -> bool:
    return _quant_method(s) not in (None, "fp8") or _beyond(("quantization",), "fp8")(s)


def _other_fp8_blocks(s: Situation) -> bool:
    declared = getattr(s.config, "quantization_config", None) or {}
    if _quant_method(s) != "fp8":
        return s.get("quantization") == "fp8"  # quantised while it is loaded
    return list(declared.get("weight_block_size") or ()) != [128, 128]


def _graph_backend(s: Situation, phase: str) -> str | None:
    """The CUDA graph backend of a phase ("prefill", "decode"), by SGLang's name."""
    graphs = s.get("cuda_graph_config")
    settings = graphs.get(phase) if isinstance(graphs, dict) else getattr(graphs, phase, None)
    return settings.get("backend") if isinstance(settings, dict) else _backend_of(settings)


def _backend_of(settings: Any) -> str | None:
    return getattr(settings, "backend", None)


def _other_graphs(s: Situation) -> bool:
    return _graph_backend(s, "prefill") not in (None, "disabled", "breakable") or _graph_backend(
        s, "decode"
    ) not in (None, "disabled", "full")


def _other_draft(s: Situation) -> bool:
    """Whether something else than the checkpoint's own MTP layer, as the target serves, drafts."""
    draft, cache = s.get("speculative_draft_model_path"), s.get("speculative_draft_kv_cache_dtype")
    asked = [
        _any("enable_multi_layer_eagle", "speculative_adaptive", "speculative_token_map")(s),
        _beyond(("decoupled_spec_role",), "null")(s),
        _beyond(("speculative_draft_load_format",), s.get("load_format", "auto"), "auto")(s),
        draft is not None and draft != s.get("model_path"),
        cache is not None and cache != s.get("kv_cache_dtype", "auto"),
        s.get("speculative_draft_model_quantization") not in (None, s.get("quantization"), "fp8"),
    ]
    return s.get("speculative_algorithm") is not None and any(asked)


def _switched_on(name: str) -> Predicate:
    """A variable of SGLang's is set to true, as SGLang reads it."""
    return lambda s: os.environ.get(name, "").lower() in ("true", "1", "yes", "y")


def _switched_off(name: str) -> Predicate:
    return lambda s: os.environ.get(name, "").lower() in ("false", "0", "no", "n")


_ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_DRAFT_ATTENTION = "speculative_draft_attention_backend"
_OTHER_ALGORITHM = _beyond(("speculative_algorithm",), "EAGLE", "NEXTN")
_TREE = _above_one("speculative_eagle_topk")

_CPU_ADVICE = "leave the option out"
_STOCK_ADVICE = "leave the option out to serve our classes"

_RUNNING = (
    Feature(
        "tensor parallelism",
        _above_one("tp_size"),
        RUNS,
        "tested with 2 ranks on a CPU",
        "--tp-size N",
    ),
    Feature(
        "attention data parallelism",
        _either(_above_one("attn_dp_size"), _any("enable_dp_attention")),
        RUNS,
        "tested with 2 ranks on a CPU",
        "--attn-dp-size N",
    ),
    Feature(
        "pipeline parallelism",
        _above_one("pp_size"),
        RUNS,
        "tested with 2 ranks on a CPU",
        "--pp-size N",
    ),
    Feature(
        "expert parallelism",
        _above_one("ep_size"),
        RUNS,
        "tested with 2 ranks on a CPU",
        "--ep-size N",
    ),
    Feature(
        "head split over attention ranks",
        _any("enable_dp_lm_head"),
        RUNS,
        "tested with 2 ranks on a CPU",
        "--enable-dp-lm-head",
    ),
    Feature(
        "mixed chunks",
        _any("enable_mixed_chunk"),
        RUNS,
        "prefill and decode in one pass; tested on a CPU",
        "--enable-mixed-chunk",
    ),
    Feature(
        "MTP speculation",
        lambda s: s.get("speculative_algorithm") in ("EAGLE", "NEXTN"),
        RUNS,
        "the checkpoint's MTP layer drafts a chain of tokens",
        "--speculative-algorithm EAGLE --speculative-num-steps N --speculative-eagle-topk 1",
    ),
    Feature(
        "FP8 checkpoint",
        lambda s: _quant_method(s) == "fp8",
        RUNS,
        "on a CPU the blocks of 128 x 128 are dequantised while they are loaded",
        "--dtype bfloat16",
    ),
    Feature(
        "indexer selections in the answer",
        _any("enable_return_indexer_topk"),
        RUNS,
        "positions inside the request",
        "--enable-return-indexer-topk",
    ),
    Feature(
        "routed experts in the answer",
        _any("enable_return_routed_experts"),
        RUNS,
        "of every layer; tested on a CPU",
        "--enable-return-routed-experts",
    ),
    Feature(
        "hidden states in the answer",
        _any("enable_return_hidden_states", "return_hidden_states_mode"),
        RUNS,
        "those after the final norm; tested on a CPU",
        "--enable-return-hidden-states",
    ),
)

_STANDING_DOWN = (
    Feature(
        STOCK_ON_PURPOSE,
        lambda s: serve_wish() == "stock",
        STANDS_DOWN,
        "you asked for SGLang's own class",
        f"unset {SERVE_VARIABLE} to serve our classes",
    ),
    Feature(
        "another GPU than Hopper",
        _with_kernels(_other_gpu),
        STANDS_DOWN,
        "our classes were run on NVIDIA Hopper (compute capability 9.0) alone",
        "serve on an H100, H200 or H20",
    ),
    Feature(
        "another SGLang on a GPU",
        _with_kernels(lambda s: s.sglang not in (None, *GPU_TESTED)),
        STANDS_DOWN,
        f"our classes were run on a GPU with SGLang {' and '.join(GPU_TESTED)} alone",
        f"install sglang {GPU_TESTED[-1]}",
    ),
    Feature(
        "LoRA",
        _any("enable_lora", "lora_paths"),
        STANDS_DOWN,
        "our layers take no adapters",
        _STOCK_ADVICE,
    ),
    Feature(
        "batch overlap",
        _any("enable_two_batch_overlap", "enable_single_batch_overlap"),
        STANDS_DOWN,
        "our layers run a batch as one",
        _STOCK_ADVICE,
    ),
    Feature(
        "context parallelism",
        _either(_above_one("dcp_size", "attn_cp_size"), _any("enable_prefill_cp")),
        STANDS_DOWN,
        "our attention reads the whole sequence on each rank",
        _STOCK_ADVICE,
    ),
    Feature(
        "all-to-all between experts",
        _either(
            lambda s: s.get("moe_a2a_backend") == "deepep",
            lambda s: s.get("speculative_moe_a2a_backend") == "deepep",
        ),
        STANDS_DOWN,
        UNTESTED,
        "leave the option out; --ep-size N runs without it",
    ),
    Feature(
        "another all-to-all between experts",
        _beyond(("moe_a2a_backend", "speculative_moe_a2a_backend"), "none", "deepep"),
        STANDS_DOWN,
        "our experts know DeepEP's dispatcher alone",
        "leave the option out; --ep-size N runs without it",
    ),
    Feature(
        "shared expert fused under expert parallelism",
        _with_kernels(
            lambda s: (
                bool(s.get("enforce_shared_experts_fusion"))
                and (
                    _above_one("ep_size")(s)
                    or _beyond(("moe_a2a_backend", "speculative_moe_a2a_backend"), "none")(s)
                )
            )
        ),
        STANDS_DOWN,
        "our fused shared expert would be counted once a rank",
        "leave out --enforce-shared-experts-fusion",
    ),
    Feature(
        "rebalanced experts",
        _either(
            _any("enable_eplb"),
            _with_kernels(
                _either(
                    _any("ep_num_redundant_experts", "ep_dispatch_algorithm"),
                    _beyond(("init_expert_location",), "trivial"),
                )
            ),
        ),
        STANDS_DOWN,
        UNTESTED,
        "leave the option out; --ep-size N runs without it",
    ),
    Feature(
        "hierarchical cache",
        _any("enable_hierarchical_cache"),
        STANDS_DOWN,
        UNTESTED,
        _STOCK_ADVICE,
    ),
    Feature(
        "another tier of the cache",
        _any(
            "enable_hisparse",
            "enable_lmcache",
            "enable_flexkv",
            "enable_unified_cache_external_linker",
        ),
        STANDS_DOWN,
        "our pool is not copied to another tier",
        _STOCK_ADVICE,
    ),
    Feature(
        "disaggregated prefill and decode",
        _beyond(("disaggregation_mode",), "null"),
        STANDS_DOWN,
        "our pool is not transferred between servers",
        _STOCK_ADVICE,
    ),
    Feature(
        "another quantization",
        _other_quantization,
        STANDS_DOWN,
        "our loader reads BF16 and FP8 in blocks of 128 x 128",
        "serve the BF16 or the FP8 checkpoint",
    ),
    Feature(
        "another FP8 scheme",
        _other_fp8_blocks,
        STANDS_DOWN,
        "our loader reads FP8 in blocks of 128 x 128, as the checkpoint declares them",
        "serve BF16 without --quantization, or FP8 with weight_block_size [128, 128]",
    ),
)

# What only a server on a GPU can be asked for, or is asked for without effect on a CPU.
_STANDING_DOWN_ON_A_GPU = (
    Feature(
        "another attention backend on a GPU",
        _with_kernels(_beyond((*_ATTENTION, _DRAFT_ATTENTION), "dsa", "nsa")),
        STANDS_DOWN,
        "SGLang's dsa backend alone attends to what the indexer selects",
        _STOCK_ADVICE,
    ),
    Feature(
        "another sparse attention kernel",
        _with_kernels(
            _beyond(
                ("dsa_prefill_backend", "dsa_decode_backend"),
                "flashmla_sparse",
                "flashmla_sparse_q8",
                "flashmla_kv",
                "flashmla_auto",
                "fa3",
            )
        ),
        STANDS_DOWN,
        UNTESTED,
        "use flashmla_sparse, flashmla_kv or fa3",
    ),
    Feature(
        "another indexer kernel",
        _with_kernels(
            _either(
                _beyond(("dsa_topk_backend", "speculative_dsa_topk_backend"), "sgl-kernel"),
                _beyond(("dsa_paged_mqa_logits_backend",), "auto", "deepgemm"),
            )
        ),
        STANDS_DOWN,
        UNTESTED,
        _STOCK_ADVICE,
    ),
    Feature(
        "another cache layout",
        _with_kernels(
            _either(
                _any(
                    "enable_kv_cache_sharding",
                    "enable_dsa_cache_layer_split",
                    "enable_unified_memory",
                    "enable_page_major_kv_layout",
                    "radix_cache_backend",
                ),
                _beyond(("kv_canary",), "none"),
            )
        ),
        STANDS_DOWN,
        "our pool keeps one layout, whole on each rank",
        _STOCK_ADVICE,
    ),
    Feature(
        "another CUDA graph backend",
        _with_kernels(_other_graphs),
        STANDS_DOWN,
        "our layers are captured as breakable prefill graphs and full decode graphs",
        "use --cuda-graph-backend-prefill breakable or disabled, and full or disabled for decode",
    ),
    Feature(
        "compiled model on a GPU",
        _with_kernels(_any("enable_torch_compile")),
        STANDS_DOWN,
        UNTESTED,
        _STOCK_ADVICE,
    ),
    Feature(
        "another model kernel",
        _with_kernels(_any("enable_nvidia_megakernel", "enable_amd_monokernel")),
        STANDS_DOWN,
        "it replaces the forward pass of SGLang's own class",
        _STOCK_ADVICE,
    ),
    Feature(
        "split prefill",
        _with_kernels(_any("enable_pdmux")),
        STANDS_DOWN,
        "our model runs all its layers in one call",
        _STOCK_ADVICE,
    ),
    Feature(
        "TF32 products",
        _with_kernels(_any("enable_tf32_matmul")),
        STANDS_DOWN,
        UNTESTED,
        _STOCK_ADVICE,
    ),
    Feature(
        "another MoE kernel",
        _with_kernels(
            _beyond(
                ("moe_runner_backend", "speculative_moe_runner_backend"),
                "auto",
                "triton",
                "deep_gemm",
            )
        ),
        STANDS_DOWN,
        UNTESTED,
        "use --moe-runner-backend auto, triton or deep_gemm",
    ),
    Feature(
        "another placement of experts",
        _with_kernels(
            _either(
                _above_one("moe_dp_size", "dwdp_size"),
                _any("enable_elastic_expert_backup", "ep_join_mode", "max_ep_size"),
                _any("enable_paged_experts", "kt_weight_path", "enable_waterfill"),
                _beyond(("elastic_ep_backend",), "none"),
            )
        ),
        STANDS_DOWN,
        UNTESTED,
        _STOCK_ADVICE,
    ),
    Feature(
        "another split of the shared expert or the dense layers",
        _with_kernels(
            _any(
                "enable_shared_experts_attn_tp",
                "shared_experts_tp_size",
                "enable_dense_mlp_attn_tp",
                "enable_attn_tp_input_scattered",
                "enable_fused_moe_sum_all_reduce",
            )
        ),
        STANDS_DOWN,
        UNTESTED,
        _STOCK_ADVICE,
    ),
    Feature(
        "another speculative algorithm on a GPU",
        _with_kernels(_OTHER_ALGORITHM),
        STANDS_DOWN,
        UNTESTED,
        "use --speculative-algorithm EAGLE, which drafts with the checkpoint's MTP layer",
    ),
    Feature(
        "tree of drafts on a GPU",
        _with_kernels(_TREE),
        STANDS_DOWN,
        UNTESTED,
        "use --speculative-eagle-topk 1",
    ),
    Feature(
        "another draft",
        _with_kernels(_other_draft),
        STANDS_DOWN,
        UNTESTED,
        "let the checkpoint's MTP layer draft, with the target's cache dtype and quantization",
    ),
    Feature(
        "hidden states of inner layers",
        _with_kernels(_any("enable_return_aux_hidden_states")),
        STANDS_DOWN,
        UNTESTED,
        _STOCK_ADVICE,
    ),
    Feature(
        "CPU offload",
        _with_kernels(
            _either(_any("cpu_offload_gb"), lambda s: s.get("offload_group_size", -1) > 0)
        ),
        STANDS_DOWN,
        UNTESTED,
        _STOCK_ADVICE,
    ),
    Feature(
        "memory saver",
        _with_kernels(_any("enable_memory_saver")),
        STANDS_DOWN,
        UNTESTED,
        _STOCK_ADVICE,
    ),
    Feature(
        "another way to load weights",
        _with_kernels(
            _either(
                _beyond(("load_format",), "auto", "safetensors", "pt", "dummy"),
                _beyond(("weight_cache_mode",), "off"),
                _beyond(("startup_weight_load_mode",), "serial"),
            )
        ),
        STANDS_DOWN,
        UNTESTED,
        _STOCK_ADVICE,
    ),
    Feature(
        "hooks on modules",
        _with_kernels(_any("forward_hooks", "msprobe_dump_config")),
        STANDS_DOWN,
        "they name modules of SGLang's own class",
        _STOCK_ADVICE,
    ),
)


def _variable(name: str, asked: Predicate, reason: str) -> Feature:
    """A row for an environment variable that chooses a code path of SGLang's own forward pass."""
    advice = f"unset {name.partition('=')[0]} to serve our classes"
    return Feature(name, _with_kernels(asked), STANDS_DOWN, reason, advice)


_VARIABLES = tuple(
    _variable(name, _switched_on(name), reason)
    for name, reason in (
        ("SGLANG_USE_DEEPGEMM_BMM", "our absorbed products are bfloat16"),
        ("SGLANG_ENABLE_DSA_Q8KV8_BORN_FP8_Q", "our queries are bfloat16 up to the backend"),
        ("SGLANG_DISABLE_DSA_INDEXER_FUSION", "our indexer has one set of kernels"),
        ("SGLANG_SHARED_EXPERT_TP1", "our shared expert is split like the routed ones"),
        ("SGLANG_DP_SHARED_EXPERT_LOCAL", "our shared expert runs on the gathered rows"),
        ("SGLANG_OPT_MOE_QUANT_ONCE", "our experts quantise their own input"),
        ("SGLANG_ENABLE_PCG_DSV2_DUAL_STREAM", "our prefill graphs run on one stream"),
        ("SGLANG_DSA_TOPK_BROADCAST", UNTESTED),
        ("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", UNTESTED),
    )
) + (_variable("SGLANG_DSA_FUSE_TOPK=0", _switched_off("SGLANG_DSA_FUSE_TOPK"), UNTESTED),)

_REFUSED = (
    Feature(
        "FP8 checkpoint in float32",
        lambda s: _quant_method(s) == "fp8" and s.dtype == "torch.float32",
        REFUSED,
        "SGLang's FP8 method has no float32 activations",
        "serve it with --dtype bfloat16",
    ),
    Feature(
        "float16",
        lambda s: s.dtype == "torch.float16",
        REFUSED,
        "the model's activations leave float16's range",
        "serve it with --dtype bfloat16, or --dtype float32 on a CPU",
    ),
    Feature(
        "float32 on a GPU",
        lambda s: not _on_cpu(s) and s.dtype == "torch.float32",
        REFUSED,
        "SGLang's GPU kernels for norms take no float32",
        "serve it with --dtype bfloat16, or in float32 on a CPU",
    ),
    Feature(
        "another cache dtype",
        _with_kernels(_beyond(("kv_cache_dtype",), "auto", "bf16", "bfloat16", "fp8_e4m3")),
        REFUSED,
        "SGLang's sparse attention reads a cache in bfloat16 or fp8_e4m3",
        "use --kv-cache-dtype bfloat16 or fp8_e4m3",
    ),
    Feature(
        "deterministic inference",
        _with_kernels(_any("enable_deterministic_inference", "rl_on_policy_target")),
        REFUSED,
        "SGLang's sparse attention has no deterministic form",
        "leave the option out",
    ),
    Feature(
        "FP8 cache on a CPU",
        _without_a_gpu(lambda s: str(s.get("kv_cache_dtype", "auto")).startswith(("fp8", "mxfp8"))),
        REFUSED,
        "SGLang's CPU engine keeps no FP8 latents",
        f"{_CPU_ADVICE}: the cache is bfloat16, and exact with --dtype float32",
    ),
    Feature(
        "another attention backend",
        lambda s: _torch_attention(s) and _beyond(_ATTENTION, "torch_native")(s),
        REFUSED,
        "without our GPU kernels only torch_native selects tokens by the indexer",
        f"{_CPU_ADVICE}, or give --attention-backend torch_native",
    ),
    Feature(
        "compiled model on a CPU",
        _without_a_gpu(_any("enable_torch_compile")),
        REFUSED,
        "our reference attention is not traced by torch.compile",
        _CPU_ADVICE,
    ),
    Feature(
        "another speculative algorithm on a CPU",
        _without_a_gpu(_OTHER_ALGORITHM),
        REFUSED,
        "only the checkpoint's own MTP layer drafts there",
        "use --speculative-algorithm EAGLE",
    ),
    Feature(
        "tree of drafts on a CPU",
        _without_a_gpu(_TREE),
        REFUSED,
        "the reference attention verifies a chain",
        "use --speculative-eagle-topk 1",
    ),
)


def _page_major(obstacle: mode.Obstacle) -> Feature:
    """A row for something that a page-major pool, where it was asked for, cannot serve."""
    return Feature(
        f"{mode.VARIABLE}={mode.PAGE} with {obstacle.name}",
        lambda s: obstacle.holds(s.read, s.device) and mode.wish() == mode.PAGE,
        REFUSED,
        obstacle.reason,
        f"{obstacle.advice}, or unset {mode.VARIABLE}",
    )


_PAGE_MAJOR = tuple(_page_major(obstacle) for obstacle in mode.OBSTACLES)

# The first row that is refused, or else the first that stands down, is the one that is told.
FEATURES: tuple[Feature, ...] = (
    *_RUNNING,
    *_STANDING_DOWN,
    *_STANDING_DOWN_ON_A_GPU,
    *_VARIABLES,
    *_REFUSED,
    *_PAGE_MAJOR,
)

# Rows that SGLang would otherwise forestall with an error of its own.
SPECULATION = ("another speculative algorithm on a CPU", "tree of drafts on a CPU")
