"""Rules on the KV cache's dtype, its pages, and the kernels that read them."""

from __future__ import annotations

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.reading import hopper, local_heads, on_gpu, switched_on, written
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict

PREFILL, DECODE = "dsa_prefill_backend", "dsa_decode_backend"
BF16, FP8 = ("bfloat16", "bf16"), "fp8_e4m3"
PAGE = 64  # tokens; what SGLang's index cache and FlashMLA have
FLASHMLA_HEADS = 64  # query heads that its decode kernel is compiled for, at least
# Kernels that read 8-bit latents without scales of their own: the checkpoint must have them.
UNSCALED = ("trtllm", "tilelang")
ROCM_ONLY, CUDA_ONLY = ("triton", "aiter"), ("flashmla_kv", "flashmla_sparse", "fa3", "trtllm")
DENSE_BELOW = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
FUSED_TOPK = "SGLANG_DSA_FUSE_TOPK"


def _backends(facts: Facts) -> dict[str, str]:
    """Options and kernels of both phases, where they are known."""
    return {
        "--" + name.replace("_", "-"): value
        for name in (PREFILL, DECODE)
        if (value := facts.arg(name))
    }


def _requantised(facts: Facts) -> Verdict:
    if facts.arg("kv_cache_dtype") not in BF16:
        return None
    names = [option for option, kernel in _backends(facts).items() if kernel == "flashmla_kv"]
    return {"options": " and ".join(names)} if names else None


def _dequantised(facts: Facts) -> Verdict:
    sparse = facts.arg(PREFILL) == "flashmla_sparse"
    return sparse and facts.arg("kv_cache_dtype") == FP8


def _padded_heads(facts: Facts) -> Verdict:
    heads, fp8 = local_heads(facts), facts.arg("kv_cache_dtype") == FP8
    read = fp8 and hopper(facts) and facts.arg(DECODE) == "flashmla_kv"
    return {"heads": heads} if read and heads < FLASHMLA_HEADS else None


def _without_scales(facts: Facts) -> Verdict:
    declared = facts.raw_config.get("quantization_config") or {}
    scaled = declared.get("kv_cache_scheme") or declared.get("kv_cache_quant_algo")
    names = [kernel for kernel in _backends(facts).values() if kernel in UNSCALED]
    if facts.arg("kv_cache_dtype") != FP8 or not names or scaled:
        return None
    return None if facts.arg("quantization_param_path") else {"kernel": names[0]}


def _mixed_layouts(facts: Facts) -> Verdict:
    kernels = set(_backends(facts).values())
    return facts.arg("kv_cache_dtype") == FP8 and "tilelang" in kernels and len(kernels) > 1


def _other_vendor(facts: Facts) -> Verdict:
    rocm = facts.device == "rocm"
    if not on_gpu(facts) or facts.device == "cpu":
        return None
    for option, kernel in _backends(facts).items():
        if kernel in (CUDA_ONLY if rocm else ROCM_ONLY):
            return {
                "option": option,
                "kernel": kernel,
                "vendor": "NVIDIA" if rocm else "AMD",
                "do": "triton or tilelang"
                if rocm
                else "flashmla_kv on Hopper, trtllm on Blackwell",
            }
    return None


def _page_size(facts: Facts) -> Verdict:
    size = written(facts, "page_size")
    return {"size": size, "page": PAGE} if size not in (None, PAGE) and on_gpu(facts) else None


def _topk_needs_unfused(facts: Facts) -> Verdict:
    return facts.arg("dsa_topk_backend") == "torch" and switched_on(facts, FUSED_TOPK, True)


def _lossy_topk(facts: Facts) -> Verdict:
    unfused = not switched_on(facts, FUSED_TOPK, True)
    return on_gpu(facts) and unfused and facts.arg("dsa_topk_backend", "sgl-kernel") == "sgl-kernel"


def _dense_threshold(facts: Facts) -> Verdict:
    value = facts.environment.get(DENSE_BELOW, "")
    limit = facts.config.index_topk
    return {"value": value, "limit": limit} if value.isdigit() and int(value) > limit else None


RULES: tuple[Rule, ...] = (
    Rule(
        id="kv-requantised",
        title="the cache is not quantised anew for every layer",
        severity=WARN,
        reads=("args",),
        condition=_requantised,
        message="{options} flashmla_kv reads an FP8 cache; with a bfloat16 one the whole cache is "
        "quantised in every layer of every step",
        cure="use --kv-cache-dtype fp8_e4m3, or the default kernels of a bfloat16 cache",
        symptom="A step that takes longer the larger the pool is, not the longer the context.",
        cause="The kernel reads one layout; SGLang converts the pool to it on the fly.",
        source=("SGLang's dsa_backend.py",),
    ),
    Rule(
        id="kv-dequantised",
        title="prefill does not dequantise the whole prefix for every layer",
        severity=WARN,
        reads=("args",),
        condition=_dequantised,
        message="--dsa-prefill-backend flashmla_sparse dequantises the whole FP8 prefix in every "
        "layer of every chunk",
        cure="use flashmla_kv (Hopper) for prefill",
        symptom="Prefill of a long prompt slows down with every chunk, and needs 1.2 KB more a "
        "prefix token.",
        cause="The kernel reads bfloat16 latents.",
        source=("SGLang's dsa_backend.py",),
    ),
    Rule(
        id="kv-padded-heads",
        title="FlashMLA's decode kernel has the heads that it computes",
        severity=WARN,
        reads=("args", "config", "capability"),
        condition=_padded_heads,
        message="flashmla_kv computes 64 query heads where a rank has {heads}: the FP8 cache is "
        "slower than a bfloat16 one",
        cure="keep --kv-cache-dtype bfloat16 unless you need the room, or use --attn-dp-size",
        symptom="31 against 34 tokens a second and GPU at one request, 96 against 113 at sixteen.",
        cause="The kernel is compiled for 64 and 128 heads; the missing ones are padded.",
        source=("sgl-project/sglang#22372", "SGLang's GLM-5.2 benchmarks"),
    ),
    Rule(
        id="kv-without-scales",
        title="an FP8 cache without scales is what you want",
        severity=WARN,
        reads=("args", "raw_config", "quantization"),
        condition=_without_scales,
        message="{kernel} keeps FP8 latents unscaled, and the checkpoint has no k_scale or v_scale",
        cure="use --kv-cache-dtype bfloat16 where accuracy counts, and compare",
        symptom="AIME 76.7 instead of 95.3, GPQA 71.2 instead of 86.2, reported with context "
        "parallelism on B300.",
        cause="A scale of 1 is taken for what the checkpoint does not have.",
        source=("sgl-project/sglang#22671", "sgl-project/sgl-cookbook#237"),
    ),
    Rule(
        id="kv-mixed-layouts",
        title="prefill and decode read one layout of the cache",
        severity=FAIL,
        reads=("args",),
        condition=_mixed_layouts,
        message="with an FP8 cache tilelang needs both phases",
        cure="give --dsa-prefill-backend tilelang --dsa-decode-backend tilelang, or neither",
        symptom="A ValueError at start.",
        cause="Its FP8 latents have no scales, those of the others do.",
        source=("SGLang's overrides.py",),
    ),
    Rule(
        id="kv-other-vendor",
        title="the attention kernels are for this GPU",
        severity=FAIL,
        reads=("args", "device"),
        condition=_other_vendor,
        message="{option} {kernel} does not run on this GPU: {vendor}'s alone has it",
        cure="leave it out, or use {do}",
        symptom="A ValueError at start, or an ImportError in a layer.",
        cause="Recipes for AMD and NVIDIA name different kernels.",
        source=("SGLang's overrides.py",),
    ),
    Rule(
        id="kv-page-size",
        title="the page size is the one that serves",
        severity=WARN,
        reads=("argv", "args"),
        condition=_page_size,
        message="--page-size {size} is replaced by {page} without an error",
        cure="leave it out, or give --page-size {page}",
        symptom="A WARNING line; prefix hits and memory as for pages of 64 tokens.",
        cause="Index keys and FlashMLA's pages have 64 tokens.",
        source=("SGLang's deepseek_v2.py overrides",),
        at_start=False,
    ),
    Rule(
        id="topk-needs-unfused",
        title="the selection's kernel goes with its fusion",
        severity=FAIL,
        reads=("args", "environment"),
        condition=_topk_needs_unfused,
        message=f"--dsa-topk-backend torch needs {FUSED_TOPK}=0",
        cure=f"set {FUSED_TOPK}=0, or leave out --dsa-topk-backend",
        symptom="A RuntimeError in the first request.",
        cause="The fused form exists for the other kernels alone.",
        source=("SGLang's dsa_topk_backend.py",),
    ),
    Rule(
        id="topk-lossy",
        title="the selection keeps every candidate",
        severity=WARN,
        reads=("args", "environment"),
        condition=_lossy_topk,
        message=f"with {FUSED_TOPK}=0 the selection uses a kernel that drops candidates above "
        "4,096 of one score bucket",
        cure=f"unset {FUSED_TOPK}, or give --dsa-topk-backend torch",
        symptom="Positions missing from the selection in long contexts; no message.",
        cause="A buffer of fixed size in shared memory.",
        source=("sgl-project/sglang#36807", "sgl-project/sglang#37893"),
    ),
    Rule(
        id="dense-threshold",
        title="prefill is sparse above index_topk",
        severity=WARN,
        reads=("environment", "config"),
        condition=_dense_threshold,
        message=f"{DENSE_BELOW} is {{value}}: prompts up to there attend to every position, above "
        "index_topk {limit}",
        cure="unset it; SGLang takes index_topk",
        symptom="Other answers than the published model's, and slower prefill.",
        cause="The model was trained to read the selection above index_topk.",
        source=("SGLang's model_hook.py",),
    ),
)
