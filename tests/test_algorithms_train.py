"""Every estimator, loss, filter, preset and objective of preferences trains on the demo's task, and four presets to the end."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
import yaml

from dovetail.run.run import train
from dovetail_demo.data import needs_carry
from dovetail_demo.prepare import prepare
from dovetail_demo.warm_start import worked_answer
from dovetail_diagnosis import diagnose

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "arithmetic"
SHORT = 20
"""Steps in which the reward must have risen."""
RISE = 0.05
"""By how much at least: the mean of five steps of 256 samples is known to about 0.012."""
SOLVED = 0.8
"""Held-out accuracy at which the task counts as solved; it starts below 0.3."""
ENOUGH = 40
"""Steps in which those four solve it."""
SOLVERS = ("preset: ppo", "preset: grpo", "preset: dapo", "preset: gspo")
BESIDES = (
    "estimator: reinforce_plus_plus_baseline",
    "estimator: grpo_passk",
    "estimator: gdpo",
    "estimator: optimal_token_baseline",
    "estimator: tir_optimal_token_baseline",
    "loss: clip_cov",
    "loss: kl_cov",
    "loss: dppo, total variation",
    "loss: dro",
    "kl: in the loss, adaptive",
    "kl: in the reward, adaptive",
    "aggregation: token_sum",
    "correction: decoupled_geo_rs_seq_tis",
    "correction: bypass_ppo_clip_k3_rs",
    "correction: bypass_pg_geo_rs_token_tis",
    "filter: overlong",
    "filter: score_range",
    "process rewards: prime",
    "self-play: online dpo",
    "self-play: sppo",
    "self-play: spin",
)
"""What no preset contains. Settings of one plugin differ by arithmetic alone, which unit tests compare with an oracle."""
PREFERENCES = {
    "dpo": {"beta": 0.3},
    "ipo": {"beta": 0.3},
    "simpo": {"beta": 2.0, "gamma": 1.0},
    "orpo": {"beta": 0.4},
    "kto": {"beta": 0.3},
}
"""Objectives of a dataset's preferences, and their settings."""


def _example(name: str) -> ModuleType:
    """A module of the example, as when its scripts run."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        spec = importlib.util.spec_from_file_location(f"arithmetic_{name}", EXAMPLE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLE))


algorithms = _example("algorithms")
PRESETS = [name for name in algorithms.MATRIX if name.startswith("preset: ")]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's data and its warm-started model."""
    home = tmp_path_factory.mktemp("algorithms")
    prepare(home, 1)
    return home


@pytest.fixture(scope="session")
def config(home: Path) -> Path:
    """The demo's config over its warm-started model."""
    return algorithms.base_config(home / "matrix", home / "warm_start" / "final", home / "data")


@pytest.fixture(scope="session")
def answers(home: Path) -> Path:
    """`train.jsonl` and `val.jsonl`: the problems that need a carry, with the right answer and the one without the carry.

    The warm-started model gives the wrong one more often.
    """
    for split in ("train", "val"):
        prompts = pq.read_table(home / "data" / f"{split}.parquet")["prompt"].to_pylist()
        with (home / f"{split}.jsonl").open("w") as file:
            for prompt in prompts:
                a, b = map(int, prompt[0]["content"].removesuffix("=?").split("+"))
                if needs_carry(a, b):
                    chosen, rejected = (worked_answer(a, b, carries=c) for c in (True, False))
                    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
                    file.write(json.dumps(row) + "\n")
    return home


def warnings_of(config: Path, name: str) -> list[str]:
    """The warnings that an entry's run got while it trained."""
    experiment = "".join(c if c.isalnum() else "_" for c in name)
    log = config.parent / "runs" / "algorithms" / experiment / "events.jsonl"
    return [line for line in log.read_text().splitlines() if "warning" in json.loads(line)]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*(name for name in PRESETS if name not in SOLVERS), *BESIDES])
def test_the_reward_rises(config, name):
    result = algorithms.run(config, name, SHORT, threads=1, validate=False)
    assert "error" not in result, result.get("error")
    assert result["last"] > result["first"] + RISE
    assert warnings_of(config, name) == []


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SOLVERS)
def test_the_task_is_solved(config, name):
    result = algorithms.run(config, name, ENOUGH, threads=1)
    assert "error" not in result, result.get("error")
    assert result["before"] < 0.4
    assert result["after"] > SOLVED
    assert warnings_of(config, name) == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PREFERENCES)
def test_held_out_preferences_are_learned(answers, tmp_path, name):
    """Rewards relative to the reference are equal at first; by likelihood alone the model prefers wrong answers."""
    kind = "preferences"
    files = [answers / f"{split}.jsonl" for split in ("train", "val")]
    if name == "kto":
        kind = "unpaired_preferences"
        files = [unpaired(file, tmp_path / file.name) for file in files]
    document = {
        "seed": 1,
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(answers / "warm_start" / "final"), "dtype": "float32"},
        "data": {
            "train_files": str(files[0]),
            "val_files": str(files[1]),
            "train_batch_size": 32,
            "max_prompt_length": 16,
            "max_response_length": 32,
        },
        "actor": {
            "objective": {"name": name, **PREFERENCES[name]},
            "optim": {"lr": 3e-4, "warmup_steps": 3},
        },
        "trainer": {
            "name": "supervised",
            "examples": kind,
            "total_steps": SHORT,
            "validate_every": SHORT,
        },
        "tracking": ["jsonl"],
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    summary = train(path)
    lines = (Path(summary["directory"]) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert diagnose(rows).warnings == []
    before, after = (row for row in rows if "val/accuracy" in row)
    if name in ("simpo", "orpo"):
        assert before["val/accuracy"] < 0.5
    else:
        assert before["val/accuracy"] == pytest.approx(0.5, abs=0.05)
    assert after["val/accuracy"] > 0.9
    assert after["val/loss"] < before["val/loss"]


def unpaired(pairs: Path, path: Path) -> Path:
    """Write each answer of the pairs as a row of its own, with its label, and return the path."""
    rows = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in map(json.loads, pairs.read_text().splitlines())
        for side in ("chosen", "rejected")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
