"""Bad input gets one clear error, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dovetail.errors import (
    ConfigError,
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


def test_config_file_missing(tmp_path):
    assert "nowhere.yaml" in message(ConfigError, tmp_path / "nowhere.yaml")


def test_unknown_key_names_the_nearest(config):
    assert "temperature" in message(ConfigError, config, "rollout.temprature=1.0")


def test_wrong_type(config):
    text = message(ConfigError, config, "rollout.n='four'")
    assert "rollout.n" in text
    assert "four" in text


def test_unknown_plugin_names_what_there_is(config):
    text = message(DovetailError, config, "algorithm.advantage=gppo")
    assert "grpo" in text


def test_a_first_party_plugin_that_is_not_installed_says_how_to_install_it(config):
    text = message(DovetailError, config, "rollout.name=vllm")
    assert "pip install" in text
    assert "dovetail-rollout-vllm" in text


def test_dataset_missing(config, tmp_path):
    text = message(DataError, config, f"data.train_files=[{tmp_path}/trian.jsonl]")
    assert "trian.jsonl" in text
    assert "train.jsonl" in text


def test_dataset_empty(config, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl" in message(DataError, config, f"data.train_files=[{tmp_path}/empty.jsonl]")


def test_dataset_not_parquet(config, tmp_path):
    (tmp_path / "fake.parquet").write_text("hello")
    assert "fake.parquet" in message(
        DataError, config, f"data.train_files=[{tmp_path}/fake.parquet]"
    )


def test_dataset_without_the_prompt_column(config, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"question": "?"}) + "\n")
    text = message(DataError, config, f"data.train_files=[{tmp_path}/x.jsonl]")
    assert "prompt" in text
    assert "question" in text


def test_a_bad_row_is_named(config, tmp_path):
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    rows[5]["prompt"] = 17
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = message(DataError, config, f"data.train_files=[{tmp_path}/bad.jsonl]")
    assert "5" in text or "6" in text
    assert "bad.jsonl" in text


def test_model_directory_missing(config, tmp_path):
    assert "no_model" in message(ModelError, config, f"model.path={tmp_path}/no_model")


def test_model_without_tokenizer(config, tiny, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(tiny / file, bare)
    assert "tokenizer" in message(ModelError, config, f"model.path={bare}")


def test_no_chat_template(config, tiny, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(tiny, plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(settings))
    text = message(DovetailError, config, f"model.path={plain}")
    assert "chat template" in text
    assert "model.chat_template" in text


def test_a_group_estimator_with_one_sample_a_prompt(config):
    text = message(PlanError, config, "rollout.n=1")
    assert "grpo" in text
    assert "rollout.n" in text


def test_batch_sizes_that_do_not_fit_are_said_in_prompts_and_samples(config):
    text = message(DovetailError, config, "actor.mini_batch_size=3")
    assert "prompts" in text
    assert "samples" in text
    assert "16" in message(DovetailError, config, "data.train_batch_size=16")


def test_all_prompts_filtered(config):
    assert "max_prompt_length" in message(DataError, config, "data.max_prompt_length=2")


def test_a_run_directory_that_holds_another_run(config, tmp_path):
    train(config, ["trainer.total_steps=1"])
    before = (tmp_path / "runs" / "tests" / "run" / "metrics.jsonl").read_text()
    assert "resume" in message(RunDirectoryError, config, "trainer.resume=never")
    assert (tmp_path / "runs" / "tests" / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("raise ValueError('boom')", "boom"),
        ("import time; time.sleep(60)", "time"),
        ("return float('nan')", "nan"),
        ("return float('inf')", "inf"),
        ("return 'good'", "good"),
    ],
)
def test_a_reward_that_always_fails_stops_the_run(config, tmp_path, body, word):
    (tmp_path / "my_reward.py").write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n"
    )
    text = message(RewardError, config, "reward.timeout=1.0", "trainer.validate_before=false")
    assert "16 of 16" in text
    assert word in text.lower()


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


def test_a_broken_reward_file_is_refused_before_training(config, tmp_path):
    (tmp_path / "my_reward.py").write_text("def compute_scores(x):\n    return 1\n")
    text = message(ConfigError, config)
    assert "compute_score" in text
    assert not (tmp_path / "runs" / "tests" / "run").exists()
