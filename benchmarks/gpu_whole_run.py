"""Times whole runs of a large model on accelerators of one host: start, steps, checkpoint, export and resuming.

    python benchmarks/gpu_whole_run.py grpo --directory /tmp/whole --model 7b --steps 4 [key=value …]
    python benchmarks/gpu_whole_run.py sft  --directory /tmp/whole --model 7b
    python benchmarks/gpu_whole_run.py dpo  --directory /tmp/whole --model 7b --part train
    python benchmarks/gpu_whole_run.py sft  --directory /tmp/whole --gpus 2 --part train actor.engine=fsdp2 trainer.save_last=false

`grpo` generates with vLLM, which shares the accelerators and sleeps between rollouts; `sft` and `dpo` train on examples of one
length. `train` makes `--steps` steps and saves a checkpoint, `adapter` exports the adapter alone, `resume` trains one step more,
`export` merges and writes the whole model; without `train` the parts are of the run of an earlier command, given the same options.
Further `key=value` are overrides of the config; without `actor.engine` the weights are frozen beside adapters of rank 32.

Prints one JSON line after each part, each with all figures so far, so that what a time limit cuts off loses nothing. Seconds
are medians without the first step. Utilisation is 4·N·T over the update's time and `--peak-tflops` of every accelerator, since
frozen weights need no gradient of their own (6·N·T without adapters); what is computed again, and attention, count for nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu_step
import gpu_workload as workload
from gpu_checkpoint import exported, resumed, rows
from update_workload import parameters_of

LORA = "actor.engine={name: fsdp2, lora: {rank: 32}}"
GIB = 2**30
PARTS = ("train", "adapter", "resume", "export")
GENERATES = ("rollout.name=vllm", "rollout.offload=true")
"""What `grpo` sets besides: the engine's memory is the trainer's while it updates."""
PROBE = "weight_check/mean_difference"


def write_examples(args: argparse.Namespace) -> dict[str, Any]:
    """Write rows of `sft` or `dpo` for all steps; the config's sections that depend on which.

    A digit is a token, and the end of a response another: an example has exactly `--tokens`, a pair twice that.
    """
    pairs = args.what == "dpo"
    count = args.tokens_a_step // args.tokens
    texts = workload.prompts(count * (args.steps + 1), args.tokens - 1, seed=1)
    keys = ("chosen", "rejected") if pairs else ("response",)
    examples = [texts[i :: len(keys)] for i in range(len(keys))]
    file = args.directory / f"{args.what}.jsonl"
    with file.open("w") as out:
        for answers in zip(*examples, strict=False):
            row = {"prompt": "7", **dict(zip(keys, (text[1:] for text in answers), strict=True))}
            out.write(json.dumps(row) + "\n")
    objective = {"name": "dpo", "beta": 0.1} if pairs else "nll"
    return {
        "data": {
            "train_files": str(file),
            "plain_prompts": "raw",
            "train_batch_size": count // len(keys),
            "max_prompt_length": args.tokens,
            "max_response_length": args.tokens,
        },
        "actor": {
            "objective": objective,
            "max_tokens_per_micro_batch": 32768,
            "optim": {"lr": 1e-6},
        },
        "trainer": {"name": "supervised", "examples": "preferences" if pairs else "conversations"},
    }


def configure(args: argparse.Namespace) -> Path:
    """Write the run's inputs and its config; the config's path."""
    path = gpu_step.configure(args, keep_runs="train" not in args.parts)
    config = json.loads(path.read_text())
    config["experiment"] = args.what
    if args.what != "grpo":
        for name in ("rollout", "reward"):
            del config[name]
        config |= write_examples(args)
    config["trainer"] |= {"total_steps": args.steps, "export": "none", "save_last": True}
    path = args.directory / f"{args.what}.json"
    path.write_text(json.dumps(config))
    return path


def seconds(steps: list[Mapping[str, float]]) -> dict[str, float]:
    """Return the median seconds of each phase over these rows of metrics."""
    names = sorted({name for row in steps for name in row if name.startswith("time/")})
    medians = {
        f"{name.removeprefix('time/')}_s": statistics.median(
            row[name] for row in steps if name in row
        )
        for name in names
    }
    return {name: round(value, 3) for name, value in medians.items()}


def trained(args: argparse.Namespace, run: Path, began: float, size: int) -> dict[str, Any]:
    """What the metrics of a run say; `began` (seconds since 1970) is when its command started, `size` its parameters."""
    steps = rows(run, "time/step")
    found = seconds(steps[1:]) | seconds(rows(run, "time/checkpoint"))
    if args.what == "grpo":
        tokens = args.prompts * args.samples * (args.prompt_tokens + args.new_tokens)
        new = args.prompts * args.samples * args.new_tokens
        found["rollout_new_tokens_per_s"] = round(new / found["rollout_s"])
    else:
        tokens = args.tokens_a_step
    work = (4 if "lora" in " ".join(args.overrides) else 6) * size * tokens
    rate = work / found["update_actor_s"]
    sent = steps[-1].get("perf/weight_sync_bytes_per_second", 0.0) * found.get("weight_sync_s", 0.0)
    peaks = [row.get("actor/max_memory_allocated_bytes", 0.0) for row in steps]
    return {
        "start_to_first_step_s": round(steps[0]["time"] - steps[0]["time/step"] - began, 1),
        "first_step_s": round(steps[0]["time/step"], 2),
        **found,
        "step_by_step_s": " ".join(f"{row['time/step']:.2f}" for row in steps),
        "tokens_per_s": round(tokens / found["step_s"]),
        "update_tokens_per_s": round(tokens / found["update_actor_s"]),
        "utilisation": round(rate / (args.peak_tflops * args.gpus * 1e12), 4),
        "trainer_peak_gib": round(max(peaks) / GIB, 1),
        "weight_sync_gb": round(sent / 1e9, 3),
        "rollout_freed_gib": round(steps[-1].get("rollout/freed_bytes", 0.0) / GIB, 1),
        "weight_check": max((row.get(PROBE, 0.0) for row in steps), default=0.0),
    }


def main() -> None:
    """Make the inputs, run the parts, and print the figures after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("grpo", "sft", "dpo"))
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", choices=sorted(workload.MODELS), default="7b")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="of an example of sft and dpo")
    parser.add_argument("--tokens-a-step", type=int, default=65536, help="of sft and dpo")
    parser.add_argument("--gpus", type=int, default=1, help="2 and more: ranks of Ray's runtime")
    parser.add_argument("--part", action="append", choices=PARTS, help="absent: all")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="measured on one H200")
    args = parser.parse_intermixed_args()
    args.parts = args.part or PARTS
    if not any(text.startswith("actor.engine") for text in args.overrides):
        args.overrides.insert(0, LORA)
    if args.what == "grpo":
        args.overrides[:0] = GENERATES
    if args.gpus > 1:
        args.overrides[:0] = ("runtime.name=ray", f"runtime.gpus_per_node={args.gpus}")
    config = configure(args)
    size = parameters_of(args.directory / f"model-{args.model}")
    run = args.directory / "runs" / "gpu" / args.what
    command = [sys.executable, "-m", "dovetail.cli.main", "train", str(config), *args.overrides]
    figures: dict[str, Any] = {"what": args.what, "model": args.model, "parameters": size}

    def say(**more: Any) -> None:
        figures.update(more)
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()

    if "train" in args.parts:
        began = time.time()
        subprocess.run(command, check=True)
        whole = round(time.time() - began, 1)
        say(gpus=args.gpus, **trained(args, run, began, size), whole_command_s=whole)
        for kept in list((run / "checkpoints").glob("step_*"))[-1:]:
            held = sum(file.stat().st_size for file in kept.rglob("*") if file.is_file())
            say(checkpoint_gb=round(held / 1e9, 3))
    if "adapter" in args.parts:
        say(**{f"adapter_{k}": v for k, v in exported(args.directory, run, "--adapter").items()})
    if "resume" in args.parts:
        say(resume_to_first_step_s=round(resumed(command, run, args.steps), 1))
    if "export" in args.parts:
        say(**exported(args.directory, run))
        shutil.rmtree(args.directory / "exported")


if __name__ == "__main__":
    main()
