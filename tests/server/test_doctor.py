"""The doctor's rules inside the start of a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .test_fail_loud import run_to_its_end

pytestmark = pytest.mark.server("alone")

TWO_MACHINES = ("--nnodes", "2", "--node-rank", "0", "--dist-timeout", "5")


def test_a_failure_ends_the_server_with_one_line_and_a_warning_is_logged_once(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """SGLang itself would wait for the second machine."""
    ended = run_to_its_end(tiny_checkpoint(), *TWO_MACHINES)
    assert ended.code == 1
    assert ended.line.startswith("sglang-glm53: --nnodes 2 without --dist-init-addr; ")
    assert ended.line.endswith("[nodes-without-address]")
    assert ended.output.count("[tool-call-parser]") == 1
    assert "Traceback" not in ended.output


def test_doctor_warn_lets_the_server_go_on(tiny_checkpoint: Callable[..., Path]) -> None:
    """It then fails where SGLang does, after the warning."""
    ended = run_to_its_end(tiny_checkpoint(), *TWO_MACHINES, GLM53_DOCTOR="warn")
    assert ended.code != 0
    assert ended.output.count("[nodes-without-address]") == 1
    assert not any(line.startswith("sglang-glm53: --nnodes") for line in ended.output.splitlines())


def test_another_value_of_the_variable_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    ended = run_to_its_end(tiny_checkpoint(), GLM53_DOCTOR="no")
    assert ended.code == 1 and 'GLM53_DOCTOR is "no"' in ended.line
