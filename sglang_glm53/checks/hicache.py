"""Rules on the hierarchical cache: pages that leave the GPU and come back."""

from __future__ import annotations

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.reading import mtp
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict


def _draft_without_host_copy(facts: Facts) -> Verdict:
    """SGLang packs an MTP draft of one layer into the target's host pool, and no other."""
    if not facts.arg("enable_hierarchical_cache") or not facts.arg("speculative_algorithm"):
        return None
    dtype = facts.arg("speculative_draft_kv_cache_dtype")
    if dtype is not None and dtype != facts.arg("kv_cache_dtype"):
        return {"why": f"the draft's cache is {dtype}, the target's is not"}
    if facts.arg("enable_multi_layer_eagle"):
        return {"why": "of several draft layers the first alone is copied"}
    if not mtp(facts):
        return {"why": f"{facts.arg('speculative_algorithm')} is no MTP layer of the checkpoint"}
    return None


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
        message="the hierarchical cache would not bring the draft's keys back whole: {why}",
        cure="let the checkpoint's MTP layer draft with the target's cache dtype, or leave out "
        "--enable-hierarchical-cache",
        symptom="Accept length falls from 4.5 to 1.6 once evicted pages come back; a flush of "
        "the cache restores it. No log line.",
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
