"""Rules on what the ranks send each other: the fused all-reduce, all-to-all, transfers."""

from __future__ import annotations

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.reading import (
    attention_groups,
    blackwell,
    hopper,
    on_gpu,
    set_by_user,
    switched_on,
)
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict

FUSION = "flashinfer_allreduce_fusion_backend"
# Ends of the names of GPUs whose NVLink is bridged or absent: no NVSwitch, so no multicast.
WITHOUT_MULTICAST = ("NVL", "PCIe", "PCIE")
# Modules that SGLang imports for a value of an option, and the packages that bring them.
TRANSFER_MODULES = {"mooncake": "mooncake", "nixl": "nixl"}
A2A_MODULES = {
    "deepep": "deep_ep",
    "mooncake": "mooncake",
    "nixl": "nixl_ep",
    "pplx": "pplx_kernels",
}
PACKAGES = {
    "mooncake": "mooncake-transfer-engine",
    "nixl": "nixl",
    "nixl_ep": "nixl",
    "deep_ep": "sgl-deep-ep",
    "pplx_kernels": "pplx-kernels",
}


def _fusion_obstacles(facts: Facts) -> list[str]:
    """Why SGLang would not fuse the all-reduce with the norm after it; empty where it does."""
    why = []
    if attention_groups(facts) > 1:
        why.append("attention data parallelism sums within its groups")
    if facts.arg("moe_a2a_backend", "none") != "none":
        why.append("the experts' sums go through the all-to-all")
    if not (hopper(facts) or blackwell(facts)):
        why.append("the kernel is for compute capability 9.0 and 10.x")
    if facts.arg("nnodes", 1) > 1 and not blackwell(facts):
        why.append("it spans machines on Blackwell alone")
    if facts.arg("enforce_disable_flashinfer_allreduce_fusion"):
        why.append("it is switched off")
    if facts.arg("enable_deterministic_inference"):
        why.append("deterministic inference switches it off")
    return why


def _fusion_off(facts: Facts) -> Verdict:
    if facts.arg("tp_size", 1) == 1 or not on_gpu(facts) or facts.device == "rocm":
        return None  # ROCm has a fusion of its own
    asked = set_by_user(facts, FUSION) or set_by_user(facts, "enable_flashinfer_allreduce_fusion")
    # Without attention groups and all-to-all it is expected, asked for or not.
    plain = attention_groups(facts) == 1 and facts.arg("moe_a2a_backend", "none") == "none"
    chosen = set_by_user(facts, "enforce_disable_flashinfer_allreduce_fusion")
    why = _fusion_obstacles(facts)
    if not why or not (asked or plain) or (chosen and not asked):
        return None
    return {"why": ", and ".join(why)}


def _fusion_multicast(facts: Facts) -> Verdict:
    fused = facts.arg(FUSION) is not None and facts.arg("tp_size", 1) > 1
    if not fused or _fusion_obstacles(facts):
        return None
    return {"name": facts.gpu_name} if facts.gpu_name.endswith(WITHOUT_MULTICAST) else None


def _single_rank_deepep(facts: Facts) -> Verdict:
    ranks = facts.arg("tp_size", 1)
    return facts.arg("moe_a2a_backend", "none") == "deepep" and ranks == 1


def _missing_module(facts: Facts) -> Verdict:
    needed = {
        "--moe-a2a-backend": A2A_MODULES.get(facts.arg("moe_a2a_backend", "none")),
        "--disaggregation-transfer-backend": None
        if facts.arg("disaggregation_mode", "null") == "null"
        else TRANSFER_MODULES.get(facts.arg("disaggregation_transfer_backend")),
        "--hicache-storage-backend": TRANSFER_MODULES.get(facts.arg("hicache_storage_backend")),
    }
    for option, module in needed.items():
        if module is not None and module not in facts.modules:
            return {"option": option, "module": module, "package": PACKAGES[module]}
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        id="allreduce-fusion-off",
        title="the all-reduce is fused with the norm after it",
        severity=WARN,
        reads=("args", "capability"),
        condition=_fusion_off,
        message="FlashInfer's fused all-reduce + RMSNorm will not run: {why}",
        cure="expect one kernel more at each of the 156 sums of a step, or change that option",
        symptom="No message, or one INFO line; a decode step takes longer than published.",
        cause="SGLang enables the fusion by itself where all its conditions hold, and says nothing "
        "where one does not.",
        source=("SGLang's overrides.py and layer_boundary", "sgl-project/sglang#30875"),
    ),
    Rule(
        id="allreduce-fusion-multicast",
        title="the fused all-reduce has NVLink multicast",
        severity=WARN,
        reads=("args", "gpu_name", "capability"),
        condition=_fusion_multicast,
        message="the fused all-reduce needs NVLink multicast, which {name} has not",
        cure="give --enforce-disable-flashinfer-allreduce-fusion",
        symptom="A crash, or an invalidated capture of CUDA graphs, at start.",
        cause="Its workspace is bound to a multicast object of NVSwitch.",
        source=(
            "vllm-project/vllm#48071",
            "vllm-project/vllm#55973",
            "vllm-project/vllm#48324",
            "radixark/miles#935",
        ),
    ),
    Rule(
        id="deepep-single-rank",
        title="DeepEP has more than one rank",
        severity=FAIL,
        reads=("args",),
        condition=_single_rank_deepep,
        message="--moe-a2a-backend deepep with one rank: DeepEP has no group of that size",
        cure="leave out --moe-a2a-backend, or use --tp-size 2 or more",
        symptom="`Unsupported number of EP ranks: 1` while the first batch runs.",
        cause="Its kernels are compiled for groups of 2 and more.",
        source=("measured on one H200",),
    ),
    Rule(
        id="module-missing",
        title="what the options need is installed",
        severity=FAIL,
        reads=("args", "modules"),
        condition=_missing_module,
        message="{option} needs the module {module}, which is not installed",
        cure="pip install {package} (for your CUDA), or choose another backend",
        symptom="An ImportError in a scheduler, after the weights were read.",
        cause="SGLang imports these where they are used first.",
        source=("sgl-project/sglang#22676", "SGLang's dispatchers and transfer backends"),
    ),
    Rule(
        id="deepgemm-not-compiled",
        title="DeepGEMM's kernels are compiled before requests come",
        severity=WARN,
        reads=("environment", "args"),
        condition=lambda facts: (
            on_gpu(facts) and not switched_on(facts, "SGLANG_JIT_DEEPGEMM_PRECOMPILE", True)
        ),
        message="SGLANG_JIT_DEEPGEMM_PRECOMPILE is off: kernels are compiled while requests wait",
        cure="unset it, or warm the server up with every length before it takes traffic",
        symptom="The first turns take minutes; NCCL timeouts while one rank compiles.",
        cause="DeepGEMM compiles a kernel for each shape that it meets first.",
        source=(
            "anthony-chaudhary/fak#3051",
            "sgl-project/sglang#29170",
            "sgl-project/sglang#9867",
        ),
    ),
)
