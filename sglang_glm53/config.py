"""GLM-5.3's configuration: every field this package reads, what it means, what is refused.

Pure Python. It reads a Hugging Face configuration object or the dict of a ``config.json``, so the
model, the ledger and the checks share one reading of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_glm53.errors import Glm53Error

FULL, SHARED = "full", "shared"

# What the model's definition fixes and a config.json re-saved by transformers no longer says.
MODEL_DEFINITION: dict[str, Any] = {
    "indexer_rope_interleave": True,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

TRANSFORMERS_THETA = 10000
_MAY_BE_ZERO = ("first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts")
# More is a typing error, not a model.
_MOST = {"num_hidden_layers": (10_000, 78), "n_routed_experts": (10_000, 256)}


@dataclass(frozen=True)
class Glm53Config:
    """One ``GlmMoeDsaForCausalLM`` checkpoint. Sizes are in elements, without parallelism.

    Attributes:
        vocab_size, hidden_size: rows of the embedding, width of the residual stream.
        num_hidden_layers: decoder layers of the target; the MTP layer's index in the checkpoint.
        num_nextn_predict_layers: MTP layers in the checkpoint, 0 or 1.
        first_k_dense_replace: leading layers with a dense MLP; the rest are MoE.
        intermediate_size: inner width of a dense MLP.
        moe_intermediate_size: inner width of one routed expert; of the shared expert, times
            ``n_shared_experts``.
        n_routed_experts, num_experts_per_tok: experts of a MoE layer, experts a token is sent to.
        n_group, topk_group: expert groups and groups kept; 1 and 1 is plain top-k.
        norm_topk_prob, routed_scaling_factor: whether the top-k weights sum to 1 before they are
            multiplied by the factor.
        num_attention_heads: query heads.
        q_lora_rank, kv_lora_rank: width of the query latent and of the KV latent.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: a head's dimensions without RoPE, with
            RoPE, and of its value.
        index_n_heads, index_head_dim: the indexer's heads and their width (the key has one head).
        index_topk: positions that attention reads for a query.
        indexer_types: per layer ``full`` (runs its indexer) or ``shared`` (takes the selection of
            the nearest full layer above).
        index_share_for_mtp_iteration: later draft steps reuse the selection of the first.
        rope_theta: base of the rotary embedding (plain RoPE, interleaved pairs, no scaling).
        rms_norm_eps: epsilon of every RMSNorm, the two latent norms included.
        max_position_embeddings: longest context, tokens.
        tie_word_embeddings: whether lm_head is the embedding.
        filled: fields that config.json lacked, as ``name=value``.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    index_share_for_mtp_iteration: bool
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    filled: tuple[str, ...] = ()

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of one cached token of one layer: KV latent and its RoPE part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == FULL)

    def runs_indexer(self, layer_id: int) -> bool:
        return self.indexer_types[layer_id] == FULL

    def is_sparse(self, layer_id: int) -> bool:
        """Whether the layer's FFN is a MoE; the MTP layer's always is."""
        return layer_id >= self.first_k_dense_replace

    @classmethod
    def from_hf(cls, hf_config: Any) -> Glm53Config:
        """Read a Hugging Face configuration object, or the dict of a config.json.

        Raises:
            Glm53Error: a field is missing or would give garbage; one line that names it.
        """
        get = hf_config.get if isinstance(hf_config, Mapping) else _getter(hf_config)
        filled = tuple(
            f"{name}={value}" for name, value in MODEL_DEFINITION.items() if get(name, None) is None
        )
        rope_theta = _rope_theta(get)
        values = {
            name: _required(get, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "num_hidden_layers",
                "first_k_dense_replace",
                "intermediate_size",
                "moe_intermediate_size",
                "n_routed_experts",
                "num_experts_per_tok",
                "routed_scaling_factor",
                "num_attention_heads",
                "q_lora_rank",
                "kv_lora_rank",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
                "v_head_dim",
                "index_n_heads",
                "index_head_dim",
                "index_topk",
                "rms_norm_eps",
                "max_position_embeddings",
            )
        }
        for name in ("num_nextn_predict_layers", "n_shared_experts", "n_group", "topk_group"):
            values[name] = get(name, None) or (1 if "group" in name else 0)
        _check_numbers(values)
        _check_definition(get)
        layers = values["num_hidden_layers"]
        config = cls(
            **values,
            norm_topk_prob=bool(get("norm_topk_prob", True)),
            index_share_for_mtp_iteration=bool(get("index_share_for_mtp_iteration", False)),
            tie_word_embeddings=bool(get("tie_word_embeddings", False)),
            indexer_types=_indexer_types(get, layers),
            rope_theta=rope_theta,
            filled=filled,
        )
        _check(config, get("mlp_layer_types", None))
        return config


def fill_model_definition(hf_config: Any) -> None:
    """Set on ``hf_config`` what its config.json lacked, since SGLang reads these fields too."""
    for name, value in MODEL_DEFINITION.items():
        if getattr(hf_config, name, None) is None:
            setattr(hf_config, name, value)


def _getter(hf_config: Any):
    return lambda name, default=None: getattr(hf_config, name, default)


def _required(get, name: str) -> Any:
    value = get(name, None)
    if value is None:
        raise Glm53Error(
            f"config.json: {name} is missing; take config.json from the model's own repository"
        )
    return value


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Refuse what is no number, or none that can be; `values`: fields by name."""
    for name, value in values.items():
        whole = name not in ("routed_scaling_factor", "rms_norm_eps")
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            wanted = "a whole number" if whole else "a number"
            raise Glm53Error(f"config.json: {name} is {_short(value)}, and must be {wanted}")
        least = 0 if name in _MAY_BE_ZERO else 1
        if not whole and not 0 < value < float("inf") or whole and value < least:
            wanted = f"{least} or more" if whole else "above 0"
            raise Glm53Error(f"config.json: {name} is {_short(value)}, and must be {wanted}")
    for name, (most, own) in _MOST.items():
        if values[name] > most:
            raise Glm53Error(f"config.json: {name} is {_short(values[name])}; GLM-5.3 has {own}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _rope_theta(get) -> float:
    rope = get("rope_parameters", None) or {}
    scaling = get("rope_scaling", None)
    for name, value in (("rope_parameters", rope), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, Mapping):
            raise Glm53Error(f"config.json: {name} is {_short(value)}, and must be an object")
    kind = rope.get("rope_type", "default") if rope else "default"
    if scaling and scaling.get("rope_type", scaling.get("type", "default")) != "default":
        kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "default":
        raise Glm53Error(
            f"config.json: rope type {kind!r} is not GLM-5.3's; its context needs no RoPE scaling, "
            "so remove rope_scaling"
        )
    theta = rope.get("rope_theta", get("rope_theta", None))
    if theta is None:
        raise Glm53Error("config.json: rope_theta is missing; GLM-5.3 has 8000000")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
        raise Glm53Error(f"config.json: rope_theta is {_short(theta)}; GLM-5.3 has 8000000")
    if float(theta) == TRANSFORMERS_THETA:
        raise Glm53Error(
            f"config.json: rope_theta is {TRANSFORMERS_THETA}, which transformers puts where there "
            "is none; GLM-5.3 has 8000000"
        )
    if (rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise Glm53Error(
            "config.json: partial_rotary_factor is not GLM-5.3's, which rotates all of "
            "qk_rope_head_dim; remove it from rope_parameters"
        )
    return float(theta)


def _check_definition(get) -> None:
    """Refuse a config that asks for another model than GLM-5.3's definition."""
    for name, wanted, effect in (
        ("indexer_rope_interleave", True, "the indexer would select wrong positions"),
        ("rope_interleave", True, "attention would rotate wrong pairs"),
        ("moe_layer_freq", 1, "MoE layers would be built as dense ones"),
        ("scoring_func", "sigmoid", "the router would choose other experts"),
        ("topk_method", "noaux_tc", "the router would ignore its correction bias"),
        ("hidden_act", "silu", "every MLP would compute something else"),
        ("attention_bias", False, "the checkpoint has no attention bias"),
        ("index_init_tokens", 0, "the first positions would not always be selected"),
        ("index_local_tokens", 0, "the last positions would not always be selected"),
        ("index_kpool", 1, "index keys would not be pooled"),
        ("router_fp32", False, "the router's weights would be rounded"),
        ("mla_nope", False, "attention would rotate where the model does not"),
        ("swiglu_limit", None, "no MLP would be clamped"),
    ):
        value = get(name, None)
        if value is not None and value != wanted:
            raise Glm53Error(
                f"config.json: {name} is {value!r} where GLM-5.3 has {wanted!r} ({effect}); "
                f"{'leave it out' if wanted is None else f'set it to {wanted!r} or leave it out'}"
            )


def schedule(layers: int, freq: int, offset: int | None) -> tuple[str, ...]:
    """Indexer types from ``index_topk_freq`` and ``index_skip_topk_offset``.

    The first ``offset`` layers are full, then every ``freq``-th: GLM-5.3's 4 and 3 give
    0, 1, 2, 6, 10, … A missing offset counts as 2, as SGLang and transformers read it.
    """
    offset = 2 if offset is None else offset
    return tuple(SHARED if max(layer - offset + 1, 0) % freq else FULL for layer in range(layers))


def _indexer_types(get, layers: int) -> tuple[str, ...]:
    pattern, freq = get("index_topk_pattern", None), get("index_topk_freq", None)
    offset = get("index_skip_topk_offset", None)
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) < layers or set(pattern) - set("FS"):
            raise Glm53Error(
                f"config.json: index_topk_pattern must be {layers} letters F or S, one a layer"
            )
        implied = tuple(FULL if letter == "F" else SHARED for letter in pattern[:layers])
    elif freq is not None:
        if not all(isinstance(n, int) and n >= 1 for n in (freq, offset) if n is not None):
            raise Glm53Error(
                f"config.json: index_topk_freq {freq!r} and index_skip_topk_offset {offset!r} "
                "must be numbers, 1 or more"
            )
        implied = schedule(layers, freq, offset)
    else:
        implied = None

    types = get("indexer_types", None)
    if types is None:
        return implied or (FULL,) * layers
    if not isinstance(types, list | tuple) or not all(isinstance(t, str) for t in types):
        raise Glm53Error(
            f"config.json: indexer_types is {_short(types)}, and must be a list of 'full' and "
            "'shared', one a layer"
        )
    types = tuple(types)
    if len(types) != layers:
        raise Glm53Error(
            f"config.json: indexer_types has {len(types)} entries for {layers} layers; "
            "give one a layer"
        )
    if set(types) - {FULL, SHARED}:
        raise Glm53Error(
            f"config.json: indexer_types may hold 'full' and 'shared', not "
            f"{sorted(set(types) - {FULL, SHARED})}"
        )
    if types[0] != FULL:
        raise Glm53Error(
            "config.json: indexer_types[0] is 'shared', but layer 0 has no layer above to take a "
            "selection from; set it to 'full'"
        )
    if implied is not None and implied != types:
        source = "index_topk_pattern" if pattern is not None else "index_topk_freq"
        raise Glm53Error(
            f"config.json: {source} asks for another schedule than indexer_types, which wins, so "
            f"{source} would do nothing; change indexer_types, or set it to null as well"
        )
    return types


def _check(config: Glm53Config, mlp_layer_types: list[str] | None) -> None:
    dense = config.first_k_dense_replace
    if mlp_layer_types is not None and not isinstance(mlp_layer_types, list | tuple):
        raise Glm53Error(
            f"config.json: mlp_layer_types is {_short(mlp_layer_types)}, and must be a list, one "
            "word a layer"
        )
    if mlp_layer_types is not None and list(mlp_layer_types) != [
        "sparse" if config.is_sparse(layer) else "dense"
        for layer in range(config.num_hidden_layers)
    ]:
        raise Glm53Error(
            f"config.json: mlp_layer_types does not say what first_k_dense_replace={dense} says "
            "(dense layers first, then MoE layers); make them agree"
        )
    if config.index_head_dim != 128:
        raise Glm53Error(
            f"config.json: index_head_dim is {config.index_head_dim}; SGLang's index cache holds "
            "128 values a token, as GLM-5.3 has; set it to 128"
        )
    if config.indexer_types[0] != FULL:
        raise Glm53Error(
            "config.json: layer 0 is not a full indexer layer, so it has no selection; check "
            "index_topk_pattern"
        )
    if config.index_topk < 1:
        raise Glm53Error(f"config.json: index_topk is {config.index_topk}; give 1 or more")
    if config.num_nextn_predict_layers > 1:
        raise Glm53Error(
            f"config.json: num_nextn_predict_layers is {config.num_nextn_predict_layers}; GLM-5.3 "
            "has one MTP layer"
        )
    if config.num_experts_per_tok > config.n_routed_experts:
        raise Glm53Error(
            f"config.json: num_experts_per_tok {config.num_experts_per_tok} exceeds "
            f"n_routed_experts {config.n_routed_experts}; take config.json from the model's own "
            "repository"
        )
    if config.n_routed_experts % config.n_group or config.topk_group > config.n_group:
        raise Glm53Error(
            f"config.json: n_group {config.n_group} and topk_group {config.topk_group} do not "
            f"divide {config.n_routed_experts} experts; GLM-5.3 has 1 and 1"
        )
    if config.qk_rope_head_dim > config.index_head_dim or config.qk_rope_head_dim % 2:
        raise Glm53Error(
            f"config.json: qk_rope_head_dim {config.qk_rope_head_dim} must be even and at most "
            f"index_head_dim {config.index_head_dim}"
        )
