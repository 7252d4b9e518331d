"""Whether a checkpoint's tensors are what its quantization_config says.

Read from SGLang's quantisation classes: the tensors that each scheme's layers ask for, by the
dtype of the weight. BF16 and FP8 in blocks are this package's own; the others are served by
SGLang's class.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.findings import FP8, Found, told
from sglang_glm53.checks.headers import Tensor
from sglang_glm53.checks.rule import Verdict

_BLOCK = [128, 128]
# Matrices that SGLang builds in the scheme's precision unless the config excludes them.
_MATRICES = tuple(
    f".{name}_proj.weight" for name in ("gate", "up", "down", "o", "q_a", "q_b", "kv_b")
) + (".kv_a_proj_with_mqa.weight", ".indexer.wq_b.weight", ".indexer.wk.weight")


class Scheme(NamedTuple):
    """How one scheme stores a matrix of [rows, columns].

    Attributes:
        leaf: the stored weight's last name.
        dtypes: of the weight.
        beside: last names of the tensors that belong to it.
        scale: the one of them that has a value for each group, "" where shapes are not held.
        values: weights in one stored element.
        group: weights of a row that share a value of `scale`.
    """

    leaf: str
    dtypes: tuple[str, ...]
    beside: tuple[str, ...]
    scale: str = ""
    values: int = 1
    group: int = 0


FP8_BLOCKS = Scheme("weight", (FP8,), ("weight_scale_inv",))
NVFP4 = Scheme("weight", ("U8", "F4"), ("weight_scale", "weight_scale_2"), "weight_scale", 2, 16)
W4AFP8 = Scheme("weight", ("I8", "U8"), ("weight_scale_inv",), "weight_scale_inv", 2, 128)
CT_PACKED = Scheme("weight_packed", ("I32", "U8"), ("weight_scale",))
CT_WHOLE = Scheme("weight", (FP8, "I8"), ("weight_scale",))


def schemes(declared: dict[str, Any]) -> tuple[Scheme, ...] | None:
    """The schemes of a quantization_config's tensors; None for a method that is not known here."""
    method = str(declared.get("quant_method", "")).lower()
    algorithm = str(declared.get("quant_algo", "")).upper()
    if method == "w4afp8":
        return (W4AFP8, FP8_BLOCKS)
    if method == "compressed-tensors":
        return (CT_PACKED, CT_WHOLE)
    if method in ("modelopt_fp4", "nvfp4") or (
        method.startswith("modelopt") and "FP4" in algorithm
    ):
        return (NVFP4,)
    return {"": (), "fp8": (FP8_BLOCKS,)}.get(method)


def declared_of(facts: Facts) -> dict[str, Any]:
    declared = facts.raw_config.get("quantization_config") or {}
    return declared if isinstance(declared, dict) else {}


def misfits(facts: Facts) -> Verdict:
    """quantization_config against the tensors."""
    declared = declared_of(facts)
    known = schemes(declared)
    if known is None:
        return None
    tensors = facts.headers.tensors
    found = [("config.json", "quantization_config", what) for what in _config(declared, tensors)]
    if not found:
        found = _partners(facts, known) + _kept(declared, known, tensors)
    return told(found) and {**told(found), "first": found[0][1], "what": found[0][2]}


def _config(declared: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """What is wrong with the config as a whole."""
    method = str(declared.get("quant_method", "")).lower()
    dtypes = Counter(t.dtype for n, t in tensors.items() if n.endswith(_MATRICES))
    if not method:
        packed = {name for name in dtypes if name.startswith(("F8", "F4", "I", "U"))}
        what = f"is not there, and {', '.join(sorted(packed))} matrices are"
        return [what] if packed else []
    wrong = []
    for field in ("modules_to_not_convert", "ignored_layers"):
        if not isinstance(declared.get(field) or [], list):
            wrong.append(f"{field} must be a list of names")
    if method == "fp8":
        if declared.get("weight_block_size") != _BLOCK:
            wrong.append(f"weight_block_size is {declared.get('weight_block_size')}, not {_BLOCK}")
        if declared.get("activation_scheme", "dynamic") != "dynamic":
            wrong.append("activation_scheme is static, and no input_scale is stored")
    if method == "compressed-tensors" and not declared.get("config_groups"):
        wrong.append("has no config_groups")
    known = schemes(declared) or ()
    stored = {d for scheme in (known[:1] if W4AFP8 in known else known) for d in scheme.dtypes}
    packed = any(name.endswith(".weight_packed") for name in tensors)
    if tensors and stored and not stored & set(dtypes) and not packed:
        wrong.append(f"says {method}, and no matrix is {' or '.join(sorted(stored))}")
    return wrong


def _partners(facts: Facts, known: tuple[Scheme, ...]) -> list[Found]:
    """Weights without the tensors beside them; FP8 in blocks has a rule of its own."""
    headers, found = facts.headers, []
    for name, tensor in headers.tensors.items():
        module, _, leaf = name.rpartition(".")
        scheme = next((s for s in known if s.leaf == leaf and tensor.dtype in s.dtypes), None)
        if scheme is None or (scheme is FP8_BLOCKS and len(known) == 1):
            continue
        for other in scheme.beside:
            partner = headers.tensors.get(f"{module}.{other}")
            if partner is None and not headers.lost(f"{module}.{other}"):
                found.append((tensor.file, name, f"is {tensor.dtype} without {module}.{other}"))
            elif partner and other == scheme.scale and len(tensor.shape) == 2:
                rows, columns = tensor.shape
                wanted = (rows, columns * scheme.values // scheme.group)
                if partner.shape != wanted:
                    what = f"is {list(partner.shape)}, for its weight {list(wanted)}"
                    found.append((partner.file, f"{module}.{other}", what))
    return found


def _kept(
    declared: dict[str, Any], known: tuple[Scheme, ...], tensors: dict[str, Tensor]
) -> list[Found]:
    """FP8 in blocks: matrices whose precision and the config's exclude list disagree."""
    if known != (FP8_BLOCKS,):
        return []
    names = declared.get("modules_to_not_convert") or declared.get("ignored_layers") or []
    kept, found = {str(name) for name in names}, []
    for name, tensor in tensors.items():
        if not name.endswith(_MATRICES):
            continue
        parts = name.removesuffix(".weight").split(".")
        excluded = any(".".join(parts[:end]) in kept for end in range(1, len(parts) + 1))
        if tensor.dtype == FP8 and excluded:
            found.append((tensor.file, name, "is FP8, and modules_to_not_convert names it"))
        elif tensor.dtype in ("BF16", "F16", "F32") and not excluded:
            what = f"is {tensor.dtype}, and modules_to_not_convert does not name it"
            found.append((tensor.file, name, what))
    return found
