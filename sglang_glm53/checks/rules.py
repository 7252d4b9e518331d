"""All rules, in the order in which they are shown."""

from __future__ import annotations

from sglang_glm53.checks import (
    chat,
    checkpoint_rules,
    collectives,
    config,
    features,
    flags,
    hicache,
    kernels,
    kv,
    loading,
    memory_rules,
    mtp,
    parallel,
    target,
    versions,
)
from sglang_glm53.checks.rule import Rule

# Subjects, as the documentation names them.
SUBJECTS: dict[str, tuple[Rule, ...]] = {
    "The question": target.RULES,
    "Versions": versions.RULES,
    "Kernel packages": kernels.RULES,
    "Loading": loading.RULES,
    "Config and tokenizer": config.RULES,
    "Command line": flags.RULES,
    "Features": features.RULES,
    "Ranks": parallel.RULES,
    "Collectives": collectives.RULES,
    "Memory": memory_rules.RULES,
    "KV cache": kv.RULES,
    "MTP": mtp.RULES,
    "Hierarchical cache": hicache.RULES,
    "Chat": chat.RULES,
}

# What `glm53 check` holds a checkpoint's folder against.
CHECKPOINT: tuple[Rule, ...] = (
    *(rule for rule in loading.RULES if rule.id == "other-architecture"),
    *(rule for rule in config.RULES if not {"args", "argv"} & set(rule.reads)),
    *checkpoint_rules.RULES,
)

RULES: tuple[Rule, ...] = tuple(rule for rules in SUBJECTS.values() for rule in rules)
# Every rule with words of its own: those of the documentation.
ALL: dict[str, tuple[Rule, ...]] = {**SUBJECTS, "Checkpoint files": checkpoint_rules.RULES}

AT_START: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.at_start)
