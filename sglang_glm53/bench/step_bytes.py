"""How many bytes a step of a rank slice has to read from GPU memory.

Over a measured bandwidth this is the bound: no step can be faster, however it is written. What is
counted, and how, stands in ledger/memory.py; here are the shapes of the bench: one rank, `experts`
of the slice, and tokens dealt to them in turn. The indexer's key projection counts in the
checkpoint's width.

Pure Python: neither torch nor sglang.
"""

from __future__ import annotations

from collections.abc import Mapping

from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger import memory
from sglang_glm53.ledger.formula import Sheet
from sglang_glm53.ledger.model import FP8_WIDTH, cache
from sglang_glm53.ledger.topology import Topology

BF16 = 2.0
FP8 = FP8_WIDTH  # with its block's scale
SLICE = Topology()

Bytes = dict[str, float]


def kv_kind(kv_cache_dtype: str) -> str:
    """`bf16` or `fp8`, from SGLang's --kv-cache-dtype."""
    return "fp8" if kv_cache_dtype.startswith("fp8") else "bf16"


def weight_format(config_json: Mapping[str, object]) -> float:
    """Bytes of one element of a projection: FP8 with scales where the checkpoint says so."""
    return FP8 if config_json.get("quantization_config") else BF16


def round_robin_experts(rows: int, config: Glm53Config) -> int:
    """Distinct experts that `rows` tokens are sent to in one layer, dealt in turn.

    SGLang's SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS deals slot `row * k + j` of a layer to expert
    `(slot + layer) % n`: neighbours differ, so the count is the same in every layer.
    """
    return int(memory.distinct_experts(_sheet(config), rows, "even"))


def attention_weights(config: Glm53Config, width: float = FP8) -> float:
    """Weights of one layer's MLA, without an indexer."""
    return _sheet(config, width)["attention_layer"]


def indexer_weights(config: Glm53Config, width: float = FP8) -> float:
    """Weights of one full layer's indexer: queries, the key, and the heads' gates (bf16)."""
    return _sheet(config, width)["indexer_layer"]


def expert_weights(config: Glm53Config, width: float = FP8) -> float:
    """Weights of one routed expert; the shared expert has as many."""
    return _sheet(config, width)["expert_here"]


def target_pass(
    config: Glm53Config,
    *,
    requests: int,
    context: int,
    experts: float,
    kv: str = "fp8",
    width: float = FP8,
) -> Bytes:
    """Bytes of one pass of the whole model over a few rows of each request.

    Several rows of one request (a verification) select nearly the same tokens; their latents count
    once, as the least that must be read.

    Args:
        requests: sequences in the batch.
        context: tokens that each has in the cache.
        experts: distinct routed experts that a layer's rows are sent to.
        kv: `fp8` or `bf16`, the form of the latents in the cache.
        width: bytes of one element of a projection.
    """
    return _pass(config, memory.READS, requests, context, experts, kv, width)


def draft_pass(
    config: Glm53Config,
    *,
    requests: int,
    context: int,
    experts: float,
    indexer: bool = True,
    kv: str = "fp8",
    width: float = FP8,
) -> Bytes:
    """Bytes of one pass of the MTP layer, lm_head included; arguments as for `target_pass`.

    Args:
        indexer: whether this pass selects anew; later draft steps reuse the first's selection.
    """
    shape = (requests, context, experts, kv, width)
    return _pass(config, memory.DRAFT_READS, *shape, selects=int(indexer))


def decode_step(config: Glm53Config, *, batch: int, context: int, **options: object) -> Bytes:
    """Bytes of a plain decode step: one row a request, experts dealt in turn.

    `options`: `kv`, `width` and `experts` of `target_pass`.
    """
    options.setdefault("experts", round_robin_experts(batch, config))
    return target_pass(config, requests=batch, context=context, **options)  # type: ignore[arg-type]


def mtp_step(
    config: Glm53Config,
    *,
    batch: int,
    context: int,
    steps: int,
    tokens: int,
    verify_experts: float | None = None,
    draft_experts: float | None = None,
    kv: str = "fp8",
    width: float = FP8,
) -> Bytes:
    """Bytes of one step with MTP: verify `tokens` rows a request, then `steps` drafts.

    The first draft comes out of the pass that writes the verified rows into the draft's cache (as
    many rows as the verification); each of the others is one row a request.

    Args:
        verify_experts, draft_experts: distinct experts of a layer with `tokens * batch` rows and
            with `batch` rows; by default as dealt in turn.
    """
    if verify_experts is None:
        verify_experts = round_robin_experts(batch * tokens, config)
    if draft_experts is None:
        draft_experts = round_robin_experts(batch, config)
    shape = {"requests": batch, "context": context, "kv": kv, "width": width}
    total = target_pass(config, experts=verify_experts, **shape)  # type: ignore[arg-type]
    first = draft_pass(config, experts=verify_experts, **shape)  # type: ignore[arg-type]
    later = draft_pass(config, experts=draft_experts, indexer=False, **shape)  # type: ignore[arg-type]
    for name in first:
        total[name] = first[name] + (steps - 1) * later[name]
    return total


def loaded_weights(config: Glm53Config, *, mtp: bool = False, width: float = FP8) -> float:
    """Bytes of GPU memory that the loaded weights take, the embedding and all experts included.

    SGLang keeps kv_b as it was loaded beside its absorbed halves.
    """
    everything = {"requests": 0, "context": 0, "experts": config.n_routed_experts, "width": width}
    total = sum(target_pass(config, **everything).values())  # type: ignore[arg-type]
    sheet = _sheet(config, width)
    kv_b = sheet["kv_b_layer"]
    total += config.num_hidden_layers * kv_b + sheet["embedding_here"]
    if mtp:
        draft = draft_pass(config, **everything)  # type: ignore[arg-type]
        total += sum(draft.values()) - draft["draft: lm_head"] + kv_b
    return total


def kv_bytes_per_token(config: Glm53Config, *, kv: str = "fp8", mtp: bool = False) -> int:
    """Bytes of cache that one token takes, the MTP layer's included if it drafts."""
    return int(cache(config, kv, mtp=mtp)["kv_bytes_per_token"])


def _sheet(config: Glm53Config, width: float = FP8, kv: str = "fp8") -> Sheet:
    slice_ = Topology(weights="fp8", kv=kv)
    sheet = Sheet(memory.weight_names(config, slice_, w=width, w_index_key=width))
    memory.layer_weights(sheet)
    return sheet


def _pass(
    config: Glm53Config,
    formulas: dict[str, str],
    requests: int,
    context: int,
    experts: float,
    kv: str,
    width: float,
    **more: float,
) -> Bytes:
    found = memory.reads(
        _sheet(config, width, kv),
        formulas,
        requests=requests,
        context=context,
        selected=min(context, config.index_topk),
        experts_read=experts,
        **more,
    )
    return {
        figure.title: float(figure.value)
        for name, figure in found.figures.items()
        if name != "total"
    }
