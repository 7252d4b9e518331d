"""Rules on ranks: tensor, expert, data, pipeline and context parallelism, and their collectives."""

from __future__ import annotations

from sglang_glm53 import support
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.features import situation
from sglang_glm53.checks.reading import (
    attention_groups,
    hopper,
    mtp,
    on_gpu,
    set_by_user,
)
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict
from sglang_glm53.errors import Glm53Error

CONTEXT_PARALLEL_RANKS = 8  # beyond one machine its sums lose accuracy


def _uneven(facts: Facts) -> Verdict:
    try:
        support.check_ranks(situation(facts), facts.config)
    except Glm53Error as error:
        what, _, todo = str(error).rpartition("; ")
        return {"what": what, "do": todo}
    return None


def _too_few_gpus(facts: Facts) -> Verdict:
    """`dp_size` beside attention groups counts whole copies of the model."""
    if not on_gpu(facts) or facts.arg("use_ray"):
        return None  # Ray takes GPUs of other machines
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


def _no_address(facts: Facts) -> Verdict:
    """Ray knows the machines; a port of the user's own may be for two servers on one machine."""
    nodes = facts.arg("nnodes", 1)
    known = facts.arg("dist_init_addr") or facts.arg("use_ray") or set_by_user(facts, "nccl_port")
    return {"nodes": nodes} if nodes > 1 and not known else None


def _small_chunks(facts: Facts) -> Verdict:
    chunk, groups = facts.arg("chunked_prefill_size", -1), attention_groups(facts)
    decodes = facts.arg("disaggregation_mode", "null") == "decode"
    if decodes or groups == 1 or not 0 < chunk < 2048 or not on_gpu(facts):
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
)
