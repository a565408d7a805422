"""Tests skip, with the reason, where a program that they need was never installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ATTACKS = "plugins/rewards/tests/attacks/test_attacks_on_reach.py"
SELECTION = (
    "core/tests/checkpoint/test_checkpoint_store.py::test_a_disk_that_is_really_full",
    "plugins/rewards/tests/test_sandbox.py::test_a_command_runs_as_well",
    f"{ATTACKS}::test_the_environment_holds_nothing_of_ours",
)
"""A test of each fixture that starts another program."""


@pytest.fixture(scope="module")
def report(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[ET.Element]:
    """Each test of the selection as it ran where PATH has no program."""
    empty, report = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("report") / "r.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = {**os.environ, "PATH": str(empty)}
    subprocess.run(
        [*command, *SELECTION], cwd=root, env=environment, check=False, capture_output=True
    )
    return list(ET.parse(report).iter("testcase"))


def test_no_test_fails_where_the_programs_are_missing(report) -> None:
    assert {case.get("name", "").split("[")[0] for case in report} == {
        name.rpartition("::")[2] for name in SELECTION
    }
    assert [case.get("name") for case in report if case.find("skipped") is None and len(case)] == []


@pytest.mark.parametrize("program", ["bwrap", "mount"])
def test_the_reason_of_a_skip_names_the_program(report, program) -> None:
    reasons = [skipped.get("message", "") for case in report for skipped in case.iter("skipped")]
    assert any(
        re.search(rf"\b{program}(, which)? is not installed", reason) for reason in reasons
    ), reasons
