"""The numbers of the page on evidence: cases are counted as they run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITES = """
import pytest
from dovetail_algorithms.estimators.grpo import GrpoEstimator
from dovetail_sdk.testing.conformance import AdvantageConformance

TestGrpo = AdvantageConformance.of(GrpoEstimator)

@pytest.mark.gpu
class TestOnAccelerator(TestGrpo):
    pass

def test_of_its_own():
    pass
"""


def test_cases_are_counted_by_plugin_and_by_what_runs_them(tmp_path: Path) -> None:
    place = ROOT / "tests" / "end_to_end" / "test_kills_of_a_test.py"
    place.write_text(SUITES)
    try:
        command = [sys.executable, "tests/evidence.py", str(tmp_path / "out"), str(place)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        place.unlink()
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out").read_text())
    cases = found["suites"].pop("advantage/grpo")
    assert found["suites"] == {}
    assert cases["make test"] == cases["gpu"] > 20
    assert found["counts"] == {"kills": {"make test": cases["make test"] + 1, "gpu": cases["gpu"]}}
