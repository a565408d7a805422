"""Every estimator, loss, filter and preset trains: the demo's task under each of them, and four presets to the end."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dovetail_demo.prepare import prepare

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
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's config over its warm-started model."""
    home = tmp_path_factory.mktemp("algorithms")
    return algorithms.base_config(home / "matrix", prepare(home, 1), home / "data")


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
