"""Stages without effect: a misspelt name in their order, a column that nothing reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail_preflight.unused import rewrite_unread, stage_order_unknown
from dovetail_sdk.testing import findings_of

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
    """The findings of a rule in a run with a stage that rewrites scores."""
    file.write_text(SOURCE.format(after=after))
    stages = {"algorithm": {"stages": [{"path": str(file), "attribute": "Own"}]}}
    return [f"{f.message} {f.hint}" for f in findings_of(rule, *overrides, sections=stages)]


def test_a_misspelt_stage_in_after_is_warned_about_with_the_nearest(tmp_path: Path) -> None:
    [said] = findings(stage_order_unknown, tmp_path / "own.py", after=("overlong_penaltyy",))
    assert [w for w in ("Own", "'overlong_penaltyy'", "'overlong_penalty'") if w not in said] == []


@pytest.mark.parametrize("name", ["kl_penalty", "of_another_package"])
def test_a_stage_that_is_not_in_the_step_may_be_named(tmp_path: Path, name: str) -> None:
    assert findings(stage_order_unknown, tmp_path / "own.py", after=(name,)) == []


@pytest.mark.parametrize(("estimator", "unread"), [("grpo", False), ("reinforce_plus_plus", True)])
def test_rewritten_scores_are_warned_about_where_the_estimator_reads_token_rewards(
    tmp_path: Path, estimator: str, unread: bool
) -> None:
    said = findings(rewrite_unread, tmp_path / "own.py", f"algorithm.advantage={estimator}")
    assert bool(said) == unread
    assert all("'token_rewards'" in text and estimator in text for text in said)
