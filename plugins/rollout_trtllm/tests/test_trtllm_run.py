"""GRPO steps by the command `dovetail train` with samples of a fake `trtllm-serve`, and a weight update in every step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 2
CONFIG = """
model: {{path: {model}, dtype: float32}}
data: {{train_files: rows.jsonl, train_batch_size: 2, max_prompt_length: 32, max_response_length: 8}}
actor: {{engine: fsdp2, optim: {{lr: 1.0e-3}}}}
rollout: {{name: trtllm, n: 2, max_model_len: 256, executable: {executable}}}
reward: {{function: {{path: reward.py, attribute: compute_score}}}}
trainer: {{total_steps: {steps}, validate_before: false, validate_after: false}}
tracking: [jsonl]
"""


@pytest.mark.nightly
def test_a_run_generates_and_is_updated_by_what_it_trains(
    tiny: Path, tmp_path: Path, trtllm_serve: str
) -> None:
    rows = [{"prompt": f"What is {i} + 1?", "data_source": "sums"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str):\n    return len(set(solution_str)) / 10\n"
    )
    config = CONFIG.format(model=tiny, steps=STEPS, executable=trtllm_serve)
    (tmp_path / "config.yaml").write_text(config)
    done = subprocess.run(
        [sys.executable, "-m", "dovetail.cli.main", "train", "config.yaml"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "dovetail" / "default"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("rollout/trtllm/new_tokens" in row for row in rows) == STEPS
    assert any(row.get("actor/grad_norm", 0.0) > 0 for row in rows)
    assert len(list((run / "logs").glob("rollout-0.trtllm.log*"))) >= STEPS
    assert not list(run.glob("trtllm-*"))
