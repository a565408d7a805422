"""The demo: held-out accuracy rises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run_demo(out: Path, seed: int) -> dict[str, float]:
    """Run the demo as `make demo` does and return its summary."""
    command = [sys.executable, "-m", "dovetail", "demo", "--out", str(out), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((out / "runs" / "arithmetic" / f"seed_{seed}" / "summary.json").read_text())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seed",
    [1, pytest.param(2, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly)],
)
def test_held_out_accuracy_rises(seed, tmp_path):
    summary = run_demo(tmp_path, seed)
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] > 0.8
    assert summary["seed"] == seed
    assert summary["train_seconds"] > summary["warm_start_seconds"] > 0
    # Nor does a healthy run warn that it can't learn.
    events = (tmp_path / "runs" / "arithmetic" / f"seed_{seed}" / "events.jsonl").read_text()
    assert not [line for line in events.splitlines() if "warning" in json.loads(line)]
