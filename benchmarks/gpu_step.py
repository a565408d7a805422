"""Times GRPO steps of a random-weight Qwen2.5 on accelerators, through `dovetail train`.

    python benchmarks/gpu_step.py --directory /tmp/gpu_step --steps 6
    python benchmarks/gpu_step.py --directory /tmp/gpu_step rollout.name=vllm

Prints one JSON line: medians over the steps after the first two, in seconds and tokens per second, by phase.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import gpu_workload as workload


def configure(args: argparse.Namespace, *, keep_runs: bool = False) -> Path:
    """Write the run's inputs and its config; the config's path."""
    home: Path = args.directory
    home.mkdir(parents=True, exist_ok=True)
    if not keep_runs:
        shutil.rmtree(home / "runs", ignore_errors=True)
    model = home / f"model-{args.model}"
    workload.make_model(model, seed=1, model=args.model)
    workload.write_data(home / "train.jsonl", args.prompts * args.steps, args.prompt_tokens, seed=1)
    (home / "reward.py").write_text(workload.REWARD_FILE)
    config = {
        "project": "gpu",
        "experiment": "step",
        "output_dir": str(home / "runs"),
        "model": {"path": str(model), "dtype": "bfloat16"},
        "data": {
            "train_files": [str(home / "train.jsonl")],
            "train_batch_size": args.prompts,
            "max_prompt_length": args.prompt_tokens + 64,
            "max_response_length": args.new_tokens,
            "plain_prompts": "raw",
        },
        "rollout": {"name": "hf", "n": args.samples, "ignore_eos": True},
        "actor": {"max_tokens_per_micro_batch": 33280, "optim": {"lr": 1e-6}},
        "reward": {"function": {"path": str(home / "reward.py")}},
        "trainer": {"total_steps": args.steps, "save_last": False, "export": "none"},
        "tracking": ["console", "jsonl"],
    }
    path = home / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def figures(args: argparse.Namespace, began: float, seconds: float) -> dict[str, float | int | str]:
    """Medians over the steps after the first two; `began` (seconds since 1970) is when the command started."""
    lines = (args.directory / "runs" / "gpu" / "step" / "metrics.jsonl").read_text().splitlines()
    trained = [row for row in map(json.loads, lines) if "actor/pg_loss" in row]
    steps = trained[2:]
    names = sorted({name for row in steps for name in row if name.startswith("time/")})
    medians = {name: statistics.median(row[name] for row in steps if name in row) for name in names}
    samples = args.prompts * args.samples
    tokens = samples * (args.prompt_tokens + args.new_tokens)
    # What has a further slash in its name is part of a phase.
    phases = sum(s for name, s in medians.items() if name.count("/") == 1 and name != "time/step")
    return {
        "model": args.model,
        "overrides": " ".join(args.overrides),
        **{f"{name.removeprefix('time/')}_s": round(value, 4) for name, value in medians.items()},
        "start_to_first_step_s": round(trained[0]["time"] - trained[0]["time/step"] - began, 1),
        "first_step_s": round(trained[0]["time/step"], 2),
        "outside_phases_s": round(medians["time/step"] - phases, 4),
        "rollout_new_tokens_per_s": round(samples * args.new_tokens / medians["time/rollout"]),
        "update_tokens_per_s": round(tokens / medians["time/update_actor"]),
        "steps": len(steps),
        "step_by_step_s": " ".join(f"{row['time/step']:.2f}" for row in trained),
        "whole_command_s": round(seconds, 1),
    }


def main() -> None:
    """Make the inputs, train, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", choices=sorted(workload.MODELS), default="0.5b")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=workload.PROMPTS)
    parser.add_argument("--samples", type=int, default=workload.RESPONSES)
    parser.add_argument("--prompt-tokens", type=int, default=workload.PROMPT_TOKENS)
    parser.add_argument("--new-tokens", type=int, default=workload.NEW_TOKENS)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    config = configure(args)
    command = [sys.executable, "-m", "dovetail.cli.main", "train", str(config), *args.overrides]
    began = time.time()
    subprocess.run(command, check=True)
    sys.stdout.write(json.dumps(figures(args, began, time.time() - began)) + "\n")


if __name__ == "__main__":
    main()
