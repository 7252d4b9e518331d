"""How many bytes a step has to read from GPU memory, counted from the config.

Over a measured bandwidth this is the bound: no step can be faster, however it is written. Counted,
each once a pass: the weights of every routed expert that some row is sent to; all other weights;
of the cache, the selected latents of every request, and the index keys of its whole context in
every full layer. W_UK and W_UV count in bf16, in which SGLang keeps the absorbed halves of kv_b;
lm_head and the router are bf16; the rest is FP8 with a float32 scale for each 128 x 128 block.
Neglected: norms, embedding rows and activations, less than 0.1% together; and what is written.

Pure Python: neither torch nor sglang.
"""

from __future__ import annotations

from collections.abc import Mapping

from sglang_glm53.config import Glm53Config

BF16 = 2.0
FP8 = 1.0 + 4.0 / (128 * 128)  # with its block's scale
INDEX_KEY = 132  # bytes a token of a full layer: 128 in FP8, a float32 scale
LATENT = {"bf16": 1152, "fp8": 656}  # bytes a token of a layer: bf16; FlashMLA's FP8 form

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
    return min(config.n_routed_experts, rows * config.num_experts_per_tok)


def attention_weights(config: Glm53Config, width: float = FP8) -> float:
    """Weights of one layer's MLA, without an indexer."""
    heads, latent = config.num_attention_heads, config.kv_lora_rank
    down = config.hidden_size * (config.q_lora_rank + config.latent_dim)
    up = config.q_lora_rank * heads * config.qk_head_dim
    absorbed = latent * heads * (config.qk_nope_head_dim + config.v_head_dim)
    out = heads * config.v_head_dim * config.hidden_size
    return (down + up + out) * width + absorbed * BF16


def indexer_weights(config: Glm53Config, width: float = FP8) -> float:
    """Weights of one full layer's indexer: queries, the key, and the heads' gates (bf16)."""
    query = config.q_lora_rank * config.index_n_heads * config.index_head_dim
    key = config.hidden_size * config.index_head_dim
    gates = config.hidden_size * config.index_n_heads
    return (query + key) * width + gates * BF16


def expert_weights(config: Glm53Config, width: float = FP8) -> float:
    """Weights of one routed expert; the shared expert has as many."""
    return 3 * config.hidden_size * config.moe_intermediate_size * width


def _lm_head(config: Glm53Config) -> float:
    return config.vocab_size * config.hidden_size * BF16


def _router(config: Glm53Config) -> float:
    return config.hidden_size * config.n_routed_experts * BF16


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
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    dense = min(layers, dense)
    full, moe = len(config.full_layers), layers - dense
    selected = min(context, config.index_topk)
    return {
        "attention": layers * attention_weights(config, width),
        "indexer": full * indexer_weights(config, width),
        "dense MLP": dense * 3 * config.hidden_size * config.intermediate_size * width,
        "routed experts": moe * experts * expert_weights(config, width),
        "shared experts": moe * config.n_shared_experts * expert_weights(config, width),
        "router": moe * _router(config),
        "lm_head": _lm_head(config),
        "latents": float(layers * requests * selected * LATENT[kv]),
        "index keys": float(full * requests * context * INDEX_KEY),
    }


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
    selected = min(context, config.index_topk)
    return {
        "draft: attention": attention_weights(config, width)
        + (indexer_weights(config, width) if indexer else 0.0),
        # The projection of embedding and hidden state stays bf16 in SGLang.
        "draft: projection": 2 * config.hidden_size * config.hidden_size * BF16,
        "draft: routed experts": experts * expert_weights(config, width),
        "draft: shared experts": config.n_shared_experts * expert_weights(config, width),
        "draft: router": _router(config),
        "draft: lm_head": _lm_head(config),
        "draft: cache": float(
            requests * (selected * LATENT[kv] + (context * INDEX_KEY if indexer else 0))
        ),
    }


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
    heads = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    kv_b = config.kv_lora_rank * heads * width
    total += config.num_hidden_layers * kv_b + _lm_head(config)  # the embedding is as large
    if mtp:
        draft = draft_pass(config, **everything)  # type: ignore[arg-type]
        total += sum(draft.values()) - draft["draft: lm_head"] + kv_b
    return total


def kv_bytes_per_token(config: Glm53Config, *, kv: str = "fp8", mtp: bool = False) -> int:
    """Bytes of cache that one token takes, the MTP layer's included if it drafts."""
    layers, full = config.num_hidden_layers + mtp, len(config.full_layers) + mtp
    return layers * LATENT[kv] + full * INDEX_KEY
