"""The demo's task under every algorithm: each entry trains the same warm-started model with other settings.

    python examples/arithmetic/algorithms.py --only preset          every preset
    python examples/arithmetic/algorithms.py --jobs 8 --threads 2   everything, eight runs at a time

Prints held-out accuracy before and after, and the mean reward of the first and the last steps, as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from dovetail_demo import CONFIG
from dovetail_demo.warm_start import worked_answer

HERE = Path(__file__).resolve().parent
STEPS = 80
WINDOW = 5
"""Steps over which the first and the last reward are averaged."""

TWO_UPDATES = "actor.mini_batch_size=16"
CLIP = "algorithm.policy_loss={name: ppo_clip, clip_low: 0.2, clip_high: 0.28}"
TWO_REWARDS = f"reward.function.path={HERE / 'two_rewards.py'}"
CRITIC = "critic.optim={lr: 1.0e-3, betas: [0.9, 0.95]}"

_ESTIMATORS: dict[str, list[str]] = {
    "grpo": ["algorithm.advantage=grpo"],
    "grpo without std": ["algorithm.advantage={name: grpo, norm_by_std: false}"],
    "dr_grpo": [
        "algorithm.advantage=dr_grpo",
        "algorithm.loss_aggregation={name: seq_mean_token_sum_norm, length: 32}",
    ],
    "rloo": ["algorithm.advantage=rloo"],
    "reinforce_plus_plus": ["algorithm.advantage=reinforce_plus_plus"],
    "reinforce_plus_plus_baseline": ["algorithm.advantage=reinforce_plus_plus_baseline"],
    "remax": ["algorithm.advantage=remax"],
    "opo": ["algorithm.advantage=opo"],
    "gpg": ["algorithm.advantage=gpg"],
    "grpo_passk": ["algorithm.advantage=grpo_passk"],
    "gdpo": ["algorithm.advantage=gdpo", TWO_REWARDS],
    "optimal_token_baseline": ["algorithm.advantage=optimal_token_baseline"],
    "tir_optimal_token_baseline": ["algorithm.advantage=tir_optimal_token_baseline"],
    "gae": ["algorithm.advantage=gae", CRITIC],
}

_LOSSES: dict[str, list[str]] = {
    "ppo_clip": ["algorithm.policy_loss=ppo_clip"],
    "ppo_clip asymmetric, no dual clip": [
        "algorithm.policy_loss={name: ppo_clip, clip_high: 0.28, dual_clip: null}"
    ],
    "gspo": [
        "algorithm.policy_loss={name: gspo, clip_low: 0.03, clip_high: 0.04}",
        "algorithm.loss_aggregation=seq_mean_token_mean",
    ],
    "cispo": ["algorithm.policy_loss=cispo"],
    "sapo": ["algorithm.policy_loss=sapo"],
    "gpg": ["algorithm.policy_loss=gpg"],
    "gmpo": [
        "algorithm.policy_loss=gmpo",
        "algorithm.loss_aggregation=seq_mean_token_mean",
    ],
    "clip_cov": ["algorithm.policy_loss=clip_cov"],
    "kl_cov": ["algorithm.policy_loss=kl_cov"],
    "dppo, total variation": ["algorithm.policy_loss=dppo"],
    "dppo, binary KL": ["algorithm.policy_loss={name: dppo, divergence: binary_kl}"],
    "reinforce": ["algorithm.policy_loss=reinforce"],
    "dro": ["algorithm.policy_loss=dro"],
}

_KL: dict[str, list[str]] = {
    f"in the loss by {name}": [
        f"algorithm.kl.in_loss={{estimator: {json.dumps(name)}, coef: 0.01}}"
    ]
    for name in ("k1", "abs", "k2", "k3", "k1+", "k3+")
} | {
    "in the reward by k1": ["algorithm.kl.in_reward={estimator: k1, coef: 0.001}"],
    "in the loss, adaptive": [
        "algorithm.kl.in_loss={estimator: k3, coef: 0.01, controller: {name: adaptive, target: 0.05}}"
    ],
    "in the reward, adaptive": [
        "algorithm.kl.in_reward={estimator: k1, coef: 0.001, controller: {name: adaptive, target: 0.05}}"
    ],
}

_AGGREGATIONS: dict[str, list[str]] = {
    "token_mean": ["algorithm.loss_aggregation=token_mean"],
    # A sum over the 256 samples' tokens is some 5,000 times a mean; Adam and the clipped norm take that out again.
    "token_sum": ["algorithm.loss_aggregation=token_sum"],
    "seq_mean_token_sum": ["algorithm.loss_aggregation=seq_mean_token_sum"],
    "seq_mean_token_mean": ["algorithm.loss_aggregation=seq_mean_token_mean"],
    "seq_mean_token_sum_norm": [
        "algorithm.loss_aggregation={name: seq_mean_token_sum_norm, length: 32}"
    ],
}

_DECOUPLED = (
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_token_tis",
    "decoupled_geo_rs_seq_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_token_tis",
    "decoupled_k3_rs_seq_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "disabled",
)
_POLICY_GRADIENT = (
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_token_tis",
    "bypass_pg_geo_rs_seq_tis",
)
_CORRECTIONS: dict[str, list[str]] = {
    name: [f"algorithm.rollout_correction={name}"] for name in _DECOUPLED
} | {
    name: [f"algorithm.rollout_correction={name}", "algorithm.policy_loss=reinforce"]
    for name in _POLICY_GRADIENT
}

_FILTERS: dict[str, list[str]] = {
    "equal_rewards, refilled": [
        "algorithm.sample_filters=[equal_rewards]",
        "algorithm.max_generation_rounds=4",
    ],
    "overlong": ["algorithm.sample_filters=[overlong]"],
    "score_range": [
        "algorithm.sample_filters=[{name: score_range, lower: 0.05, upper: 0.95}]",
        "algorithm.max_generation_rounds=4",
    ],
    "overlong penalty": ["algorithm.overlong_penalty={buffer: 8, factor: 0.5}"],
}

_PROCESS_REWARDS: dict[str, list[str]] = {
    "prime": [
        "algorithm.advantage=prime",
        "roles.prm={objective: implicit_prm, optim: {lr: 3.0e-4, betas: [0.9, 0.95]}}",
    ],
}

_SELF_PLAY: dict[str, list[str]] = {
    "online dpo": [
        "actor.objective={name: dpo, beta: 0.1}",
        "algorithm.stages=[best_worst_pairs]",
    ],
    "sppo": [
        "actor.objective=sppo",
        "algorithm.advantage=win_rate",
        "ref.update.every=10",
    ],
    "spin": [
        "actor.objective={name: dpo, beta: 0.1}",
        "algorithm.stages=[spin_pairs]",
        "ref.update.every=10",
        "data.train_files={worked}",
    ],
}

_PRESETS: dict[str, list[str]] = {
    name: [f"algorithm.preset={name}"]
    for name in (
        "ppo",
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "sapo",
        "rloo",
        "reinforce_plus_plus",
        "remax",
        "opo",
        "gpg",
        "gmpo",
    )
}
_PRESETS["ppo"].append(CRITIC)

MATRIX: dict[str, list[str]] = {
    f"{family}: {name}": [*common, *overrides]
    for family, common, entries in (
        ("preset", [], _PRESETS),
        ("estimator", [CLIP], _ESTIMATORS),
        ("loss", [TWO_UPDATES], _LOSSES),
        ("kl", [TWO_UPDATES], _KL),
        ("aggregation", [TWO_UPDATES], _AGGREGATIONS),
        ("correction", [TWO_UPDATES], _CORRECTIONS),
        ("filter", [CLIP], _FILTERS),
        ("process rewards", [CLIP], _PROCESS_REWARDS),
        ("self-play", [], _SELF_PLAY),
    )
    for name, overrides in entries.items()
}
"""Family and name of every run, to its settings: the config of the demo, whose `algorithm` section is left out."""


def base_config(directory: Path, model: Path, data: Path, seed: int = 1) -> Path:
    """Write the demo's config without its `algorithm` section, and return its path."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    del config["algorithm"]
    config |= {"seed": seed, "output_dir": str(directory / "runs"), "project": "algorithms"}
    config["model"]["path"] = str(model)
    config["data"]["train_files"] = str(data / "train.parquet")
    config["data"]["val_files"] = str(data / "val.parquet")
    config["tracking"] = ["jsonl"]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _worked(config: Path) -> Path:
    """The training problems with their right worked answers as `response`, written beside the config."""
    path = config.with_name("worked.parquet")
    if not path.exists():
        rows = pq.read_table(yaml.safe_load(config.read_text())["data"]["train_files"]).to_pylist()
        for row in rows:
            a, b = row["prompt"][0]["content"].removesuffix("=?").split("+")
            row["response"] = worked_answer(int(a), int(b), carries=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def run(
    config: Path,
    name: str,
    steps: int = STEPS,
    *,
    threads: int | None = None,
    validate: bool = True,
) -> dict[str, Any]:
    """Train one entry of the matrix in a process of its own, with validation before and after, or without any.

    Returns:
        `before` and `after`: held-out accuracy, or None; `first` and `last`: mean reward of the first and the last steps;
        `seconds`; `error`: the end of what it printed, where it failed.
    """
    experiment = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    directory = yaml.safe_load(config.read_text())["output_dir"]
    command = [sys.executable, "-m", "dovetail.cli.main", "train", str(config), *MATRIX[name]]
    command = [part.replace("{worked}", str(_worked(config))) for part in command]
    command += [f"experiment={experiment}", f"trainer.total_steps={steps}"]
    command += ["trainer.validate_every=0", "trainer.save_every=0"]
    if not validate:
        command += ["trainer.validate_before=false", "trainer.validate_after=false"]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    began = time.perf_counter()
    done = subprocess.run(  # noqa: S603 - this interpreter, our own command
        command, capture_output=True, text=True, check=False, env=environment
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        return {"seconds": seconds, "error": (done.stdout + done.stderr)[-3000:]}
    out = Path(directory) / "algorithms" / experiment
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    return {
        "before": summary["accuracy_before"],
        "after": summary["accuracy_after"],
        "first": sum(rewards[:WINDOW]) / WINDOW,
        "last": sum(rewards[-WINDOW:]) / WINDOW,
        "seconds": seconds,
    }


def main() -> int:
    """Run the matrix, or a part of it; the exit status is the number of runs that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="that of `dovetail demo`")
    parser.add_argument("--only", default="", help="entries whose name begins with this")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, help="threads of each run")
    parser.add_argument("--seed", type=int, default=1, help="of data, model and training")
    arguments = parser.parse_args()

    from dovetail_demo.prepare import prepare

    seed = arguments.out / f"seed_{arguments.seed}"
    model = prepare(seed, arguments.seed)  # the run that makes it is finished where there is one
    config = base_config(arguments.out / "algorithms", model, seed / "data", arguments.seed)
    names = [name for name in MATRIX if name.startswith(arguments.only)]
    failed = 0
    print("| algorithm | accuracy before | after | reward, first 5 steps | last 5 | seconds |")
    print("|---|---|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = pool.map(
            lambda name: run(config, name, arguments.steps, threads=arguments.threads), names
        )
        for name, result in zip(names, runs, strict=True):
            if "error" in result:
                failed += 1
                print(f"| {name} | failed | | | | {result['seconds']:.0f} |", flush=True)
                print(result["error"], file=sys.stderr, flush=True)
                continue
            print(
                f"| {name} | {result['before']:.1%} | {result['after']:.1%} | {result['first']:.3f} "
                f"| {result['last']:.3f} | {result['seconds']:.0f} |",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
