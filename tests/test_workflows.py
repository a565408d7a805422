"""Workflows run targets that exist, with few rights and an end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile_with_few_rights_and_a_limit(
    workflow: Path,
) -> None:
    document = yaml.safe_load(workflow.read_text())
    assert document["permissions"] == {"contents": "read"}
    for name, job in document["jobs"].items():
        assert job.get("timeout-minutes", 0) > 0, name
        for step in job["steps"]:
            assert step.keys() & {"uses", "run"}
            for target in re.findall(r"\bmake ([a-z0-9-]+)", step.get("run", "")):
                assert target in TARGETS


def test_a_release_needs_the_check_and_no_token() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert any("make release-check" in step.get("run", "") for step in release["wheels"]["steps"])
    assert release["publish"]["needs"] == "wheels"
    assert release["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
