"""What several rules ask of the facts."""

from __future__ import annotations

from typing import Any

from sglang_glm53.checks.arguments import as_written
from sglang_glm53.checks.facts import Facts

HOPPER = (9, 0)
MTP = ("EAGLE", "NEXTN")


def architectures(facts: Facts) -> list[str]:
    """What config.json calls the model."""
    named = facts.raw_config.get("architectures") or []
    return [str(name) for name in (named if isinstance(named, list) else [named])]


def on_gpu(facts: Facts) -> bool:
    """Whether the server runs on a GPU (where nothing is known: yes, as SGLang would)."""
    return str(facts.arg("device") or facts.device or "cuda") != "cpu"


def hopper(facts: Facts) -> bool:
    return facts.capability == HOPPER


def blackwell(facts: Facts) -> bool:
    """Data centre Blackwell: compute capability 10.x."""
    return facts.capability is not None and facts.capability[0] == 10


def mtp(facts: Facts) -> bool:
    """Whether the checkpoint's MTP layer drafts."""
    return facts.arg("speculative_algorithm") in MTP


def attention_groups(facts: Facts) -> int:
    """Groups of ranks that each hold other requests (attention data parallelism)."""
    groups = facts.arg("attn_dp_size", 1)
    if facts.arg("enable_dp_attention"):
        groups = max(groups, facts.arg("dp_size", 1))
    return groups


def local_heads(facts: Facts) -> int:
    """Query heads of one rank."""
    context = facts.arg("attn_cp_size", 1)
    ranks = max(1, facts.arg("tp_size", 1) // attention_groups(facts) // context)
    return facts.config.num_attention_heads // ranks


def written(facts: Facts, name: str) -> Any:
    """What the user wrote for a field; None where it was not written, or is not known."""
    return as_written(facts.argv or ()).get(name)


def set_by_user(facts: Facts, name: str) -> bool:
    return name in (facts.given or ())


def switched_on(facts: Facts, name: str, default: bool) -> bool:
    """A boolean variable of SGLang's, as it reads them."""
    value = (facts.environment or {}).get(name)
    return default if value is None else value.lower() in ("true", "1", "yes", "y")


def older(version: str, than: str) -> bool:
    """Whether a version comes before another."""
    from packaging.version import Version

    return Version(version) < Version(than)


def satisfies(version: str, specifier: str) -> bool:
    """Whether a version is one that a requirement ("==2.14.1") names."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def nvidia(facts: Facts) -> bool:
    """Whether an NVIDIA GPU serves, whose kernel packages then count."""
    return facts.device == "cuda" and on_gpu(facts)
