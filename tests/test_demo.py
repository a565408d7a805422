"""The demo: held-out accuracy rises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run_demo(out: Path, seed: int, *overrides: str) -> dict[str, float]:
    """Run the demo as `make demo` does, but for the overrides, and return its summary."""
    command = [sys.executable, "-m", "dovetail", "demo", "--out", str(out), "--seed", str(seed)]
    command += overrides
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((out / "runs" / "arithmetic" / f"seed_{seed}" / "summary.json").read_text())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "overrides", "accuracy"),
    [
        # Its first steps; those that follow bring it near 1.
        (1, ("trainer.total_steps=10", "actor.optim.schedule=constant"), 0.7),
        *(pytest.param(seed, (), 0.8, marks=pytest.mark.nightly) for seed in (1, 2, 3)),
    ],
)
def test_held_out_accuracy_rises(seed, overrides, accuracy, tmp_path):
    summary = run_demo(tmp_path, seed, *overrides)
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] > accuracy
    assert summary["seed"] == seed
    assert summary["train_seconds"] > summary["warm_start_seconds"] > 0
    # Nor does a healthy run warn that it can't learn.
    events = (tmp_path / "runs" / "arithmetic" / f"seed_{seed}" / "events.jsonl").read_text()
    assert not [line for line in events.splitlines() if "warning" in json.loads(line)]
