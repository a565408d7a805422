"""A run on Ray: two training processes and their rollouts compute what one process does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_files import steps_of

from dovetail.run.run import train

SAME = ("reward/mean", "response_length/mean", "actor/loss", "actor/entropy", "actor/grad_norm")
"""Metrics of the first steps that follow from the seed alone, whoever computes them."""
SHORT = ("trainer.total_steps=2", "trainer.save_every=0", "actor.optim.schedule=constant")


@pytest.mark.timeout(600)
def test_two_ranks_on_ray_train_as_one_process_does(config: Path, tmp_path: Path) -> None:
    train(config, [*SHORT, "experiment=inline"])
    command = [sys.executable, "-m", "dovetail", "train", str(config), *SHORT, "experiment=ray"]
    command += ["runtime.name=ray", "runtime.workers_per_node=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    placement = "placement: pool all (ray): 2 CPU processes: actor (dp=2), rollout × 2"
    assert placement in done.stdout
    runs = tmp_path / "runs" / "tests"
    assert steps_of(runs / "ray")[0]["actor/grad_norm"] > 1e-3
    for step in (1, 2):
        one, two = steps_of(runs / "inline")[step - 1], steps_of(runs / "ray")[step - 1]
        assert {name: two[name] for name in SAME} == pytest.approx(
            {name: one[name] for name in SAME}, rel=1e-3, abs=1e-5
        )
