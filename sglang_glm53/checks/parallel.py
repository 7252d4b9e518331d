"""Rules on ranks: tensor, expert, data, pipeline and context parallelism, and their collectives."""

from __future__ import annotations

from sglang_glm53 import support
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.features import situation
from sglang_glm53.checks.reading import (
    attention_groups,
    blackwell,
    hopper,
    mtp,
    on_gpu,
    set_by_user,
    switched_on,
)
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict
from sglang_glm53.errors import Glm53Error

FUSION = "flashinfer_allreduce_fusion_backend"
CONTEXT_PARALLEL_RANKS = 8  # beyond one machine its sums lose accuracy
# GPUs whose NVLink is bridged or absent, by a word of their names.
WITHOUT_MULTICAST = ("NVL", "PCIe", "PCIE")
TRANSFER_MODULES = {"mooncake": "mooncake", "nixl": "nixl"}
A2A_MODULES = {"deepep": "deep_ep", "mooncake": "mooncake", "nixl": "nixl", "pplx": "pplx_kernels"}
PACKAGES = {
    "mooncake": "mooncake-transfer-engine",
    "nixl": "nixl",
    "deep_ep": "sgl-deep-ep",
    "pplx_kernels": "pplx-kernels",
}


def _uneven(facts: Facts) -> Verdict:
    try:
        support.check_ranks(situation(facts), facts.config)
    except Glm53Error as error:
        what, _, todo = str(error).rpartition("; ")
        return {"what": what, "do": todo}
    return None


def _too_few_gpus(facts: Facts) -> Verdict:
    """`dp_size` beside attention groups counts whole copies of the model."""
    if not on_gpu(facts):
        return None
    ranks = facts.arg("tp_size", 1) * facts.arg("pp_size", 1)
    copies = 1 if facts.arg("enable_dp_attention") else facts.arg("dp_size", 1)
    needed = -(-ranks * copies // facts.arg("nnodes", 1))
    if needed <= facts.gpus:
        return None
    return {
        "needed": needed,
        "has": facts.gpus,
        "why": f"{copies} copies of {ranks} ranks" if copies > 1 else f"{ranks} ranks",
        "do": "for attention data parallelism give --attn-dp-size, not --dp-size"
        if copies > 1
        else "use fewer ranks, or more machines (--nnodes)",
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
    if facts.arg("tp_size", 1) == 1 or not on_gpu(facts):
        return None
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


def _uneven_groups_with_mtp(facts: Facts) -> Verdict:
    groups, ranks = attention_groups(facts), facts.arg("tp_size", 1)
    if not mtp(facts) or not 1 < groups < ranks or facts.arg("nnodes", 1) == 1:
        return None
    return {"groups": groups, "ranks": ranks}


def _context_parallel(facts: Facts) -> Verdict:
    if not facts.arg("enable_prefill_cp"):
        return None
    ranks = facts.arg("tp_size", 1)
    if ranks > CONTEXT_PARALLEL_RANKS:
        return {
            "what": f"it takes {CONTEXT_PARALLEL_RANKS} ranks at most, and --tp-size is {ranks}",
            "do": f"use --tp-size {CONTEXT_PARALLEL_RANKS} or less",
        }
    if facts.arg("disaggregation_mode", "null") == "decode":
        return {"what": "a decode server has no prefill", "do": "leave out --enable-prefill-cp"}
    return None


def _decode_context_parallel(facts: Facts) -> Verdict:
    if facts.arg("dcp_size", 1) <= 1:
        return None
    obstacles = (
        (facts.arg("enable_hierarchical_cache"), "--enable-hierarchical-cache"),
        (facts.arg("enable_hisparse"), "--enable-hisparse"),
        (facts.arg("disaggregation_mode", "null") != "null", "--disaggregation-mode"),
        (facts.arg("speculative_eagle_topk", 1) != 1, "--speculative-eagle-topk above 1"),
    )
    names = [name for holds, name in obstacles if holds]
    return {"names": " and ".join(names)} if names else None


def _shares_indices(facts: Facts) -> bool:
    return len(facts.config.full_layers) < facts.config.num_hidden_layers


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


def _no_address(facts: Facts) -> Verdict:
    nodes = facts.arg("nnodes", 1)
    return {"nodes": nodes} if nodes > 1 and not facts.arg("dist_init_addr") else None


def _small_chunks(facts: Facts) -> Verdict:
    chunk, groups = facts.arg("chunked_prefill_size", -1), attention_groups(facts)
    if groups == 1 or not 0 < chunk < 2048 or not on_gpu(facts):
        return None
    return {"chunk": chunk, "groups": groups, "needed": 4096 * groups}


RULES: tuple[Rule, ...] = (
    Rule(
        id="ranks-uneven",
        title="the ranks share heads, experts and MLPs evenly",
        severity=FAIL,
        reads=("args", "config"),
        condition=_uneven,
        message="{what}",
        cure="{do}",
        symptom="An assertion while the model is built; on a CPU a padded config that the "
        "checkpoint does not fit.",
        cause="A rank holds whole heads, whole experts and equal slices.",
        source=("SGLang's linear layers",),
        at_start=False,
    ),
    Rule(
        id="ranks-without-gpus",
        title="there is a GPU for each rank",
        severity=FAIL,
        reads=("args", "gpus"),
        condition=_too_few_gpus,
        message="{why} need {needed} GPUs a machine; there are {has}",
        cure="{do}",
        symptom="`invalid device ordinal`, or a hang while the ranks wait for each other.",
        cause="Without attention groups --dp-size counts whole copies of the model.",
        source=("SGLang's parallel_hook.py",),
    ),
    Rule(
        id="nodes-without-address",
        title="several machines know where to meet",
        severity=FAIL,
        reads=("args",),
        condition=_no_address,
        message="--nnodes {nodes} without --dist-init-addr",
        cure="give every machine --dist-init-addr HOST:PORT of the first one, and --node-rank",
        symptom="The server waits, then ends with a timeout of the process group.",
        cause="Each machine would wait at an address of its own.",
        source=("SGLang's documentation on several nodes",),
    ),
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
        id="mtp-with-uneven-groups",
        title="attention groups and MTP fit across machines",
        severity=WARN,
        reads=("args",),
        condition=_uneven_groups_with_mtp,
        message="{groups} attention groups of {ranks} ranks over several machines with MTP were "
        "reported to fail",
        cure="use --attn-dp-size {ranks}, or 1, or leave out MTP",
        symptom="Errors of the draft in the first requests.",
        cause="Not known; the thread ended without one.",
        source=("sgl-project/sglang#31384",),
    ),
    Rule(
        id="prefill-cp-limits",
        title="prefill context parallelism keeps its limits",
        severity=FAIL,
        reads=("args",),
        condition=_context_parallel,
        message="--enable-prefill-cp: {what}",
        cure="{do}",
        symptom="An assertion at start; across machines, wrong answers.",
        cause="Its gathers are exact within one machine only.",
        source=("sgl-project/sglang#20531", "sgl-project/sglang#32098", "SGLang's deepseek_v2.py"),
    ),
    Rule(
        id="prefill-cp-untested-gpu",
        title="prefill context parallelism runs where it was verified",
        severity=WARN,
        reads=("args", "capability"),
        condition=lambda facts: bool(facts.arg("enable_prefill_cp")) and not hopper(facts),
        message="SGLang verified --enable-prefill-cp with sparse attention on Hopper alone",
        cure="compare answers with and without it before you rely on it",
        symptom="Illegal memory access, or garbage above one chunk.",
        cause="RoPE positions and padded rows differ between ranks on some paths.",
        source=(
            "sgl-project/sglang#20531",
            "sgl-project/sglang#20360",
            "sgl-project/sglang#28463",
        ),
    ),
    Rule(
        id="decode-cp-limits",
        title="decode context parallelism keeps its limits",
        severity=FAIL,
        reads=("args",),
        condition=_decode_context_parallel,
        message="--dcp-size above 1 does not go with {names}",
        cure="leave out one of them",
        symptom="A ValueError at start.",
        cause="Their copies of the cache know one owner of a page.",
        source=("SGLang's deepseek_v2.py", "sgl-project/sglang#38207"),
    ),
    Rule(
        id="two-batch-overlap",
        title="two-batch overlap is off where layers share selections",
        severity=FAIL,
        reads=("args", "config"),
        condition=lambda facts: bool(
            facts.arg("enable_two_batch_overlap") and _shares_indices(facts)
        ),
        message="--enable-two-batch-overlap does not carry selections from layer to layer, and "
        "GLM-5.3's layers share them",
        cure="leave it out",
        symptom="A ValueError at start.",
        cause="The overlapped path runs each layer without what the layer above selected.",
        source=("SGLang's model_hook.py",),
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
        source=("sgl-project/sglang#28893", "sgl-project/sglang#22676"),
    ),
    Rule(
        id="small-prefill-chunks",
        title="a rank's prefill chunk is not small",
        severity=WARN,
        reads=("args",),
        condition=_small_chunks,
        message="a rank prefills {chunk} tokens at a time: --chunked-prefill-size is split over "
        "{groups} attention groups",
        cure="give --chunked-prefill-size {needed} (published recipes: 32768)",
        symptom="Time to first token two to three times the published one, throughput a third "
        "lower.",
        cause="Small chunks read every expert's weights for few tokens.",
        source=("SGLang's GLM-5.2 cookbook (2048 against 32768)", "SGLang's parallel_hook.py"),
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
