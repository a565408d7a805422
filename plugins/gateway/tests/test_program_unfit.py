"""Findings of `dovetail check` about programs that score themselves although no reward reads the score."""

from __future__ import annotations

import pytest

from dovetail_gateway.preflight import program_unfit
from dovetail_sdk.testing import findings_of

SCORED = "rollout.agent_loop={name: program, command: 'true', score: output}"


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ((), 0),
        (("rollout.agent_loop={name: program, command: 'true'}",), 0),
        ((SCORED, "reward.function=episode"), 0),
        ((SCORED,), 1),
        ((SCORED, "reward.function=exact_match"), 1),
    ],
)
def test_a_score_that_nothing_reads_is_a_warning(overrides: tuple[str, ...], found: int) -> None:
    findings = findings_of(program_unfit, *overrides)
    assert [finding.severity for finding in findings] == ["warning"] * found


@pytest.mark.parametrize(("runtime", "found"), [("inline", 1), ("ray", 0)])
def test_processes_of_a_runtime_that_has_none_are_refused(runtime: str, found: int) -> None:
    loop = "rollout.agent_loop={name: program, command: 'true', placement: {workers: 2}}"
    findings = findings_of(program_unfit, loop, f"runtime={{name: {runtime}}}")
    assert [finding.severity for finding in findings] == ["error"] * found
