"""Runs whose rewards fail: samples without a score are counted and left out, or drawn anew, and a run without any score stops."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import RewardError
from dovetail.run.run import train

FAILS_NOW_AND_THEN = """
import itertools
calls = itertools.count(1)
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if next(calls) % 5 == 0:
        raise ConnectionError("the judge is away")
    return len(solution_str) / 50
"""


def trained(
    config: Path, tmp_path: Path, *overrides: str
) -> list[tuple[dict[str, Any], list[Any]]]:
    """Metrics and samples of each step of a run on a reward that fails."""
    (tmp_path / "my_reward.py").write_text(FAILS_NOW_AND_THEN)
    train(config, ["trainer.samples_per_step=-1", "trainer.validate_after=false", *overrides])
    run = tmp_path / "runs" / "tests" / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/failures" in line]
    read = lambda step: (run / "samples" / f"step_{step}.jsonl").read_text().splitlines()  # noqa: E731
    return [(step, [json.loads(row) for row in read(step["step"])]) for step in steps]


def test_what_failed_is_drawn_anew_and_each_prompt_is_used_once(config, tmp_path):
    steps = trained(config, tmp_path, "reward.on_failure=refill", "reward.refill_rounds=8")
    assert len(steps) == 3
    seen: Counter[str] = Counter()
    for metrics, rows in steps:
        assert metrics["reward/failures"] > 0
        assert metrics["reward/refilled"] == metrics["reward/failures"]
        scored = [row for row in rows if "failure" not in row]
        failed = [row for row in rows if "failure" in row]
        assert len(failed) == metrics["reward/failures"]
        assert all(row["score"] is None for row in failed)
        assert all(row["failure"]["kind"] == "unreachable" for row in failed)
        assert set(Counter(json.dumps(row["prompt"]) for row in scored).values()) == {4}
        assert len({row["sample_id"] for row in rows}) == len(rows)
        assert any(".a1." in row["sample_id"] for row in scored)
        seen.update({json.dumps(row["prompt"]) for row in scored})
    assert len(seen) == 12
    assert set(seen.values()) == {1}


def test_groups_stay_thinned_where_the_config_says_drop(config, tmp_path):
    steps = trained(config, tmp_path, "trainer.total_steps=1", "trainer.validate_before=false")
    [(metrics, rows)] = steps
    assert metrics["reward/failures"] == 3
    assert "reward/refilled" not in metrics
    assert len(rows) == 16


@pytest.mark.parametrize(
    ("body", "setting"),
    [("return None", "reward.on_failure=refill"), ("time.sleep(60)", "reward.timeout=1.0")],
)
def test_a_reward_that_always_fails_or_hangs_stops_the_run(config, tmp_path, body, setting):
    (tmp_path / "my_reward.py").write_text(
        f"import time\ndef compute_score(solution_str):\n    {body}\n"
    )
    with pytest.raises(RewardError, match="16 of 16 samples"):
        train(config, [setting, "trainer.validate_before=false"])
