"""The plugins of a reward in the plan, the lock and doctor: its functions, and all plugins that a hybrid manager selects."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.config import config_from_mapping
from dovetail.planning.resolved_plugins import choose, refs_of
from dovetail.plugins.lock import lock_for
from dovetail.plugins.lock_differences import compare
from dovetail_rewards.examination import examine
from dovetail_rewards.sandbox import levels
from dovetail_rewards.sandbox.levels import LevelReport


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("def compute_score(solution_str):\n    return 1.0\n")
    return path


def refs(reward: object) -> dict[str, object]:
    config = config_from_mapping({"model": {"path": "none"}, "reward": reward}).config
    return {path: ref for path, ref in refs_of(choose(config)).items() if path.startswith("reward")}


def test_every_plugin_of_a_nested_reward_is_listed_by_its_key_path(file) -> None:
    inner = {"name": "hybrid", "scorers": {"rule": {"function": {"path": str(file)}}}}
    scorers = {
        "form": {"function": {"name": "regex_format", "pattern": "x"}},
        "rest": {"manager": inner},
    }
    found = refs(
        {
            "function": "exact_match",
            "functions": {"openai/gsm8k": {"name": "gsm8k", "method": "flexible"}},
            "manager": {"name": "hybrid", "scorers": scorers},
        }
    )
    assert {path: ref.name for path, ref in found.items()} == {
        "reward.manager": "hybrid",
        "reward.function": "exact_match",
        "reward.functions[openai/gsm8k]": "gsm8k",
        "reward.manager.scorers.form.manager": "naive",
        "reward.manager.scorers.form.function": "regex_format",
        "reward.manager.scorers.rest.manager": "hybrid",
        "reward.manager.scorers.rest.manager.scorers.rule.manager": "naive",
        "reward.manager.scorers.rest.manager.scorers.rule.function": "compute_score",
    }


def test_a_changed_file_below_a_hybrid_is_noticed(file) -> None:
    part = {"rule": {"function": {"path": str(file)}}}
    reward = {"manager": {"name": "hybrid", "scorers": part}}
    before = lock_for(refs(reward).values())
    file.write_text("def compute_score(solution_str):\n    return 2.0\n")
    warnings, refusals = compare(before, lock_for(refs(reward).values()))
    assert not refusals
    assert len(warnings) == 1
    assert "has changed" in warnings[0]
    assert str(file) in warnings[0]


def test_doctor_is_told_of_each_level(monkeypatch) -> None:
    rows = examine()
    assert [row["what"].split()[-1] for row in rows] == list(levels.LEVELS)
    assert all(row["detail"] for row in rows)
    none = tuple(
        LevelReport(level=level, available=False, detail="forbidden") for level in levels.LEVELS
    )
    monkeypatch.setattr(levels, "_available_levels", lambda python: none)
    problems = [row["problem"] for row in examine()]
    assert problems[:-1] == [None] * 2
    assert "at any isolation level" in problems[-1]
