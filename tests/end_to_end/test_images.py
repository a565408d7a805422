"""A run with images: a policy learns to tell two colours apart, which it can only by looking."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dovetail.errors import PlanError
from dovetail.run.run import train
from dovetail_sdk.testing import square, tiny_vision_model


def write_config(directory: Path) -> Path:
    """Red asks for a token whose first letter has an even number, blue for an odd one: half of all guesses are right."""
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>Which colour?"}],
            "images": [{"bytes": square(colour, 28 + 28 * (i % 3), 56), "path": None}],
            "reward_model": {"ground_truth": name},
        }
        for i in range(8)
        for name, colour in (("red", (230 - i, 20 + i, 20)), ("blue", (20, 20 + i, 230 - i)))
    ]
    pq.write_table(pa.Table.from_pylist(rows), directory / "train.parquet")
    (directory / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    even = ord(solution_str[0]) % 2 == 0 if solution_str else True\n"
        "    return float(even == (ground_truth == 'red'))\n"
    )
    document = {
        "seed": 3,
        "project": "tests",
        "experiment": "run",
        "output_dir": str(directory / "runs"),
        "model": {"path": str(tiny_vision_model(directory / "model")), "dtype": "float32"},
        "data": {
            "train_files": [str(directory / "train.parquet")],
            "train_batch_size": 16,
            "max_prompt_length": 96,
            "max_response_length": 1,
        },
        "rollout": {"name": "hf", "n": 8},
        "actor": {"optim": {"lr": 5e-3}},
        "algorithm": {"advantage": "grpo", "policy_loss": "ppo_clip"},
        "reward": {"function": {"path": str(directory / "reward.py")}},
        "trainer": {"total_steps": 16, "save_every": 0, "validate_after": False},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def metrics_of(config: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of a run, step by step."""
    train(config, overrides)
    file = config.parent / "runs" / "tests" / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line.get("metrics", line) for line in lines]


def test_the_trainer_looks_as_the_rollout_did(config: Path) -> None:
    metrics = metrics_of(config, "trainer.total_steps=2")
    gaps = [
        line["logprob_check/prob_diff_max"]
        for line in metrics
        if line.get("logprob_check/prob_diff_max")
    ]
    assert gaps
    assert max(gaps) < 1e-5
    assert any(line.get("actor/grad_norm", 0) > 0 for line in metrics)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_policy_learns_to_look(config: Path) -> None:
    metrics = metrics_of(config)
    rewards = [line["reward/mean"] for line in metrics if line.get("reward/mean") is not None]
    assert sum(rewards[:3]) / 3 < 0.65
    assert sum(rewards[-3:]) / 3 > 0.75


def test_an_engine_that_takes_no_images_is_refused_before_anything_starts(config: Path) -> None:
    engine = config.parent / "blind.py"
    engine.write_text(
        "from dovetail_train_fsdp2.engine import Fsdp2Engine\n\n\n"
        "class Blind(Fsdp2Engine):\n"
        "    name = 'blind'\n"
        "    capabilities = Fsdp2Engine.capabilities - {'images'}\n"
    )
    choice = f"actor.engine={{path: {engine}, attribute: Blind}}"
    with pytest.raises(PlanError, match=r"engine 'Blind' .* lacks the capability 'images'; .*'hf'"):
        train(config, [choice])
    assert not (config.parent / "runs" / "tests").exists()
