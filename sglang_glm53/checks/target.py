"""A rule on the question itself: whether it is judged for the machine that will serve."""

from __future__ import annotations

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.features import ranks
from sglang_glm53.checks.rule import WARN, Rule, Verdict
from sglang_glm53.ledger.glm53 import config_json


def _whole_model(facts: Facts) -> bool:
    """Whether config.json has the sizes of GLM-5.3, which no CPU serves in earnest."""
    whole = config_json()
    sizes = ("num_hidden_layers", "hidden_size", "n_routed_experts")
    return all((facts.raw_config or {}).get(name) == whole[name] for name in sizes)


def _for_a_cpu(facts: Facts) -> Verdict:
    if facts.machine_named or facts.device != "cpu" or "device" in facts.given:
        return None
    count = ranks(facts)
    if count > 1:
        return {"what": f"{count} ranks"}
    return {"what": "the whole GLM-5.3"} if _whole_model(facts) else None


RULES: tuple[Rule, ...] = (
    Rule(
        id="judged-for-a-cpu",
        title="the command is judged for the machine that will serve",
        severity=WARN,
        reads=("args", "given", "device", "machine_named"),
        condition=_for_a_cpu,
        message="{what} on a machine without a GPU: the command is judged for a CPU, and no "
        "rule on GPUs, their kernels or their memory was asked",
        cure="name the GPU that will serve: `glm53 doctor --gpu h200 -- ...` (or h100, b200, ...; "
        "--gpus N for other than 8), or give --device cpu if you mean it",
        symptom="A doctor that finds nothing, and a server that fails on the GPU machine.",
        cause="Asked on a login node, SGLang resolves its options for what it finds there: a CPU.",
        source=("tried on SGLang",),
        at_start=False,
    ),
)
