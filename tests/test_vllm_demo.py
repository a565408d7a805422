"""The demo with vLLM as its rollout: it learns, and what vLLM computes with is what was trained."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
    ),
]


@pytest.mark.timeout(900)
def test_the_demo_learns_with_rollouts_by_vllm(tmp_path: Path) -> None:
    steps = 25
    demo = [sys.executable, "-m", "dovetail", "demo", "--out", str(tmp_path)]
    vllm = [
        *("rollout.name=vllm", "rollout.weight_check.every=5", "experiment=vllm"),
        *(f"trainer.total_steps={steps}", "actor.optim.schedule=constant"),
    ]
    done = subprocess.run([*demo, *vllm], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "arithmetic" / "vllm"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] > 0.8
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    probed = [
        row["weight_check/mean_difference"] for row in rows if "weight_check/mean_difference" in row
    ]
    assert len(probed) == steps // 5
    # Float32 on both sides.
    assert max(probed) < 1e-5
    assert (run / "logs" / "rollout-0.vllm.log").stat().st_size > 0
