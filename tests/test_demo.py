"""The demo: held-out accuracy rises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file


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
        (1, ("trainer.total_steps=4", "actor.optim.schedule=constant"), 0.7),
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


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_streaming_without_staleness_trains_the_demo_bit_for_bit_as_on_policy_does(
    tmp_path: Path,
) -> None:
    short = ["trainer.total_steps=3", "trainer.save_every=0", "trainer.validate_before=false"]
    demo = ["demo", "--out", str(tmp_path), *short, "experiment=made"]
    train = ["train", str(tmp_path / "seed_1" / "config.yaml"), *short, "data.val_files=[]"]
    streaming = ["trainer.name=streaming", "trainer.max_staleness=0"]
    for arguments in (
        demo,
        [*train, "experiment=on_policy"],
        [*train, *streaming, "experiment=streaming"],
    ):
        command = [sys.executable, "-m", "dovetail", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    runs = [tmp_path / "runs" / "arithmetic" / name for name in ("on_policy", "streaming")]
    for step in (1, 2, 3):
        first, second = (folder / "samples" / f"step_{step}.jsonl" for folder in runs)
        assert first.read_text() == second.read_text()
    one, two = (load_file(folder / "final" / "model.safetensors") for folder in runs)
    assert one.keys() == two.keys()
    for name, weight in one.items():
        np.testing.assert_array_equal(two[name], weight)
