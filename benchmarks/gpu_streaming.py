"""Times `streaming` against `on_policy` on accelerators of one host, with response lengths that are drawn once and forced.

    python benchmarks/gpu_streaming.py --directory /tmp/s --steps 8 colocated separate staleness_1 staleness_3
    python benchmarks/gpu_streaming.py --directory /tmp/s --steps 8 --gpus 4 --training 2 separate staleness_3 staleness_3_2.5

*colocated*: all accelerators train and generate in turn. *separate*: `--training` of them train, the others generate. *staleness_S*: the
same, under `streaming` with `max_staleness: S` and `on_sync: abort`; *staleness_S_R* with `over_sampling: R`, too. The lengths are
log-normal, with the same draw for the same sample in each run. Prints one JSON line a run. Under `streaming` in the order of admission,
S + 1 steps are admitted at once at the start and tend to end together, so that its figures are over whole periods of S + 1 steps, the
last that fit without the first two steps; elsewhere over all but the first two.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_workload as workload
import numpy as np

LOOP_FILE = """\
import hashlib

import numpy as np

from dovetail.interfaces import AgentLoop, SampleFilter
from dovetail.sections import EpisodeSection


class Forced(AgentLoop):
    \"\"\"One turn, as long as the sample's name says.\"\"\"

    name = "forced"
    api = ">=1.0,<2"
    Config = EpisodeSection

    async def run(self, session):
        seed = int.from_bytes(hashlib.sha256(session.sample_id.encode()).digest()[:8], "little")
        length = np.exp(np.random.default_rng(seed).normal(np.log(MEDIAN), SIGMA))
        await session.generate(max_new_tokens=int(np.clip(length, 1, LONGEST)))


class Lateness(SampleFilter):
    \"\"\"Keeps everything, and writes down how long each sample is and the oldest version of weights in it.\"\"\"

    name = "lateness"
    api = ">=1.0,<2"
    action = "mask"

    @classmethod
    def requires(cls, config):
        return frozenset({"token_weight_versions", "response_mask"})

    def keep(self, columns, groups):
        versions = columns["token_weight_versions"]
        rows = [(len(row), int(row.min())) for row in versions]
        with open(LATENESS, "a") as file:
            print(rows, file=file)
        return np.ones(len(columns), np.bool_)
"""


def overrides(placement: str, gpus: int, training: int) -> list[str]:
    """What sets a placement and its trainer apart."""
    if placement == "colocated":
        return ["rollout.gpu_memory_utilization=0.4"]
    apart = [
        f"runtime.pools={{train: {{roles: [actor], gpus_per_node: {training}}}, generate: {{roles: rollout, gpus_per_node: {gpus - training}}}}}",
        "rollout.gpu_memory_utilization=0.85",
    ]
    if placement == "separate":
        return apart
    staleness, _, over_sampling = placement.removeprefix("staleness_").partition("_")
    return [
        *apart,
        "trainer.name=streaming",
        f"trainer.max_staleness={staleness}",
        f"trainer.over_sampling={over_sampling or 'null'}",
        "trainer.on_sync=abort",
    ]


def configure(args: argparse.Namespace, placement: str) -> Path:
    """Write the run's inputs and its config; the config's path."""
    home: Path = args.directory
    home.mkdir(parents=True, exist_ok=True)
    model = home / f"model-{args.model}"
    workload.make_model(model, seed=1, model=args.model)
    prompts = args.prompts * (args.steps + 8)
    workload.write_data(home / "train.jsonl", prompts, workload.PROMPT_TOKENS, seed=1)
    (home / "reward.py").write_text(workload.REWARD_FILE)
    lateness = home / f"{placement}.lateness"
    lateness.unlink(missing_ok=True)
    facts = f"MEDIAN, SIGMA, LONGEST, LATENESS = {args.median}, {args.sigma}, {args.longest}, {str(lateness)!r}\n"
    (home / f"{placement}.py").write_text(LOOP_FILE + facts)
    shutil.rmtree(home / "runs" / "gpu" / placement, ignore_errors=True)
    config: dict[str, Any] = {
        "project": "gpu",
        "experiment": placement,
        "output_dir": str(home / "runs"),
        "model": {"path": str(model), "dtype": "bfloat16"},
        "data": {
            "train_files": [str(home / "train.jsonl")],
            "train_batch_size": args.prompts,
            "max_prompt_length": workload.PROMPT_TOKENS + 64,
            "max_response_length": args.longest,
            "plain_prompts": "raw",
        },
        "rollout": {
            "name": "vllm",
            "n": args.samples,
            "ignore_eos": True,
            "max_model_len": args.longest + workload.PROMPT_TOKENS + 64,
            "agent_loop": {
                "path": str(home / f"{placement}.py"),
                "attribute": "Forced",
                "max_turn_tokens": args.longest,
            },
        },
        "runtime": {"name": "ray", "gpus_per_node": args.gpus},
        "actor": {"max_tokens_per_micro_batch": args.micro_batch, "optim": {"lr": 1e-6}},
        "algorithm": {
            "sample_filters": [{"path": str(home / f"{placement}.py"), "attribute": "Lateness"}]
        },
        "reward": {"function": {"path": str(home / "reward.py")}},
        "trainer": {"total_steps": args.steps, "save_last": False, "export": "none"},
        "tracking": ["console", "jsonl"],
    }
    path = home / f"{placement}.yaml"
    path.write_text(json.dumps(config))
    return path


def period(placement: str) -> int:
    """After how many steps what is admitted is all anew."""
    name, _, staleness = placement.partition("_")
    return int(staleness) + 1 if name == "staleness" and "_" not in staleness else 1


def by_length(path: Path, count: int) -> dict[str, Any]:
    """Mean length, and the share of samples that are a version or more behind their step, by quartile of length, shortest first."""
    steps = [json.loads(line.replace("(", "[").replace(")", "]")) for line in path.open()]
    counted = list(enumerate(steps, 1))[-count:]
    lengths = np.array([row[0] for _, rows in counted for row in rows])
    late = np.array([row[1] < number for number, rows in counted for row in rows])
    quartiles = np.digitize(lengths, np.quantile(lengths, [0.25, 0.5, 0.75]), right=True)
    shares = [round(float(late[quartiles == quartile].mean()), 3) for quartile in range(4)]
    return {"mean_length": round(float(lengths.mean()), 1), "late_by_quartile": shares}


def figures(args: argparse.Namespace, placement: str) -> dict[str, Any]:
    """Means over the steps that count."""
    path = args.directory / "runs" / "gpu" / placement / "metrics.jsonl"
    rows = [row for row in map(json.loads, path.open()) if "actor/pg_loss" in row]
    count = (len(rows) - 2) // period(placement) * period(placement)
    steps = rows[-count:]
    seconds = rows[-1]["time"] - rows[-count - 1]["time"]

    def mean(name: str) -> float:
        return float(np.mean([row.get(name, 0.0) for row in steps]))

    step = seconds / len(steps)
    trainer_waits = mean("time/rollout") + mean("time/drain") + mean("time/weight_sync")
    return {
        "placement": placement,
        "model": args.model,
        "samples_per_s": round(args.prompts * args.samples * len(steps) / seconds, 1),
        "step_s": round(step, 2),
        "steps_s": [round(row["time/step"], 1) for row in rows],
        "update_s": round(mean("time/update_actor"), 2),
        "wait_s": round(mean("time/rollout"), 2),
        "publication_s": [
            round(row.get("time/drain", 0.0) + row.get("time/weight_sync", 0.0), 3) for row in steps
        ],
        "trainer_idle": round(trainer_waits / step, 3),
        "rollout_idle": round(mean("rollout/idle_seconds") / step, 3),
        "staleness_mean": round(mean("rollout/staleness_mean"), 2),
        "staleness_max": max(row.get("rollout/staleness_max", 0.0) for row in steps),
        "steps": count,
        **by_length(args.directory / f"{placement}.lateness", count),
        "phases_s": {
            name.removeprefix("time/"): round(mean(name), 3)
            for name in sorted({n for row in steps for n in row if n.startswith("time/")})
        },
    }


def main() -> None:
    """Train once in each placement, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", choices=sorted(workload.MODELS), default="0.5b")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=workload.PROMPTS)
    parser.add_argument("--samples", type=int, default=workload.RESPONSES)
    parser.add_argument("--median", type=int, default=300)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument(
        "--training", type=int, default=1, help="GPUs that train where the others generate"
    )
    parser.add_argument("--micro-batch", type=int, default=16384)
    parser.add_argument("--set", action="append", default=[], help="an override of every run")
    parser.add_argument("placements", nargs="+")
    args = parser.parse_args()
    for placement in args.placements:
        config = configure(args, placement)
        command = [sys.executable, "-m", "dovetail.cli.main", "train", str(config)]
        began = time.time()
        own = overrides(placement, args.gpus, args.training)
        subprocess.run([*command, *own, *args.set], check=True)
        found = figures(args, placement) | {"whole_command_s": round(time.time() - began, 1)}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
