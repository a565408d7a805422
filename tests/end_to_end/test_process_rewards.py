"""A run whose rewards come from a process reward model, step by step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_files import lines_of, steps_of

from dovetail.run.run import train
from dovetail_rewards.conformance.reward_model import tiny_step_classifier


def test_a_policy_is_trained_on_the_rewards_of_steps(config: Path, tmp_path: Path) -> None:
    manager = {
        "name": "process_reward_model",
        "model": str(tiny_step_classifier()),
        "dtype": "float32",
        "device": "cpu",
        "step_separator": " ",
        "step_token": "#",
        "aggregate": "mean",
        "rewards": "steps",
    }
    overrides = [
        f"reward.manager={json.dumps(manager)}",
        "algorithm.advantage=reinforce_plus_plus",
        "trainer.total_steps=1",
        "trainer.samples_per_step=-1",
        "reward.max_failure_share=0.9",  # an untrained policy writes the mark itself
    ]
    train(config, overrides)
    run = tmp_path / "runs" / "tests" / "run"
    rows = lines_of(run / "samples" / "step_1.jsonl")
    scored = [row for row in rows if row["score"] is not None]
    assert scored
    for row in scored:
        probabilities = row["extras"]["step_probabilities"]
        assert len(probabilities) == row["components"]["steps"]
        assert row["score"] == pytest.approx(sum(probabilities) / len(probabilities), abs=1e-5)
    assert any(row["components"]["steps"] > 1 for row in scored)
    (step,) = steps_of(run)
    assert step["reward/components/step_mean"] == pytest.approx(step["reward/mean"], abs=1e-5)
    assert step["actor/updates"] == 1
