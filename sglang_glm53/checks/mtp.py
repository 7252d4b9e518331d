"""Rules on speculation with the checkpoint's MTP layer."""

from __future__ import annotations

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.reading import attention_groups, mtp, on_gpu, set_by_user, written
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict

STEPS, TOPK, TOKENS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
DEFAULT_REQUESTS = 48  # what SGLang takes with speculation where --max-running-requests is unset
DEEP = 4  # steps from which a busy server verifies mostly tokens that are thrown away


def _no_layer(facts: Facts) -> Verdict:
    return mtp(facts) and facts.config.num_nextn_predict_layers == 0


def _tree(facts: Facts) -> Verdict:
    topk = facts.arg(TOPK, 1)
    if not mtp(facts) or topk <= 1:
        return None
    shares = facts.config.index_share_for_mtp_iteration
    return {
        "topk": topk,
        "why": "the draft's steps cannot share a selection (index_share_for_mtp_iteration), and "
        if shares
        else "",
    }


def _half_given(facts: Facts) -> Verdict:
    if not mtp(facts) or facts.arg("speculative_adaptive") or written(facts, STEPS) is not None:
        return None
    names = [name for name in (TOPK, TOKENS) if written(facts, name) is not None]
    options = " and ".join("--" + name.replace("_", "-") for name in names)
    return {"options": options} if names else None


def _default_steps(facts: Facts) -> Verdict:
    chosen = any([set_by_user(facts, name) for name in (STEPS, TOPK, TOKENS)])
    if not mtp(facts) or chosen or facts.arg("speculative_adaptive"):
        return None
    # Attention groups are what throughput deployments have.
    good = (1, 1, 2) if attention_groups(facts) > 1 else (5, 1, 6)
    return {
        "now": f"{facts.arg(STEPS, 3)}-{facts.arg(TOPK, 1)}-{facts.arg(TOKENS, 4)}",
        "steps": good[0],
        "topk": good[1],
        "tokens": good[2],
    }


def _adjusted_tokens(facts: Facts) -> Verdict:
    steps, tokens = written(facts, STEPS), written(facts, TOKENS)
    if not mtp(facts) or facts.arg(TOPK, 1) != 1 or not isinstance(steps, int):
        return None
    if not isinstance(tokens, int) or tokens == steps + 1:
        return None
    return {"tokens": tokens, "right": steps + 1, "steps": steps}


def _few_requests(facts: Facts) -> Verdict:
    """One group serves few requests with short latency, as the limit has it."""
    groups, requests = attention_groups(facts), facts.arg("max_running_requests")
    if not mtp(facts) or groups == 1 or set_by_user(facts, "max_running_requests"):
        return None
    if requests not in (None, DEFAULT_REQUESTS) or not on_gpu(facts):
        return None
    return {"requests": DEFAULT_REQUESTS, "each": DEFAULT_REQUESTS // groups, "groups": groups}


def _deep_on_a_busy_server(facts: Facts) -> Verdict:
    steps, groups = facts.arg(STEPS, 3), attention_groups(facts)
    if not mtp(facts) or groups == 1 or steps < DEEP:
        return None
    return {"steps": steps, "groups": groups, "tokens": facts.arg(TOKENS, steps + 1)}


def _mixed_chunks(facts: Facts) -> Verdict:
    asked = facts.arg("enable_mixed_chunk") or written(facts, "enable_mixed_chunk")
    return mtp(facts) and bool(asked)


def _simulated(facts: Facts) -> Verdict:
    length = facts.environment.get("SGLANG_SIMULATE_ACC_LEN")
    try:
        on = length is not None and float(length) > 0
    except ValueError:
        return None
    return {"length": length} if on else None


RULES: tuple[Rule, ...] = (
    Rule(
        id="mtp-without-layer",
        title="the checkpoint has the MTP layer that drafts",
        severity=FAIL,
        reads=("args", "config"),
        condition=_no_layer,
        message="MTP is asked for, and config.json says num_nextn_predict_layers 0",
        cure="use a checkpoint with the MTP layer (layer 78), or leave out --speculative-algorithm",
        symptom="Stock SGLang drafts with an uninitialised layer: accept length 1.",
        cause="A conversion left the layer out; a missing tensor is no error there.",
        source=("vllm-project/vllm#46075", "SGLang's deepseek_weight_loader.py, tried"),
    ),
    Rule(
        id="mtp-tree",
        title="MTP drafts a chain, not a tree",
        severity=FAIL,
        reads=("args", "config"),
        condition=_tree,
        message="--speculative-eagle-topk {topk}: {why}sparse attention verifies a chain only",
        cure="use --speculative-eagle-topk 1",
        symptom="A ValueError at start; in older SGLang, index keys moved to wrong slots and a "
        "falling accept length.",
        cause="Rows of a tree are reordered between steps, and pages of 64 tokens cannot hold its "
        "branches.",
        source=("SGLang's eagle_worker_v2.py and speculative_hook.py", "ROCm/ATOM#1362"),
    ),
    Rule(
        id="mtp-half-given",
        title="MTP's three numbers are given together",
        severity=FAIL,
        reads=("argv", "args"),
        condition=_half_given,
        message="{options} without --speculative-num-steps",
        cure="give --speculative-num-steps, --speculative-eagle-topk and "
        "--speculative-num-draft-tokens together, or none",
        symptom="A bare AssertionError at start.",
        cause="SGLang chooses all three or none.",
        source=("SGLang's speculative_hook.py",),
        at_start=False,
    ),
    Rule(
        id="mtp-default-steps",
        title="MTP's depth was chosen",
        severity=WARN,
        reads=("args", "given"),
        condition=_default_steps,
        message="MTP runs with SGLang's default {now}, which fits neither few nor many requests",
        cure="give --speculative-num-steps {steps} --speculative-eagle-topk {topk} "
        "--speculative-num-draft-tokens {tokens}",
        symptom="Throughput a third below the published one at few requests (5-1-6 against 3-1-4).",
        cause="The default is one for a dozen models.",
        source=("sgl-project/sglang#28448", "SGLang's GLM-5.3 cookbook"),
    ),
    Rule(
        id="mtp-tokens-adjusted",
        title="MTP verifies what it drafts",
        severity=WARN,
        reads=("argv", "args"),
        condition=_adjusted_tokens,
        message="--speculative-num-draft-tokens {tokens} is replaced by {right}",
        cure="give {right}: {steps} drafted tokens and one that is certain",
        symptom="Another number than the one that was given, after a WARNING line.",
        cause="A chain of drafts has one length.",
        source=("SGLang's speculative_hook.py",),
        at_start=False,
    ),
    Rule(
        id="mtp-few-requests",
        title="the number of running requests was chosen",
        severity=WARN,
        reads=("args", "given"),
        condition=_few_requests,
        message="with speculation SGLang runs {requests} requests: {each} for each of {groups} "
        "attention groups",
        cure="give --max-running-requests (published recipes: 256)",
        symptom="Requests queue while the GPUs have room; throughput stops growing early.",
        cause="SGLang sets the limit where it is not given.",
        source=("SGLang's speculative_hook.py", "SGLang's GLM-5.3 cookbook"),
    ),
    Rule(
        id="mtp-deep-with-groups",
        title="MTP's depth fits a busy server",
        severity=WARN,
        reads=("args",),
        condition=_deep_on_a_busy_server,
        message="{groups} attention groups draft {steps} tokens: each request brings {tokens} rows "
        "to every step",
        cure="use 1-1-2 (or 2-1-3 with NVFP4) for throughput, or serve without attention groups "
        "for latency",
        symptom="Throughput below that without MTP.",
        cause="A busy server is bound by rows, and rejected rows are paid for.",
        source=("SGLang's GLM-5.3 cookbook",),
    ),
    Rule(
        id="mtp-mixed-chunks",
        title="mixed chunks are not asked for with MTP",
        severity=WARN,
        reads=("args",),
        condition=_mixed_chunks,
        message="--enable-mixed-chunk has no effect with MTP",
        cure="leave it out",
        symptom="A WARNING line, and prefill and decode alternate.",
        cause="A mixed pass would decode one token without drafts.",
        source=("SGLang's speculative_hook.py",),
        at_start=False,
    ),
    Rule(
        id="mtp-simulated",
        title="no accept length is simulated",
        severity=WARN,
        reads=("environment",),
        condition=_simulated,
        message="SGLANG_SIMULATE_ACC_LEN is {length}: drafts are accepted unread, and the text is "
        "wrong",
        cure="unset it; it is for benchmarks",
        symptom="Fluent beginnings, then repeated or broken text; a constant accept length.",
        cause="A benchmark's variable was left in the environment.",
        source=("SGLang's environ.py", "SGLang's GLM-5.2 cookbook (its benchmarks)"),
    ),
)
