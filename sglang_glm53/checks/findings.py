"""What is wrong with a checkpoint's tensors, by the headers of its safetensors files.

Each condition names the first thing that it found and lists all of them, one line each: file,
tensor, what.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from sglang_glm53.checkpoint import (
    SCALE_SUFFIX,
    Shape,
    checkpoint_tensors,
    layer_prefix,
    mtp_duplicates,
    scale_shape,
)
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.headers import INDEX, Tensor
from sglang_glm53.checks.rule import Verdict
from sglang_glm53.config import Glm53Config

FP8 = "F8_E4M3"
_WEIGHTS = ("BF16", "F16", "F32", FP8)
_STACKED = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_INDEXER = ".self_attn.indexer."
# What SGLang reads in bfloat16 or float32 whatever the checkpoint's scheme is.
_NEVER_FP8 = ("norm.weight", "k_norm.bias", "mlp.gate.weight", "e_score_correction_bias")

Found = tuple[str, str, str]  # file, tensor, what is wrong with it; "" where it says itself


def told(found: list[Found], **more: Any) -> Verdict:
    """A verdict on what was found, with `count`, `first`, `file` of the first, and `details`."""
    if not found:
        return None
    return {
        "count": len(found),
        "first": found[0][1],
        "file": found[0][0],
        "details": [
            f"{file}: {name}" + (f": {what}" if what else "") for file, name, what in found
        ],
        **more,
    }


def ours(facts: Facts) -> bool:
    """Whether the weights are BF16 or FP8 in blocks: other schemes name their tensors otherwise,
    and SGLang's own class loads them."""
    declared = facts.raw_config.get("quantization_config") or {}
    return declared.get("quant_method") in (None, "fp8")


def tensors_of(facts: Facts) -> dict[str, Tensor]:
    """The tensors with stacked experts taken apart, as the loader does."""
    result: dict[str, Tensor] = {}
    if not any(len(tensor.shape) == 3 for tensor in facts.headers.tensors.values()):
        return facts.headers.tensors
    for name, tensor in facts.headers.tensors.items():
        match = _STACKED.match(name)
        if not match or len(tensor.shape) != 3:
            result[name] = tensor
            continue
        experts, kind = match.groups()
        count, rows, columns = tensor.shape
        if count != facts.config.n_routed_experts:  # any number, where there are no bytes
            result[name] = tensor
            continue
        parts = {"down_proj": rows}
        if kind == "gate_up_proj":
            parts = {"gate_proj": rows // 2, "up_proj": rows // 2}
        for expert in range(count):
            for part, size in parts.items():
                result[f"{experts}.{expert}.{part}.weight"] = Tensor(
                    tensor.dtype, (size, columns), tensor.file
                )
    return result


@lru_cache(maxsize=1)  # of 60,000 names, which several rules ask for
def _shapes(config: Glm53Config) -> dict[str, Shape]:
    return dict(checkpoint_tensors(config))


def _known(facts: Facts) -> dict[str, Shape]:
    return _shapes(facts.config)


def _mtp(facts: Facts) -> str:
    return layer_prefix(facts.config.num_hidden_layers)


def _base(name: str) -> str:
    return name.removesuffix(SCALE_SUFFIX)


def files(facts: Facts) -> Verdict:
    problems = facts.headers.problems
    if not problems:
        return None
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return {"first": problems[0] + more, "details": problems if more else ()}


def twice(facts: Facts) -> Verdict:
    headers = facts.headers
    return told([(headers.tensors[n].file, n, f"also in {headers.also[n]}") for n in headers.twice])


def index(facts: Facts) -> Verdict:
    """Where the index and the files that it names disagree."""
    headers = facts.headers
    found = []
    for name, file in headers.promised.items():
        there = headers.tensors.get(name)
        if there is None and file not in headers.broken:
            found.append((file, name, f"not there; {INDEX} says it is"))
        elif there and there.file != file and headers.also.get(name) != file:
            found.append((there.file, name, f"{INDEX} says it is in {file}"))
    if headers.promised:
        found += [
            (tensor.file, name, f"not in {INDEX}")
            for name, tensor in headers.tensors.items()
            if name not in headers.promised
        ]
    return told(found)


def strays(facts: Facts) -> Verdict:
    names = facts.headers.strays
    return {"count": len(names), "first": names[0], "details": names} if names else None


def missing(facts: Facts) -> Verdict:
    """By module for other schemes, whose tensors have other leaves.

    What a broken file lacks is told with that file.
    """
    headers, there = facts.headers, tensors_of(facts)
    if not ours(facts):
        there = {name.rpartition(".")[0]: tensor for name, tensor in there.items()}
    no_mtp = mtp_absent(facts)
    absent = [
        name
        for name in _known(facts)
        if (name if ours(facts) else name.rpartition(".")[0]) not in there
        and not (no_mtp and name.startswith(_mtp(facts)))
        and not headers.lost(name)
    ]
    layers = sorted({int(found[1]) for name in absent if (found := _LAYER.match(name))})
    where = f" of layers {', '.join(map(str, layers[:6]))}{' ...' if layers[6:] else ''}"
    return told(
        [(headers.promised.get(name, "no file"), name, "missing") for name in absent],
        where=where if layers else "",
    )


def mtp_absent(facts: Facts) -> bool:
    """Whether config.json names an MTP layer that has no tensor at all."""
    prefix = _mtp(facts)
    named = facts.config.num_nextn_predict_layers > 0
    return named and not any(name.startswith(prefix) for name in facts.headers.tensors)


def _is_shared_indexer(facts: Facts, name: str) -> bool:
    if _INDEXER not in name or not (found := _LAYER.match(name)):
        return False
    layer = int(found[1])
    return layer < facts.config.num_hidden_layers and not facts.config.runs_indexer(layer)


def shared_indexer(facts: Facts) -> Verdict:
    there = facts.headers.tensors
    names = [name for name in there if _is_shared_indexer(facts, name)]
    layers = sorted({int(_LAYER.match(name)[1]) for name in names})
    found = [(there[name].file, name, "of a shared layer") for name in names]
    return told(found) and {**told(found), "count": len(layers), "first": layers[0]}


def unknown(facts: Facts) -> Verdict:
    if not ours(facts):
        return None
    known = {*_known(facts), *mtp_duplicates(facts.config), "lm_head.weight"}
    return told(
        [
            (tensor.file, name, "not of this configuration")
            for name, tensor in tensors_of(facts).items()
            if _base(name) not in known
            and not _is_shared_indexer(facts, name)
            and not name.endswith("rotary_emb.inv_freq")
        ]
    )


def shapes(facts: Facts) -> Verdict:
    if not ours(facts):
        return None
    known, wrong = {**mtp_duplicates(facts.config), **_known(facts)}, []
    for name, tensor in tensors_of(facts).items():
        if (base := _base(name)) in known:
            wanted = known[base] if base == name else scale_shape(known[base])
            if tensor.shape != wanted:
                wrong.append((tensor.file, name, (list(tensor.shape), list(wanted))))
    if not wrong:
        return None
    has, wanted = wrong[0][2]
    lines = [(file, name, f"is {has}, by config.json {by}") for file, name, (has, by) in wrong]
    return told(lines, has=has, wanted=wanted)


def scales(facts: Facts) -> Verdict:
    if not ours(facts):
        return None
    tensors, headers = tensors_of(facts), facts.headers
    pairs = [
        (tensor.file, name, f"is FP8 without {name}{SCALE_SUFFIX}")
        for name, tensor in tensors.items()
        if tensor.dtype == FP8
        and name + SCALE_SUFFIX not in tensors
        and not headers.lost(name + SCALE_SUFFIX)
    ]
    for name, tensor in tensors.items():
        if (base := _base(name)) == name:
            continue
        has = tensors[base].dtype if base in tensors else "not there"
        if has != FP8 and not (base not in tensors and headers.lost(base)):
            pairs.append((tensor.file, name, f"scales a tensor that is {has}"))
        elif tensor.dtype not in ("F32", "BF16", "F16"):
            pairs.append((tensor.file, name, f"is {tensor.dtype}: no number that scales"))
    return told(pairs) and {**told(pairs), "first": " ".join(pairs[0][1:])}


def never_fp8(facts: Facts) -> Verdict:
    return told(
        [
            (tensor.file, name, f"is {tensor.dtype}")
            for name, tensor in facts.headers.tensors.items()
            if name.endswith(_NEVER_FP8) and tensor.dtype.startswith(("F8", "F4", "I", "U"))
        ]
    )


def no_weights(facts: Facts) -> Verdict:
    """Tensors of a dtype that no weight of a BF16 or FP8 checkpoint has."""
    if not ours(facts):
        return None
    known = _known(facts)
    found = [
        (tensor.file, name, f"is {tensor.dtype}")
        for name, tensor in tensors_of(facts).items()
        if name in known and tensor.dtype not in _WEIGHTS
    ]
    return told(found, dtype=found[0][2].removeprefix("is ")) if found else None


def experts_differ(facts: Facts) -> Verdict:
    if facts.config.n_shared_experts == 0:
        return None
    tensors = tensors_of(facts)
    for layer in range(facts.config.first_k_dense_replace, facts.config.num_hidden_layers):
        prefix = f"{layer_prefix(layer)}mlp."
        name = f"{prefix}shared_experts.down_proj.weight"
        shared = tensors.get(name)
        routed = tensors.get(f"{prefix}experts.0.down_proj.weight")
        if shared and routed and shared.dtype != routed.dtype:
            found = [(shared.file, name, f"is {shared.dtype}")]
            return told(found, layer=layer, shared=shared.dtype, routed=routed.dtype)
    return None
