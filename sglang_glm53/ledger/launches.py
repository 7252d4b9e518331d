"""Which kernels SGLang's own class launches in a plain decode step of one Hopper rank, counted from
the config, with the names that a profile has for them. FP8 weights and cache, experts in Triton,
flashmla_kv, a captured graph; no communication.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.formula import Sheet
from sglang_glm53.ledger.model import names


@dataclass(frozen=True)
class Launches:
    """One kind of kernel.

    Attributes:
        title: what it does. formula: launches of a step, over the config's names.
        kernels: regular expression of the kernels' names in a profile.
        from_batch: rows from which it is launched at all.
    """

    title: str
    formula: str
    kernels: str
    from_batch: int = 1


KINDS: tuple[Launches, ...] = (
    Launches(
        "FP8 products: A, q_b, o_proj; indexer's query; dense and shared MLPs",
        "3 * layers + full_layers + 2 * dense_layers + 2 * moe_layers",
        r"deep_gemm::sm90_fp8_gemm",
    ),
    Launches(
        "quantising their inputs",
        "3 * layers + full_layers + 2 * dense_layers + 2 * moe_layers",
        r"per_token_group_quant_flat_kernel<sglang::QuantTrait<__nv_bfloat16, __nv_fp8_e4m3, 128u, "
        r"false, false",
    ),
    Launches("routed experts, two products", "2 * moe_layers", r"^fused_moe_kernel$"),
    Launches(
        "quantising their inputs (routed)",
        "2 * moe_layers",
        r"per_token_group_quant_flat_kernel<sglang::QuantTrait<__nv_bfloat16, __nv_fp8_e4m3, 128u, "
        r"false, true",
    ),
    Launches(
        "SiLU and multiply: dense, shared, routed",
        "dense_layers + 2 * moe_layers",
        r"act_and_mul_kernel",
    ),
    Launches("router: scores", "moe_layers", r"tiny_n_gemm_kernel"),
    Launches("router: choice", "moe_layers", r"^_router_triton_kernel$"),
    Launches("rows by expert", "moe_layers", r"moe_align_block_size"),
    Launches("sum over a token's experts", "moe_layers", r"^_moe_sum_reduce_kernel$"),
    Launches("adding the shared expert", "moe_layers", r"vectorized_elementwise_kernel.*Functor_add"
             r"<c10::BFloat16>"),
    Launches(
        "bf16 products: W_UK, W_UV; lm_head",
        "2 * layers + 1",
        r"^nvjet_sm90_tst_(?!64x\d+_64x16)",
    ),
    Launches("norms with residual", "2 * layers", r"FusedAddRMSNormKernel"),
    Launches("norms of query and latent; the first", "2 * layers + 1", r"norm::RMSNormKernel"),
    Launches("RoPE of query and key", "layers", r"fused_rope_kernel"),
    Launches("query: latent and RoPE part", "layers", r"concat_mla_absorb_q_kernel"),
    Launches("cache: quantising a latent", "layers", r"_quantize_k_cache_fast_kernel"),
    Launches("cache: writing it", "layers", r"set_mla_kv_buffer_kernel"),
    Launches("sparse attention, parts", "layers", r"flash_fwd_splitkv_mla"),
    Launches("sparse attention, their sum", "layers", r"flash_fwd_mla_combine_kernel"),
    Launches("copying attention's output", "layers", r"elementwise_kernel<128, 4, .*direct_copy",
             from_batch=2),
    Launches("indexer: key and gates", "full_layers", r"^nvjet_sm90_tst_64x\d+_64x16"),
    Launches("indexer: sum of their parts", "full_layers", r"cublasLt::splitKreduce_kernel"),
    Launches("indexer: key's norm, RoPE, cache", "full_layers", r"fused_k_indexer_norm_rope_store"),
    Launches("indexer: query's RoPE, FP8", "full_layers", r"fused_q_indexer_rope"),
    Launches("indexer: scores", "full_layers", r"sm90_fp8_paged_mqa_logits"),
    Launches("indexer: the largest", "full_layers", r"topk_main_kernel"),
)  # fmt: skip
# The benchmark's own: it deals tokens to experts in turn.
BENCHMARK = r"^_simulate_balanced_routing_kernel$"


@dataclass(frozen=True)
class Compared:
    """A kind beside a profile: launches of a step."""

    kind: Launches
    counted: int
    ran: float


def compare(
    config: Glm53Config, batch: int, kernels: Iterable[Sequence[object]]
) -> tuple[list[Compared], float]:
    """Every kind beside a profile, and launches of kernels that are none of them: those of a step
    as a whole (metadata, embedding, sampling, copies).

    Args:
        kernels: rows of `glm53 bench slice`: name, calls a step, microseconds, ...
    """
    sheet = Sheet(names(config))
    left = [(str(row[0]), float(str(row[1]))) for row in kernels]
    left = [each for each in left if not re.search(BENCHMARK, each[0])]
    found = []
    for kind in KINDS:
        mine = [each for each in left if re.search(kind.kernels, each[0])]
        left = [each for each in left if each not in mine]
        count = sheet.figure("launches", kind.formula).value if batch >= kind.from_batch else 0
        found.append(Compared(kind, int(count), sum(calls for _, calls in mine)))
    return found, sum(calls for name, calls in left if name != "(idle)")
