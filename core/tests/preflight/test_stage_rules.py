"""Stages of a config that come to nothing: a misspelt neighbour, a column that nothing reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.config import config_from_mapping
from dovetail.interfaces import PluginContext
from dovetail.planning.plan import make_plan
from dovetail.preflight.stages import RewriteUnread, StageOrderUnknown
from dovetail.sections import PluginSection

SOURCE = """
from dovetail.interfaces import Stage

class Own(Stage):
    phase = "transform"
    after = {after!r}

    @classmethod
    def rewrites(cls, config, facts):
        return frozenset({{"scores"}})

    def run(self, batch, step):
        return batch
"""


def findings(rule: Any, file: Path, *overrides: str, after: tuple[str, ...] = ()) -> list[str]:
    """What a rule says of a run with a stage that rewrites scores."""
    file.write_text(SOURCE.format(after=after))
    stages = [{"path": str(file), "attribute": "Own"}]
    mapping = {"model": {"path": "tiny"}, "algorithm": {"stages": stages}}
    config = config_from_mapping(mapping, overrides).config
    found = rule(PluginSection(name=rule.name), PluginContext()).check(config, make_plan(config))
    return [f"{finding.message} {finding.hint}" for finding in found]


def test_a_misspelt_stage_in_after_is_warned_about_with_the_nearest(tmp_path: Path) -> None:
    [said] = findings(StageOrderUnknown, tmp_path / "own.py", after=("overlong_penaltyy",))
    assert [w for w in ("Own", "'overlong_penaltyy'", "'overlong_penalty'") if w not in said] == []


@pytest.mark.parametrize("name", ["kl_penalty", "of_another_package"])
def test_a_stage_that_is_not_in_the_step_may_be_named(tmp_path: Path, name: str) -> None:
    assert findings(StageOrderUnknown, tmp_path / "own.py", after=(name,)) == []


@pytest.mark.parametrize(("estimator", "unread"), [("grpo", False), ("reinforce_plus_plus", True)])
def test_rewritten_scores_are_warned_about_where_the_estimator_reads_token_rewards(
    tmp_path: Path, estimator: str, unread: bool
) -> None:
    said = findings(RewriteUnread, tmp_path / "own.py", f"algorithm.advantage={estimator}")
    assert bool(said) == unread
    assert all("'token_rewards'" in text and estimator in text for text in said)
