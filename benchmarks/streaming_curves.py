"""Learning curves of the trainer `streaming` on the demo's task: staleness by correction by seed.

    python benchmarks/streaming_curves.py --directory /tmp/curves --parallel 15
    python benchmarks/streaming_curves.py --directory /tmp/curves --staleness 0 4 --seeds 1 --steps 40 actor.optim.lr=3e-4

Each run trains the demo's warm-started model in a process of its own, with one thread. *on* is the correction that the trainer brings,
`decoupled_token_is`; *off* is the same without its weights, so that stale samples count as if the newest weights had drawn them;
*clip* has no correction, and the loss clips the ratio to the policy that drew. Without staleness there is nothing to correct: one run a
seed. The settings, the same for all, let off-policyness hurt: four updates a step, which together move the policy further than the
demo's one. `on_sync: drain` makes every sample of a step, after the first ones, as old as the bound allows. `key=value` overrides the
config of every run.

Prints a line as each run ends, held-out accuracy by step, and last one line of JSON: accuracy halfway, after training and in the mean
of all validations, by staleness and correction, over the seeds. A run that is there already is not repeated. Exits with the number of runs
that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import yaml

from dovetail_demo import CONFIG

SETTINGS = (
    "actor.optim={lr: 1.5e-4, betas: [0.9, 0.95], warmup_steps: 5, schedule: linear, min_lr_ratio: 0.1}",
    "actor.mini_batch_size=8",  # of 32 prompts: four updates a step
    "preflight.ignore=streaming_unsound",  # which refuses `off`
)
CORRECTIONS = {
    "on": (),
    "off": ("algorithm.rollout_correction={mode: decoupled, weights: null}",),
    "clip": ("algorithm.rollout_correction=null",),
}
QUIET = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
"""The environment of every process: one thread, no accelerator, no network."""


@attrs.frozen
class Curve:
    """One run: which it is, and where it goes."""

    staleness: int
    correction: str
    seed: int
    directory: Path

    @property
    def name(self) -> str:
        """Its experiment."""
        return f"staleness_{self.staleness}_{self.correction}_seed_{self.seed}"

    @property
    def run(self) -> Path:
        """Its run directory."""
        return self.directory / "runs" / "curves" / self.name

    def command(self, steps: int, every: int, overrides: list[str]) -> list[str]:
        """The command that trains it."""
        trainer = (
            f"{{name: streaming, max_staleness: {self.staleness}, on_sync: drain, total_steps: {steps}, "
            f"validate_every: {every}, save_last: false, export: none}}"
        )
        return [
            *(sys.executable, "-m", "dovetail", "train", str(self.directory / f"{self.seed}.yaml")),
            *(f"experiment={self.name}", f"trainer={trainer}", *SETTINGS),
            *(CORRECTIONS[self.correction] if self.staleness else ()),
            *overrides,
        ]

    def accuracies(self) -> dict[int, float]:
        """Held-out accuracy by step, 0 for before training: the greedy answer's share of right ones."""
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row["val/acc@1"] for row in rows if "val/acc@1" in row}

    def staleness_mean(self) -> float:
        """Mean staleness of the trained tokens, in versions, over the second half of the steps."""
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        ages = [row.get("rollout/staleness_mean", 0.0) for row in rows if "time/step" in row]
        return statistics.mean(ages[len(ages) // 2 :])


def prepare(directory: Path, seed: int) -> None:
    """Make data and the warm-started model of a seed, and the config of its runs."""
    home = directory / f"seed_{seed}"
    made = ("--out", str(home), "--seed", str(seed), "--device", "cpu")
    subprocess.run([sys.executable, "-m", "dovetail_demo.prepare", *made], check=True, env=QUIET)
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config |= {"seed": seed, "project": "curves", "output_dir": str(directory / "runs")}
    config["model"]["path"] = str(home / "warm_start" / "final")
    for part in ("train", "val"):
        config["data"][f"{part}_files"] = str(home / "data" / f"{part}.parquet")
    del config["actor"]["optim"]
    config["tracking"] = ["jsonl"]
    (directory / f"{seed}.yaml").write_text(yaml.safe_dump(config))


def train(curve: Curve, args: argparse.Namespace) -> str | None:
    """Train one run, unless it is there; the end of its log where it failed."""
    summary = curve.run / "summary.json"
    if summary.exists() and json.loads(summary.read_text())["status"] == "completed":
        return None
    shutil.rmtree(curve.run, ignore_errors=True)
    log = args.directory / f"{curve.name}.log"
    began = time.monotonic()
    with log.open("w") as out:
        done = subprocess.run(
            curve.command(args.steps, args.every, args.overrides),
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
            env=QUIET,
        )
    if done.returncode:
        return log.read_text()[-2000:]
    reached = list(curve.accuracies().values())[-1]
    seconds = time.monotonic() - began
    print(f"{curve.name}: {reached:.1%} in {seconds:.0f} s", flush=True)
    return None


def table(curves: list[Curve]) -> list[dict[str, Any]]:
    """For each staleness and correction: accuracies of its runs, in the order of the seeds, and their means."""
    rows = []
    for staleness, correction in dict.fromkeys((c.staleness, c.correction) for c in curves):
        runs = [c for c in curves if (c.staleness, c.correction) == (staleness, correction)]
        found = [list(c.accuracies().values()) for c in runs]
        halfway = [accuracies[len(accuracies) // 2] for accuracies in found]
        after = [accuracies[-1] for accuracies in found]
        rows.append(
            {
                "staleness": staleness,
                "correction": correction if staleness else None,
                "seeds": [c.seed for c in runs],
                "halfway": [round(value, 4) for value in halfway],
                "after": [round(value, 4) for value in after],
                "halfway_mean": round(statistics.mean(halfway), 4),
                "after_mean": round(statistics.mean(after), 4),
                "over_the_run_mean": round(statistics.mean(map(statistics.mean, found)), 4),
                "staleness_mean": round(statistics.mean(c.staleness_mean() for c in runs), 2),
            }
        )
    return rows


def main() -> int:
    """Prepare, train and print; the exit status is the number of runs that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="for models, data and runs")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=["on", "off"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=120, help="of each run")
    parser.add_argument("--every", type=int, default=5, help="steps between validations")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_intermixed_args()
    args.directory = args.directory.resolve()
    args.directory.mkdir(parents=True, exist_ok=True)

    curves = [
        Curve(staleness, correction, seed, args.directory)
        for staleness in args.staleness
        for correction in (args.corrections if staleness else ["on"])
        for seed in args.seeds
    ]
    with ThreadPoolExecutor(args.parallel) as pool:
        list(pool.map(lambda seed: prepare(args.directory, seed), args.seeds))
        errors = list(pool.map(lambda curve: train(curve, args), curves))
    for curve, error in zip(curves, errors, strict=True):
        if error is not None:
            print(f"{curve.name} failed: {error}", file=sys.stderr, flush=True)
    done = [curve for curve, error in zip(curves, errors, strict=True) if error is None]
    for curve in done:
        points = " ".join(f"{step}:{value:.3f}" for step, value in curve.accuracies().items())
        print(f"{curve.name} {points}")
    print(json.dumps(table(done)))
    return len(curves) - len(done)


if __name__ == "__main__":
    raise SystemExit(main())
