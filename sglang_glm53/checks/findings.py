"""What is wrong with a checkpoint's tensors, by the headers of its safetensors files."""

from __future__ import annotations

import re

from sglang_glm53.checkpoint import (
    SCALE_SUFFIX,
    Shape,
    checkpoint_tensors,
    layer_prefix,
    mtp_duplicates,
    scale_shape,
)
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.headers import Tensor
from sglang_glm53.checks.rule import Verdict

FP8 = "F8_E4M3"
_WEIGHTS = ("BF16", "F16", "F32", FP8)
_STACKED = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_INDEXER = ".self_attn.indexer."
# What SGLang reads in bfloat16 or float32 whatever the checkpoint's scheme is.
_NEVER_FP8 = ("norm.weight", "k_norm.bias", "mlp.gate.weight", "e_score_correction_bias")


def _ours(facts: Facts) -> bool:
    """Whether the weights are BF16 or FP8 in blocks: other schemes name their tensors otherwise,
    and SGLang's own class loads them."""
    declared = facts.raw_config.get("quantization_config") or {}
    return declared.get("quant_method") in (None, "fp8")


def _tensors(facts: Facts) -> dict[str, Tensor]:
    """The tensors with stacked experts taken apart, as the loader does."""
    result: dict[str, Tensor] = {}
    for name, tensor in facts.headers.tensors.items():
        match = _STACKED.match(name)
        if not match or len(tensor.shape) != 3:
            result[name] = tensor
            continue
        experts, kind = match.groups()
        count, rows, columns = tensor.shape
        parts = {"down_proj": rows}
        if kind == "gate_up_proj":
            parts = {"gate_proj": rows // 2, "up_proj": rows // 2}
        for expert in range(count):
            for part, size in parts.items():
                result[f"{experts}.{expert}.{part}.weight"] = Tensor(
                    tensor.dtype, (size, columns), tensor.file
                )
    return result


def _known(facts: Facts) -> dict[str, Shape]:
    return dict(checkpoint_tensors(facts.config))


def _mtp(facts: Facts) -> str:
    return layer_prefix(facts.config.num_hidden_layers)


def _base(name: str) -> str:
    return name.removesuffix(SCALE_SUFFIX)


def files(facts: Facts) -> Verdict:
    problems = facts.headers.problems
    if not problems:
        return None
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return {"first": problems[0] + more}


def twice(facts: Facts) -> Verdict:
    names = facts.headers.twice
    return {"count": len(names), "first": names[0]} if names else None


def missing(facts: Facts) -> Verdict:
    """By module for other schemes, whose tensors have other leaves."""
    there = _tensors(facts)
    if facts.headers.problems:
        return None  # told already
    if not _ours(facts):
        there = {name.rpartition(".")[0]: tensor for name, tensor in there.items()}
    no_mtp = mtp_absent(facts)
    absent = [
        name
        for name in _known(facts)
        if (name if _ours(facts) else name.rpartition(".")[0]) not in there
        and not (no_mtp and name.startswith(_mtp(facts)))
    ]
    if not absent:
        return None
    layers = sorted({int(found[1]) for name in absent if (found := _LAYER.match(name))})
    where = f" of layers {', '.join(map(str, layers[:6]))}{' ...' if layers[6:] else ''}"
    return {"count": len(absent), "first": absent[0], "where": where if layers else ""}


def mtp_absent(facts: Facts) -> bool:
    """Whether config.json names an MTP layer that has no tensor at all."""
    prefix = _mtp(facts)
    named = facts.config.num_nextn_predict_layers > 0
    return named and not any(name.startswith(prefix) for name in facts.headers.tensors)


def _is_shared_indexer(facts: Facts, name: str) -> bool:
    found = _LAYER.match(name)
    if not found or _INDEXER not in name:
        return False
    layer = int(found[1])
    return layer < facts.config.num_hidden_layers and not facts.config.runs_indexer(layer)


def shared_indexer(facts: Facts) -> Verdict:
    names = [name for name in facts.headers.tensors if _is_shared_indexer(facts, name)]
    layers = sorted({int(_LAYER.match(name)[1]) for name in names})
    return {"count": len(layers), "first": layers[0]} if layers else None


def unknown(facts: Facts) -> Verdict:
    if not _ours(facts):
        return None
    known = {*_known(facts), *mtp_duplicates(facts.config), "lm_head.weight"}
    names = [
        name
        for name in _tensors(facts)
        if _base(name) not in known
        and not _is_shared_indexer(facts, name)
        and not name.endswith("rotary_emb.inv_freq")
    ]
    return {"count": len(names), "first": names[0]} if names else None


def shapes(facts: Facts) -> Verdict:
    if not _ours(facts):
        return None
    known, wrong = _known(facts), []
    for name, tensor in _tensors(facts).items():
        if _base(name) in known:
            wanted = known[_base(name)]
            wanted = wanted if _base(name) == name else scale_shape(wanted)
            if tensor.shape != wanted:
                wrong.append((name, list(tensor.shape), list(wanted)))
    if not wrong:
        return None
    name, has, wanted = wrong[0]
    return {"count": len(wrong), "first": name, "has": has, "wanted": wanted}


def scales(facts: Facts) -> Verdict:
    if not _ours(facts):
        return None
    tensors = _tensors(facts)
    alone = [
        f"{name} is FP8 without {name}{SCALE_SUFFIX}"
        for name, tensor in tensors.items()
        if tensor.dtype == FP8 and name + SCALE_SUFFIX not in tensors
    ]
    alone += [
        f"{name} scales a tensor that is {tensors[base].dtype if base in tensors else 'not there'}"
        for name in tensors
        if (base := _base(name)) != name and getattr(tensors.get(base), "dtype", None) != FP8
    ]
    return {"count": len(alone), "first": alone[0]} if alone else None


def never_fp8(facts: Facts) -> Verdict:
    names = [
        name
        for name, tensor in facts.headers.tensors.items()
        if name.endswith(_NEVER_FP8) and tensor.dtype.startswith(("F8", "F4", "I", "U"))
    ]
    return {"count": len(names), "first": names[0]} if names else None


def no_weights(facts: Facts) -> Verdict:
    """Tensors of a dtype that no weight of a BF16 or FP8 checkpoint has."""
    if not _ours(facts):
        return None
    known = _known(facts)
    names = [
        (name, tensor.dtype)
        for name, tensor in _tensors(facts).items()
        if name in known and tensor.dtype not in _WEIGHTS
    ]
    return {"count": len(names), "first": names[0][0], "dtype": names[0][1]} if names else None


def experts_differ(facts: Facts) -> Verdict:
    if facts.config.n_shared_experts == 0:
        return None
    tensors = _tensors(facts)
    for layer in range(facts.config.first_k_dense_replace, facts.config.num_hidden_layers):
        prefix = f"{layer_prefix(layer)}mlp."
        shared = tensors.get(f"{prefix}shared_experts.down_proj.weight")
        routed = tensors.get(f"{prefix}experts.0.down_proj.weight")
        if shared and routed and shared.dtype != routed.dtype:
            return {"layer": layer, "shared": shared.dtype, "routed": routed.dtype}
    return None
