"""PRIME: a policy and a process reward model that are trained side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_files import steps_of

from dovetail.run.run import train

PRIME = (
    "algorithm.advantage=prime",
    "roles.prm={objective: {name: implicit_prm, beta: 0.1}, optim: {lr: 1e-2}}",
)


@pytest.mark.parametrize("adapter", [False, True], ids=["whole models", "adapters"])
def test_a_process_reward_model_is_trained_beside_the_policy(
    config: Path, tmp_path: Path, adapter: bool
) -> None:
    lora = ["actor.engine.lora={rank: 2}"] if adapter else []
    train(config, [*PRIME, *lora, "trainer.total_steps=2"])
    run = tmp_path / "runs" / "tests" / "run"
    first, second = steps_of(run)
    assert first["prm/updates"] == 1
    # As it starts it is its reference: every reward is 0, and the outcome can't be told.
    assert first["prm/process_reward"] == pytest.approx(0, abs=1e-6)
    assert first["prm/loss"] == pytest.approx(0.693, abs=1e-3)
    assert abs(second["prm/outcome_reward"]) > 1e-4
    assert second["prm/loss"] < first["prm/loss"]
    kept = {role.name for role in (run / "checkpoints" / "step_2").iterdir() if role.is_dir()}
    assert kept >= {"actor", "prm"}
    assert "ref" not in kept


def test_the_model_learns_from_outcomes_as_they_are_before_penalties(
    config: Path, tmp_path: Path
) -> None:
    penalties = ["algorithm.kl.in_reward={coef: 1.0}", "algorithm.overlong_penalty={buffer: 6}"]
    train(config, [*PRIME, *penalties, "actor.optim.lr=1e-2", "trainer.total_steps=2"])
    second = steps_of(tmp_path / "runs" / "tests" / "run")[1]
    assert second["reward/kl_penalty"] != 0
    assert second["reward/overlong_share"] > 0
    assert second["prm/updates"] == 1
