"""A run on Ray: two training processes and their rollouts compute what one process does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.run.run import train

SAME = ("reward/mean", "response_length/mean", "actor/loss", "actor/entropy", "actor/grad_norm")
"""Metrics of the first steps that follow from the seed alone, whoever computes them."""
SHORT = ("trainer.total_steps=2", "trainer.save_every=0", "actor.optim.schedule=constant")


def metrics(directory: Path, step: int) -> dict[str, float]:
    """Those that the training of a step wrote."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return next(
        found for found in map(json.loads, lines) if found["step"] == step and "actor/loss" in found
    )


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
    assert metrics(runs / "ray", 1)["actor/grad_norm"] > 1e-3
    for step in (1, 2):
        one, two = metrics(runs / "inline", step), metrics(runs / "ray", step)
        assert {name: two[name] for name in SAME} == pytest.approx(
            {name: one[name] for name in SAME}, rel=1e-3, abs=1e-5
        )
