"""Each rule on the smallest facts that trigger it, and on the nearest that do not."""

from __future__ import annotations

import importlib.util
import string

import pytest
from doctor_examples import EXAMPLES

from sglang_glm53.checks import engine
from sglang_glm53.checks.engine import PASS, SKIPPED
from sglang_glm53.checks.facts import UNKNOWN, Facts
from sglang_glm53.checks.rule import FAIL, WARN, Rule
from sglang_glm53.checks.rules import ALL

if importlib.util.find_spec("doctor_examples_memory") is not None:
    from doctor_examples_memory import EXAMPLES as MEMORY

    EXAMPLES = {**EXAMPLES, **MEMORY}

RULES: dict[str, Rule] = {rule.id: rule for rules in ALL.values() for rule in rules}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def test_each_rule_has_an_example_and_each_example_a_rule() -> None:
    assert sorted(EXAMPLES) == sorted(RULES)
    assert len(RULES) == sum(len(rules) for rules in ALL.values()), "an id stands twice"


@every_rule
def test_triggers_on_its_example(rule: Rule) -> None:
    example = EXAMPLES[rule.id]
    result = engine.check(rule, Facts.only(**example.bad))
    assert result.status == rule.severity
    line = f"{result.message}; {result.cure}"
    assert all(word in line for word in example.words), line
    assert "\n" not in line
    assert result.message.strip() and result.cure.strip()


@every_rule
def test_passes_beside_its_example(rule: Rule) -> None:
    assert engine.check(rule, Facts.only(**EXAMPLES[rule.id].good)).status == PASS


@every_rule
def test_is_skipped_where_a_fact_is_unknown(rule: Rule) -> None:
    said = EXAMPLES[rule.id].bad
    for name in rule.reads:
        # These follow from raw_config.
        follow = ("config", "config_problem", "quantization", "precision")
        sources = dict.fromkeys(follow, "raw_config")
        if name in said or sources.get(name) in said:
            rest = {n: v for n, v in said.items() if n != sources.get(name, name)}
            result = engine.check(rule, Facts.only(**rest))
            assert result.status == SKIPPED
            assert result.message in UNKNOWN.values()


@every_rule
def test_is_written_in_full(rule: Rule) -> None:
    assert rule.severity in (FAIL, WARN)
    assert set(rule.reads) <= set(UNKNOWN) and rule.reads
    assert rule.id == rule.id.lower() and " " not in rule.id
    words = (rule.title, rule.message, rule.cure, rule.symptom, rule.cause)
    assert all(words) and rule.source and all(rule.source)
    assert rule.symptom.endswith(".") and rule.cause.endswith(".")
    assert not rule.message.endswith(".") and not rule.cure.endswith(".")
    for text in (rule.message, rule.cure):
        names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        assert all(name.isidentifier() for name in names)
