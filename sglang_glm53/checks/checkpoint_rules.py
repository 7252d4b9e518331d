"""Rules on a checkpoint's tensors, from the headers of its safetensors files (`glm53 check`)."""

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
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict

FP8 = "F8_E4M3"
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


def _files(facts: Facts) -> Verdict:
    problems = facts.headers.problems
    if not problems:
        return None
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return {"first": problems[0] + more}


def _twice(facts: Facts) -> Verdict:
    names = facts.headers.twice
    return {"count": len(names), "first": names[0]} if names else None


def _missing(facts: Facts) -> Verdict:
    """By module for other schemes, whose tensors have other leaves."""
    there = _tensors(facts)
    if facts.headers.problems:
        return None  # told already
    if not _ours(facts):
        there = {name.rpartition(".")[0]: tensor for name, tensor in there.items()}
    no_mtp = _mtp_absent(facts)
    missing = [
        name
        for name in _known(facts)
        if (name if _ours(facts) else name.rpartition(".")[0]) not in there
        and not (no_mtp and name.startswith(_mtp(facts)))
    ]
    if not missing:
        return None
    layers = sorted({int(found[1]) for name in missing if (found := _LAYER.match(name))})
    where = f" of layers {', '.join(map(str, layers[:6]))}{' ...' if layers[6:] else ''}"
    return {"count": len(missing), "first": missing[0], "where": where if layers else ""}


def _mtp_absent(facts: Facts) -> bool:
    prefix = _mtp(facts)
    named = facts.config.num_nextn_predict_layers > 0
    return named and not any(name.startswith(prefix) for name in facts.headers.tensors)


def _is_shared_indexer(facts: Facts, name: str) -> bool:
    found = _LAYER.match(name)
    if not found or _INDEXER not in name:
        return False
    layer = int(found[1])
    return layer < facts.config.num_hidden_layers and not facts.config.runs_indexer(layer)


def _shared_indexer(facts: Facts) -> Verdict:
    names = [name for name in facts.headers.tensors if _is_shared_indexer(facts, name)]
    layers = sorted({int(_LAYER.match(name)[1]) for name in names})
    return {"count": len(layers), "first": layers[0]} if layers else None


def _unknown(facts: Facts) -> Verdict:
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


def _shapes(facts: Facts) -> Verdict:
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


def _scales(facts: Facts) -> Verdict:
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


def _never_fp8(facts: Facts) -> Verdict:
    names = [
        name
        for name, tensor in facts.headers.tensors.items()
        if name.endswith(_NEVER_FP8) and tensor.dtype.startswith(("F8", "F4", "I", "U"))
    ]
    return {"count": len(names), "first": names[0]} if names else None


def _experts_differ(facts: Facts) -> Verdict:
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


_AGAIN = "download the checkpoint again, or convert it again"

RULES: tuple[Rule, ...] = (
    Rule(
        id="checkpoint-files",
        title="every file is whole",
        severity=FAIL,
        reads=("headers",),
        condition=_files,
        message="{first}",
        cure="download that file again",
        symptom="An exception of safetensors after minutes of loading, or a missing tensor.",
        cause="An aborted download, or a file that was not copied.",
        source=("SGLang's weight iterator",),
        at_start=False,
    ),
    Rule(
        id="checkpoint-twice",
        title="every tensor is there once",
        severity=FAIL,
        reads=("headers",),
        condition=_twice,
        message="{count} tensors are in two files, first {first}",
        cure="remove the files of an older conversion",
        symptom="Stock SGLang: the file read last wins.",
        cause="Shards of two conversions in one folder.",
        source=("SGLang's weight iterator",),
        at_start=False,
    ),
    Rule(
        id="checkpoint-missing",
        title="every tensor is there",
        severity=FAIL,
        reads=("headers", "config", "raw_config"),
        condition=_missing,
        message="{count} tensors are missing, first {first}{where}",
        cure=_AGAIN + "; config.json may be another model's",
        symptom="Stock SGLang loads it without a word and serves uninitialised weights.",
        cause="SGLang has no check at the end of loading; unknown names are a warning.",
        source=(
            "SGLang's deepseek_weight_loader.py, tried",
            "ml-explore/mlx-lm#1418",
            "ROCm/ATOM#1260",
        ),
        at_start=False,
    ),
    Rule(
        id="checkpoint-mtp-missing",
        title="the MTP layer is there",
        severity=WARN,
        reads=("headers", "config"),
        condition=lambda facts: (
            {"layer": facts.config.num_hidden_layers} if _mtp_absent(facts) else None
        ),
        message="config.json names an MTP layer, and no tensor of layer {layer} is there",
        cure="serve without --speculative-algorithm, or use a checkpoint with the layer",
        symptom="Stock SGLang drafts with an uninitialised layer: accept length 1.",
        cause="A conversion that keeps the target's layers alone.",
        source=("vllm-project/vllm#46075", "SGLang's deepseek_weight_loader.py"),
        at_start=False,
    ),
    Rule(
        id="checkpoint-shared-indexer",
        title="indexers belong to full layers alone",
        severity=FAIL,
        reads=("headers", "config"),
        condition=_shared_indexer,
        message="{count} shared layers have an indexer of their own, first layer {first}",
        cure="take config.json and the weights from one repository (indexer_types does not fit)",
        symptom="Selections are taken from layers that the model was not trained to share.",
        cause="Weights of GLM-5 (every layer full) under a config of GLM-5.2 or 5.3.",
        source=("ROCm/ATOM#1260", "vllm-project/vllm-ascend#6754", "sgl-project/sglang#30531"),
        at_start=False,
    ),
    Rule(
        id="checkpoint-unknown",
        title="every tensor belongs to the model",
        severity=FAIL,
        reads=("headers", "config", "raw_config"),
        condition=_unknown,
        message="{count} tensors are not of this configuration, first {first}",
        cure="take config.json and the files from one repository",
        symptom="Our loader refuses it; stock SGLang drops them with a warning.",
        cause="The config is another model's, or a conversion renamed tensors.",
        source=("SGLang's deepseek_weight_loader.py",),
        at_start=False,
    ),
    Rule(
        id="checkpoint-shape",
        title="every tensor has its shape",
        severity=FAIL,
        reads=("headers", "config", "raw_config"),
        condition=_shapes,
        message="{count} tensors have another shape, first {first}: {has}, by config.json {wanted}",
        cure=_AGAIN,
        symptom="An assertion of a weight loader, in the best case.",
        cause="A damaged conversion, or the config of another model.",
        source=("SGLang's weight loaders",),
        at_start=False,
    ),
    Rule(
        id="checkpoint-scales",
        title="FP8 tensors have their scales",
        severity=FAIL,
        reads=("headers", "config", "raw_config"),
        condition=_scales,
        message="{count} FP8 pairs are not whole, first: {first}",
        cure=_AGAIN,
        symptom="Stock SGLang loads an indexer key without its scale and leaves 128 rows unset.",
        cause="A scale lies in another shard than its weight, and that shard is not there.",
        source=("SGLang's deepseek_weight_loader.py, tried",),
        at_start=False,
    ),
    Rule(
        id="checkpoint-precision",
        title="norms and the router keep their precision",
        severity=FAIL,
        reads=("headers", "config"),
        condition=_never_fp8,
        message="{count} norms or router weights are quantised, first {first}",
        cure="convert again and leave them out (modules_to_not_convert)",
        symptom="A load failure, or other experts are chosen.",
        cause="An exclude list by names that the checkpoint does not have.",
        source=("sgl-project/sglang#38621", "sgl-project/sglang#30265", "sgl-project/sglang#36870"),
        at_start=False,
    ),
    Rule(
        id="checkpoint-shared-expert-dtype",
        title="the shared expert can be fused with the routed ones",
        severity=WARN,
        reads=("headers", "config"),
        condition=_experts_differ,
        message="layer {layer}'s shared expert is {shared}, its routed ones are {routed}",
        cure="give --disable-shared-experts-fusion",
        symptom="The first token is wrong, and log-probabilities are flat.",
        cause="Fused, the shared expert is read in the routed ones' precision.",
        source=("sgl-project/sglang#25261",),
        at_start=False,
    ),
)
