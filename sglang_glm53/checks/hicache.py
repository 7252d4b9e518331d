"""Rules on the hierarchical cache: pages that leave the GPU and come back."""

from __future__ import annotations

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.reading import mtp
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict


def _draft_without_host_copy(facts: Facts) -> Verdict:
    """SGLang keeps the MTP layer's keys as one more layer of the target's host pools."""
    if not facts.arg("enable_hierarchical_cache") or not mtp(facts):
        return None
    target, draft = facts.arg("kv_cache_dtype"), facts.arg("speculative_draft_kv_cache_dtype")
    if {draft, target} & {None, "auto"} or _plain(draft) == _plain(target):
        return None
    return {"draft": draft, "target": target}


def _plain(dtype: str) -> str:
    return "bfloat16" if dtype == "bf16" else dtype


def _storage_with_mtp(facts: Facts) -> Verdict:
    backend = facts.arg("hicache_storage_backend")
    return {"backend": backend} if backend and mtp(facts) else None


def _storage(facts: Facts) -> Verdict:
    backend = facts.arg("hicache_storage_backend")
    return {"backend": backend} if backend and not mtp(facts) else None


RULES: tuple[Rule, ...] = (
    Rule(
        id="hicache-draft-copy",
        title="every pool of the cache has a copy on the host",
        severity=FAIL,
        reads=("args",),
        condition=_draft_without_host_copy,
        message="the hierarchical cache packs the draft's layer into the target's host pools, and "
        "the draft's cache is {draft} where the target's is {target}",
        cure="leave out --speculative-draft-kv-cache-dtype",
        symptom="A ValueError after the weights were read. SGLang before the fix restored the "
        "target alone: accept length fell from 4.5 to 1.6 once evicted pages came back.",
        cause="Four pools hold a token: the latents and index keys of the target and of the draft. "
        "A page that comes back without all four is stale in the others.",
        source=(
            "sgl-project/sglang#32176",
            "sgl-project/sglang#30393",
            "sgl-project/sglang#38031",
            "sgl-project/sglang#39692",
        ),
    ),
    Rule(
        id="hicache-storage-draft",
        title="a storage tier keeps the draft's cache too",
        severity=WARN,
        reads=("args",),
        condition=_storage_with_mtp,
        message="pages from --hicache-storage-backend {backend} may lack the draft's keys",
        cure="watch `glm53 status`: an accept length near 1 after hits says so; leave out the "
        "storage, or MTP",
        symptom="Time per token grows by half after hits in the storage (107 to 164 ms).",
        cause="The storage's pages were the target's alone; the fix is open.",
        source=("sgl-project/sglang#28895", "sgl-project/sglang#28896"),
    ),
    Rule(
        id="hicache-storage-crash",
        title="a storage tier under sparse attention is known to be stable",
        severity=WARN,
        reads=("args",),
        condition=_storage,
        message="--hicache-storage-backend {backend} with sparse attention was reported to crash",
        cure="try eviction and reload under load before you rely on it",
        symptom="The scheduler ends when pages come from the storage.",
        cause="Not known; the thread is open.",
        source=("sgl-project/sglang#22757",),
    ),
)
