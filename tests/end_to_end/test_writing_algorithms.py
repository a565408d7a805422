"""Every file that docs/writing-algorithms.md shows does what it is shown for."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dovetail.run.run import train

BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```\n\n```(\w+)\n(.*?)```", re.DOTALL)
TRAINED = (
    "my_advantage.py",
    "my_loss.py",
    "my_aggregation.py",
    "my_filter.py",
    "my_correction.py",
    "my_stage.py",
    "towards_teacher.py",
    "my_trainer.py",
    "one_step_off.py",
    "my_preset.py",
)


@pytest.fixture
def shown(root: Path) -> dict[str, tuple[str, str]]:
    """The Python files by name, each with the block that follows it."""
    text = (root / "docs" / "writing-algorithms.md").read_text()
    return {file: (code, selection) for file, code, _, selection in BLOCK.findall(text)}


def test_every_file_is_tried(shown: dict[str, tuple[str, str]], root: Path) -> None:
    text = (root / "docs" / "writing-algorithms.md").read_text()
    assert {*TRAINED, "my_rules.py"} == shown.keys()
    assert text.count("```python") == len(shown)


@pytest.mark.parametrize("file", TRAINED)
def test_a_file_trains_when_it_is_selected_as_shown(
    config: Path, tmp_path: Path, shown: dict[str, tuple[str, str]], file: str
) -> None:
    code, selection = shown[file]
    (tmp_path / file).write_text(code)
    document: dict[str, Any] = yaml.safe_load(config.read_text())
    selected = yaml.safe_load(selection.replace(file, str(tmp_path / file)))
    if "trainer" in selected:
        kept = {name: value for name, value in document["trainer"].items() if name != "name"}
        document["trainer"] = kept | selected["trainer"]
    given = selected.get("algorithm", {})
    for section in given.get("sample_filters", []):
        section["least"] = -1.0  # the reward of a random model may be below any other bound
    if "preset" in given:
        document["algorithm"] = {}  # keys win over presets
    document["algorithm"] |= given
    for role in selected.get("roles", {}).values():
        role["path"] = document["model"]["path"]
    document["roles"] = selected.get("roles", {})
    config.write_text(yaml.safe_dump(document))
    summary = train(config, ["trainer.total_steps=1", "trainer.validate_before=false"])
    assert summary["status"] == "completed"


def test_the_rule_finds_what_it_looks_for(
    tmp_path: Path, shown: dict[str, tuple[str, str]]
) -> None:
    code, entry_point = shown["my_rules.py"]
    (tmp_path / "my_rules.py").write_text(code)
    rule = runpy.run_path(str(tmp_path / "my_rules.py"))["learning_rate_of_pretraining"]
    assert '"dovetail.preflight"]\nour_rules = "our_package.my_rules"' in entry_point

    def findings(lr: float) -> list[str]:
        run = SimpleNamespace(actor=SimpleNamespace(optim=SimpleNamespace(lr=lr)))
        return [str(finding) for finding in rule(run, None)]

    assert findings(1e-6) == []
    (found,) = findings(1e-2)
    assert "actor.optim.lr = 0.01" in found
    assert "preflight.ignore=learning_rate_of_pretraining" in found
