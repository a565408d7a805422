"""The demo on Ray: two training processes and their rollouts learn what one process learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from run_files import steps_of

SAME = ("reward/mean", "response_length/mean", "actor/loss", "actor/entropy", "actor/grad_norm")
"""Metrics of the first steps that follow from the seed alone, whoever computes them."""
STEPS = 25


def run(command: list[str], out: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.nightly  # tests/end_to_end/test_ray_ranks.py compares ranks with one process, on a smaller model
@pytest.mark.timeout(900)
def test_the_demo_trains_on_ray_with_two_workers_as_it_does_in_one_process(tmp_path: Path) -> None:
    ray = [
        *("runtime.name=ray", "runtime.workers_per_node=2"),
        *(f"trainer.total_steps={STEPS}", "experiment=ray", "actor.optim.schedule=constant"),
    ]
    demo = [sys.executable, "-m", "dovetail", "demo", "--out", str(tmp_path)]
    printed = run([*demo, *ray], tmp_path)
    assert "placement: pool all (ray): 2 CPU processes: actor + ref (dp=2), rollout × 2" in printed
    summary = json.loads((tmp_path / "runs" / "arithmetic" / "ray" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] > 0.8

    one_process = [
        *(sys.executable, "-m", "dovetail", "train", str(tmp_path / "seed_1" / "config.yaml")),
        *("data.val_files=[]", "experiment=inline"),
        *("trainer.total_steps=2", "actor.optim.schedule=constant"),
    ]
    run(one_process, tmp_path)
    for step in (1, 2):
        one = steps_of(tmp_path / "runs" / "arithmetic" / "inline")[step - 1]
        two = steps_of(tmp_path / "runs" / "arithmetic" / "ray")[step - 1]
        assert {name: two[name] for name in SAME} == pytest.approx(
            {name: one[name] for name in SAME}, rel=1e-3, abs=1e-5
        )
