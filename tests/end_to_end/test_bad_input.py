"""Bad input gets one clear error, and nothing is lost: what the messages of bad_inputs/ do not show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.errors import (
    DataError,
    DovetailError,
    ModelError,
    PlanError,
    RewardError,
    RunDirectoryError,
)
from dovetail.run.run import train


def message(error: type[DovetailError], config: Path, *overrides: str) -> str:
    """What `train` says."""
    with pytest.raises(error) as caught:
        train(config, overrides)
    found = caught.value
    return "\n".join([str(found), *getattr(found, "problems", ())])


def test_a_first_party_plugin_that_is_not_installed_says_how_to_install_it(config):
    text = message(DovetailError, config, "rollout.name=vllm")
    assert "pip install" in text
    assert "dovetail-rollout-vllm" in text


def test_dataset_missing(config, tmp_path):
    text = message(DataError, config, f"data.train_files=[{tmp_path}/trian.jsonl]")
    assert "trian.jsonl" in text
    assert "train.jsonl" in text


def test_model_directory_missing(config, tmp_path):
    assert "no_model" in message(ModelError, config, f"model.path={tmp_path}/no_model")


def test_a_group_estimator_with_one_sample_a_prompt(config):
    text = message(PlanError, config, "rollout.n=1")
    assert "grpo" in text
    assert "rollout.n" in text


def test_batch_sizes_that_do_not_fit_are_said_in_prompts_and_samples(config):
    text = message(DovetailError, config, "actor.mini_batch_size=3")
    assert "prompts" in text
    assert "samples" in text
    assert "16" in message(DovetailError, config, "data.train_batch_size=16")


def test_a_run_directory_that_holds_another_run(config, tmp_path):
    train(config, ["trainer.total_steps=1"])
    before = (tmp_path / "runs" / "tests" / "run" / "metrics.jsonl").read_text()
    assert "resume" in message(RunDirectoryError, config, "trainer.resume=never")
    assert (tmp_path / "runs" / "tests" / "run" / "metrics.jsonl").read_text() == before


def test_a_reward_that_always_hangs_stops_the_run(config, tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "import time\ndef compute_score(solution_str):\n    time.sleep(60)\n"
    )
    text = message(RewardError, config, "reward.timeout=1.0", "trainer.validate_before=false")
    assert "16 of 16" in text
    assert "time" in text.lower()


def test_a_reward_that_sometimes_fails_is_counted_and_left_out(config, tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if ground_truth == '3':\n        raise ValueError('no threes')\n    return len(solution_str) / 50\n"
    )
    train(config, ["trainer.total_steps=3"])
    run = tmp_path / "runs" / "tests" / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = sum(line.get("reward/failures", 0) for line in lines)
    assert counted > 0
    assert counted % 4 == 0
