"""docs/troubleshooting.md is written from the rules; docs/known-issues.md names rules and
tests that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import sglang_glm53.checks
from sglang_glm53.checks.document import document, link
from sglang_glm53.checks.rules import ALL

DOCS = Path(__file__).resolve().parents[2] / "docs"
CHECKS = Path(sglang_glm53.checks.__file__).parent
IDS = {rule.id for rules in ALL.values() for rule in rules}
# Options of the doctor's own and of other programs, and old spellings that rules tell about.
NOT_SGLANG = {"force-reinstall", "no-deps", "model", "dp", "gpu", "gpus"}
OLD = {"cuda-graph-max-bs", "enable-dsa-prefill-context-parallel"}


def test_troubleshooting_is_what_the_rules_say() -> None:
    assert (DOCS / "troubleshooting.md").read_text() == document(), (
        "run: python -m sglang_glm53.checks.document docs/troubleshooting.md"
    )


def test_every_rule_has_an_entry_with_its_source() -> None:
    page = document()
    for rules in ALL.values():
        for rule in rules:
            entry = page.split(f"### {rule.id}\n")[1].split("\n### ")[0]
            for word in ("- Symptom: ", "- Cause: ", "- Cure: ", "- Source: "):
                assert word in entry, f"{rule.id} lacks {word}"
            assert all(link(source) in entry for source in rule.source)


def test_a_thread_becomes_a_link_and_other_text_stays() -> None:
    assert link("vllm-project/vllm#12") == (
        "[vllm-project/vllm#12](https://github.com/vllm-project/vllm/issues/12)"
    )
    assert link("SGLang's source") == "SGLang's source"


STATUSES = ("fixed here", "caught", "stands", "not reproducible")
ROOT = DOCS.parent


def _rows(columns: int) -> Iterator[list[str]]:
    """The rows of docs/known-issues.md that have so many columns, headings left out."""
    for line in (DOCS / "known-issues.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] not in ("Reported", "Status"):
            assert len(cells) in (3, 4), line
            if len(cells) == columns:
                yield cells


def _rules_named(text: str) -> set[str]:
    return set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", text))


def _tests_named(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)


def test_each_reported_problem_has_one_status_and_what_proves_it() -> None:
    rows = list(_rows(4))
    assert len(rows) > 55
    for what, threads, status, why in rows:
        assert threads, what
        assert status in STATUSES, f"{what}: {status}"
        assert _rules_named(why) <= IDS, f"{what}: no such rule: {_rules_named(why) - IDS}"
        for file, name in _tests_named(why):
            assert f"def {name}(" in (ROOT / file).read_text(), f"{what}: no {name} in {file}"
        assert why.count("::") == len(_tests_named(why)), f"{what}: a test's name cannot be read"
        if status == "fixed here":
            assert _tests_named(why), f"{what}: which test shows it?"
        elif status == "caught":
            assert _rules_named(why), f"{what}: which rule?"
        elif status == "not reproducible":
            assert "Tried: " in why and _tests_named(why), f"{what}: what was tried?"
        else:
            assert len(why) > 15, f"{what}: why?"


def test_the_counts_of_the_statuses_are_right() -> None:
    statuses = [status for _, _, status, _ in _rows(4)]
    told = {name: int(count) for name, count, _ in _rows(3)}
    assert told == {status: statuses.count(status) for status in STATUSES}


# --- the rules speak of what SGLang has ----------------------------------------------------------


@pytest.fixture(scope="module")
def fields() -> set[str]:
    """Names of the installed SGLang's server arguments, from its sources: importing it is slow."""
    spec = find_spec("sglang")
    if spec is None:
        pytest.skip("SGLang is not installed")
    folder = Path(spec.submodule_search_locations[0], "srt", "arg_groups", "fields")
    names: set[str] = set()
    for path in folder.glob("*.py"):
        names.update(re.findall(r"^    (\w+):", path.read_text(), re.MULTILINE))
    assert {"page_size", "tp_size", "kv_cache_dtype"} <= names
    return names


def test_every_option_that_a_rule_names_is_sglangs(fields: set[str]) -> None:
    text = "\n".join(
        " ".join((rule.message, rule.cure, rule.symptom))
        for rules in ALL.values()
        for rule in rules
    )
    options = set(re.findall(r"--([a-z][a-z0-9-]+)", text)) - NOT_SGLANG - OLD
    assert {name for name in options if name.replace("-", "_") not in fields} == set()


def test_every_argument_that_a_rule_reads_is_sglangs(fields: set[str]) -> None:
    read: set[str] = set()
    for path in CHECKS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _called(node) in ("arg", "written", "set_by_user"):
                read.update(
                    value.value
                    for value in node.args[:2]
                    if isinstance(value, ast.Constant)
                    and isinstance(value.value, str)
                    and value.value.count("_")
                    and " " not in value.value
                )
    assert len(read) > 30
    assert read - fields == set()


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))
