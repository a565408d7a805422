"""Training improves a tiny model on two tasks of reasoning-gym, after a warm start with as many right as wrong answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import dovetail
from dovetail.interfaces import PluginContext
from dovetail.telemetry import read_rows
from dovetail_environments_reasoning_gym.config import ReasoningGymConfig
from dovetail_environments_reasoning_gym.reasoning_gym_tasks import ReasoningGym
from dovetail_sdk.testing import tiny_model_and_tokenizer

pytest.importorskip(
    "reasoning_gym", reason="reasoning-gym is not installed here; `make proofs` has it"
)
pytestmark = pytest.mark.proofs

DATASETS = {
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "max_value": 9},
}
PUZZLES = {"name": "reasoning_gym", "datasets": DATASETS, "instruction": "", "tasks": 30}


def demonstrations(folder: Path, epochs: int) -> Path:
    """Write conversations in which half of the answers belong to other questions."""
    environment = ReasoningGym(ReasoningGymConfig(**PUZZLES), PluginContext(seed=1))
    tasks = list({t.prompt: t for t in environment.tasks(30, held_out=False)}.values())
    rng = random.Random(1)
    rows = []
    for _ in range(epochs):
        rng.shuffle(tasks)
        for task in tasks:
            same = [t for t in tasks if t.data["dataset"] == task.data["dataset"]]
            answer = (task if rng.random() < 0.5 else rng.choice(same)).ground_truth
            rows.append({"prompt": task.prompt, "response": str(answer)})
    path = folder / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(folder: Path, name: str, **sections: Any) -> Path:
    path = folder / f"{name}.yaml"
    common = {"seed": 1, "output_dir": str(folder), "experiment": name, "tracking": ["jsonl"]}
    path.write_text(yaml.safe_dump({**common, **sections}))
    return path


def test_two_tasks_are_learned_from_a_start_that_is_half_wrong(tmp_path: Path) -> None:
    base = tiny_model_and_tokenizer(tmp_path / "base", hidden_size=96, intermediate_size=256)
    optim = {"betas": [0.9, 0.95], "warmup_steps": 5, "schedule": "linear"}
    sft = config(
        tmp_path,
        "sft",
        model={"path": str(base), "dtype": "float32"},
        data={
            "train_files": str(demonstrations(tmp_path, 400)),
            "sampler": "sequential",
            "train_batch_size": 64,
            "max_prompt_length": 160,
            "max_response_length": 8,
        },
        actor={"engine": "fsdp2", "optim": {"lr": 3e-3, **optim}},
        trainer={"name": "supervised"},
    )
    start = Path(dovetail.train(sft)["directory"]) / "final"
    grpo = config(
        tmp_path,
        "grpo",
        model={"path": str(start), "dtype": "float32"},
        data={"train_batch_size": 30, "max_prompt_length": 160, "max_response_length": 8},
        rollout={
            "name": "hf",
            "n": 8,
            "agent_loop": {"name": "environments", "environments": {"puzzles": PUZZLES}},
        },
        actor={"engine": "fsdp2", "optim": {"lr": 1e-3, **optim}},
        algorithm={"advantage": "grpo"},
        trainer={"total_steps": 60, "export": "none"},
    )
    directory = Path(dovetail.train(grpo)["directory"])
    rows = [row for row in read_rows(directory / "metrics.jsonl") if "reward/mean" in row]
    for name in DATASETS:
        means = [row[f"reward/components/puzzles/{name}"] for row in rows]
        first, last = np.mean(means[:3]), np.mean(means[-3:])
        assert last > first + 0.15, (name, first, last)
        assert first < 0.8, (name, first, last)
