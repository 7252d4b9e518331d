"""Which features of SGLang run on our path, which stand down to SGLang's class, which are refused.

One table, `FEATURES`, and one question, `decide`, asked where SGLang resolves the model class: by
then the server's arguments are known, which they are not when plugins are loaded.

* runs: our classes serve.
* stands down: one line with the reason, and SGLang's own class serves in our place. GLM53_STRICT=1
  makes it an error, unless it was asked for (GLM53_SERVE=stock). Without a GPU SGLang's own class
  cannot run, so there it is refused.
* refused: one line, and the process ends: neither class would give what was asked for.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_glm53 import __version__
from sglang_glm53.errors import Glm53Error

logger = logging.getLogger(__name__)

ARCHITECTURES = ("GlmMoeDsaForCausalLM", "GlmMoeDsaForCausalLMNextN")
_STOCK_MODULE = "sglang.srt.models.glm4_moe"

RUNS, STANDS_DOWN, REFUSED = "runs", "stands down", "refused"

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
    """

    read: Callable[[str], Any]
    config: Any
    device: str
    dtype: str
    capability: tuple[int, int] | None = None
    rocm: bool = False

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


@dataclass(frozen=True)
class Decision:
    """What serves, and the rows of the table that led to it (none where ours runs)."""

    kind: str
    rows: tuple[Feature, ...] = ()


def _on_cpu(s: Situation) -> bool:
    return s.device == "cpu"


def _on_gpu(s: Situation) -> bool:
    return s.device != "cpu"


def _torch_attention(s: Situation) -> bool:
    """Whether the plain-torch attention would serve."""
    return _on_cpu(s) or os.environ.get("GLM53_ATTENTION") == "torch"


def _stock_asked_for(_: Situation) -> bool:
    """Whether GLM53_SERVE asks for SGLang's own class.

    Raises:
        Glm53Error: the variable has a value that means nothing.
    """
    value = os.environ.get(SERVE_VARIABLE, "")
    if value not in ("", "ours", "stock"):
        raise Glm53Error(f'{SERVE_VARIABLE} is "{value}"; it can be "ours" or "stock"')
    return value == "stock"


def _other_gpu(s: Situation) -> bool:
    if not _on_gpu(s) or _torch_attention(s):
        return False
    return s.device != "cuda" or s.rocm or s.capability not in (None, HOPPER)


def _quant_method(s: Situation) -> str | None:
    """The checkpoint's quantization method, as its config names it."""
    declared = getattr(s.config, "quantization_config", None) or {}
    return declared.get("quant_method") if isinstance(declared, dict) else None


def _other_quantization(s: Situation) -> bool:
    asked = s.get("quantization")
    return (asked not in (None, "fp8")) or _quant_method(s) not in (None, "fp8")


def _other_fp8_blocks(s: Situation) -> bool:
    declared = getattr(s.config, "quantization_config", None) or {}
    if _quant_method(s) != "fp8":
        return s.get("quantization") == "fp8"  # quantised while it is loaded
    return list(declared.get("weight_block_size") or ()) != [128, 128]


def _other_backend(s: Situation) -> bool:
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return any(s.get(name) not in (None, "torch_native") for name in names)


_CPU_ADVICE = "leave the option out"
_STOCK_ADVICE = "leave the option out to serve our classes"

# The first row that is refused, or else the first that stands down, is the one that is told.
FEATURES: tuple[Feature, ...] = (
    # --- what runs -------------------------------------------------------------------------
    Feature(
        "tensor parallelism",
        lambda s: s.get("tp_size", 1) > 1,
        RUNS,
        "tested with 2 ranks on a CPU",
        "--tp-size N",
    ),
    Feature(
        "attention data parallelism",
        lambda s: s.get("attn_dp_size", 1) > 1 or bool(s.get("enable_dp_attention")),
        RUNS,
        "tested with 2 ranks on a CPU",
        "--attn-dp-size N (SGLang 0.5.22: --enable-dp-attention --dp-size N)",
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
        lambda s: bool(s.get("enable_return_indexer_topk")),
        RUNS,
        "positions inside the request",
        "--enable-return-indexer-topk",
    ),
    # --- what stands down to SGLang's own class -------------------------------------------
    Feature(
        STOCK_ON_PURPOSE,
        _stock_asked_for,
        STANDS_DOWN,
        "you asked for SGLang's own class",
        f"unset {SERVE_VARIABLE} to serve our classes",
    ),
    Feature(
        "another GPU than Hopper",
        _other_gpu,
        STANDS_DOWN,
        "our classes were run on NVIDIA Hopper (compute capability 9.0) alone",
        "serve on an H100, H200 or H20",
    ),
    Feature(
        "LoRA",
        lambda s: bool(s.get("enable_lora") or s.get("lora_paths")),
        STANDS_DOWN,
        "our layers take no adapters",
        _STOCK_ADVICE,
    ),
    Feature(
        "two-batch overlap",
        lambda s: bool(s.get("enable_two_batch_overlap") or s.get("enable_single_batch_overlap")),
        STANDS_DOWN,
        "our layers run a batch as one",
        _STOCK_ADVICE,
    ),
    Feature(
        "context parallelism",
        lambda s: (
            s.get("dcp_size", 1) > 1 or s.get("attn_cp_size", 1) > 1 or s.get("enable_prefill_cp")
        ),
        STANDS_DOWN,
        "our attention reads the whole sequence on each rank",
        _STOCK_ADVICE,
    ),
    Feature(
        "pipeline parallelism",
        lambda s: s.get("pp_size", 1) > 1,
        STANDS_DOWN,
        "not tested with our classes",
        _STOCK_ADVICE,
    ),
    Feature(
        "expert parallelism",
        lambda s: (
            s.get("ep_size", 1) > 1
            or s.get("moe_a2a_backend", "none") != "none"
            or s.get("enable_eplb")
        ),
        STANDS_DOWN,
        "not tested with our classes",
        _STOCK_ADVICE,
    ),
    Feature(
        "hierarchical cache",
        lambda s: bool(
            s.get("enable_hierarchical_cache")
            or s.get("enable_hisparse")
            or s.get("enable_lmcache")
            or s.get("enable_flexkv")
            or s.get("enable_unified_cache_external_linker")
        ),
        STANDS_DOWN,
        "our pool is not copied to another tier",
        _STOCK_ADVICE,
    ),
    Feature(
        "disaggregated prefill and decode",
        lambda s: s.get("disaggregation_mode", "null") != "null",
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
    # --- what is refused ------------------------------------------------------------------
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
        lambda s: _on_gpu(s) and s.dtype == "torch.float32",
        REFUSED,
        "SGLang's GPU kernels for norms take no float32",
        "serve it with --dtype bfloat16, or in float32 on a CPU",
    ),
    Feature(
        "FP8 cache on a CPU",
        lambda s: _on_cpu(s) and str(s.get("kv_cache_dtype", "auto")).startswith(("fp8", "mxfp8")),
        REFUSED,
        "SGLang's CPU engine keeps no FP8 latents",
        f"{_CPU_ADVICE}: the cache is bfloat16, and exact with --dtype float32",
    ),
    Feature(
        "another attention backend",
        lambda s: _torch_attention(s) and _other_backend(s),
        REFUSED,
        "without our GPU kernels only torch_native selects tokens by the indexer",
        f"{_CPU_ADVICE}, or give --attention-backend torch_native",
    ),
    Feature(
        "compiled model on a CPU",
        lambda s: _on_cpu(s) and bool(s.get("enable_torch_compile")),
        REFUSED,
        "our reference attention is not traced by torch.compile",
        _CPU_ADVICE,
    ),
    Feature(
        "another speculative algorithm on a CPU",
        lambda s: _on_cpu(s) and s.get("speculative_algorithm") not in (None, "EAGLE", "NEXTN"),
        REFUSED,
        "only the checkpoint's own MTP layer drafts there",
        "use --speculative-algorithm EAGLE",
    ),
    Feature(
        "tree of drafts on a CPU",
        lambda s: _on_cpu(s) and s.get("speculative_eagle_topk", 1) > 1,
        REFUSED,
        "the reference attention verifies a chain",
        "use --speculative-eagle-topk 1",
    ),
)

SPECULATION = ("another speculative algorithm on a CPU", "tree of drafts on a CPU")

_decision: Decision | None = None


def is_ours(hf_config: Any) -> bool:
    """Whether a checkpoint's config names an architecture that this package serves."""
    return any(name in ARCHITECTURES for name in getattr(hf_config, "architectures", None) or ())


def serves_our_model() -> bool:
    """Whether our classes serve in this process, as decided when the model class was resolved."""
    return _decision is not None and _decision.kind == RUNS


def current() -> Decision | None:
    """The decision of this process; None before a model class was resolved."""
    return _decision


def stock_class(name: str) -> type:
    """SGLang's own class of that name."""
    return getattr(importlib.import_module(_STOCK_MODULE), name)


def evaluate(situation: Situation, rows: Sequence[Feature] = FEATURES) -> Decision:
    """Hold the table, or some rows of it, against a situation.

    Raises:
        Glm53Error: a refused feature was asked for; or one that stands down without a GPU or
            under GLM53_STRICT=1. What GLM53_SERVE=stock asks for on purpose is no error there.
    """
    hits = tuple(row for row in rows if row.asked(situation))
    for row in hits:
        if row.decision == REFUSED:
            raise Glm53Error(f"{row.name}: {row.reason}; {row.advice}")
    down = tuple(row for row in hits if row.decision == STANDS_DOWN)
    if not down:
        return Decision(RUNS)
    row = down[0]
    if situation.device == "cpu":
        raise Glm53Error(
            f"{row.name}: {row.reason}, and SGLang's own class cannot run without a GPU; "
            f"{row.advice}"
        )
    if os.environ.get("GLM53_STRICT") == "1" and row.name != STOCK_ON_PURPOSE:
        raise Glm53Error(f"{row.name}: {row.reason} (GLM53_STRICT=1); {row.advice}")
    return Decision(STANDS_DOWN, down)


def decide(model_config: Any) -> Decision:
    """Decide for the server of this process; logs once where it stands down.

    Args:
        model_config: SGLang's ModelConfig of the model whose class is being resolved.

    Raises:
        Glm53Error: see `evaluate`.
    """
    global _decision
    situation = situation_of(model_config)
    if situation is None:
        return Decision(RUNS)  # arguments are still being resolved: asked again later
    decision = evaluate(situation)
    if decision.kind == RUNS and _decision is None and _first_rank():
        name = model_config.hf_config.architectures[0]
        logger.info("sglang-glm53 %s serves %s", __version__, name)
    if decision.kind == STANDS_DOWN and _decision is None and _first_rank():
        for row in decision.rows:
            logger.warning(
                "sglang-glm53 stands down (%s): %s; %s. SGLang's own class serves.",
                row.name,
                row.reason,
                row.advice,
            )
    _decision = decision
    return decision


def check_arguments(server_args: Any) -> None:
    """Check the checkpoint's config and the table while SGLang resolves its arguments.

    Does nothing for another architecture.

    Raises:
        Glm53Error: a config that gives garbage, or see `evaluate`.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import model_config_of

    from sglang_glm53.config import Glm53Config

    model_config = model_config_of(server_args)
    if not is_ours(model_config.hf_config):
        return
    view = resolving_view(server_args)
    situation = _situation(lambda name: getattr(view, name, None), model_config)
    if evaluate(situation).kind == RUNS:
        check_ranks(situation, Glm53Config.from_hf(model_config.hf_config))


def check_ranks(situation: Situation, config: Any) -> None:
    """Refuse ranks that do not divide what they share. On a CPU SGLang would pad the config
    instead, and the checkpoint no longer fit it.

    Raises:
        Glm53Error: one line that names the size.
    """
    ranks = situation.get("tp_size", 1)
    groups = situation.get("attn_dp_size", 1)
    if situation.get("enable_dp_attention"):
        groups = max(groups, situation.get("dp_size", 1))
    for name, share in (
        ("num_attention_heads", max(1, ranks // groups)),
        ("intermediate_size", situation.get("moe_dense_tp_size", ranks)),
        ("moe_intermediate_size", ranks),
    ):
        size = getattr(config, name)
        if size % share:
            raise Glm53Error(
                f"--tp-size {ranks}: {name} is {size}, which {share} ranks cannot share evenly; "
                "use a number of ranks that divides it"
            )


def check_speculation(server_args: Any) -> None:
    """Hold the rows of the table that SGLang would otherwise forestall with an error of its own.

    Raises:
        Glm53Error: see `evaluate`.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import model_config_of

    view = resolving_view(server_args)
    situation = _situation(lambda name: getattr(view, name, None), model_config_of(server_args))
    evaluate(situation, [row for row in FEATURES if row.name in SPECULATION])


def situation_of(model_config: Any) -> Situation | None:
    """The situation of this process, or None before SGLang published its arguments."""
    from sglang.srt.runtime_context import get_context

    try:
        args = get_context().resolved_server_args_dict()
    except ValueError:
        return None
    return _situation(args.get, model_config)


def _situation(read: Callable[[str], Any], model_config: Any) -> Situation:
    import torch

    device = str(read("device") or "cuda").split(":")[0]
    rocm = torch.version.hip is not None
    nvidia = device == "cuda" and not rocm and torch.cuda.is_available()
    return Situation(
        read=read,
        config=model_config.hf_config,
        device=device,
        dtype=str(model_config.dtype),
        capability=torch.cuda.get_device_capability() if nvidia else None,
        rocm=rocm,
    )


def _first_rank() -> bool:
    """Whether this process builds the model as the first rank (one line for the whole server)."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_rank() == 0
