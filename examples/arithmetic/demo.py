"""What `make demo` runs: make a task and a model, teach the answer's form, then let GRPO find the right answers.

Usage: `python examples/arithmetic/demo.py --out demo --seed 1`; further arguments override the config, such as
`runtime.name=ray runtime.workers_per_node=2`.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

from data import make_data
from model import make_base
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from warm_start import STEPS, warm_start

CONFIG = Path(__file__).resolve().parent / "config.yaml"
# Threads that wait for one another sleep instead of spinning: with steps as short as these, a machine whose cores are
# shared would otherwise train several times slower. OpenMP reads this when torch is loaded, which is later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

RISEN = 0.8
"""Held-out accuracy that the demo should pass."""


def prepare(directory: Path, seed: int) -> tuple[list[str], float]:
    """Make data and model, and warm the model up.

    Returns:
        Overrides for the config that name them, and the seconds of the warm start.
    """
    print("1. Sums of two numbers below 100, and a Qwen2 of half a million parameters")
    train, held_out = make_data(directory / "data", seed)
    base = make_base(directory / "base", seed)

    print("2. Warm start: a tutor's worked answers; he forgets the carry in two of three")
    columns = (
        TextColumn("   supervised step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as display:
        task = display.add_task("", total=STEPS, loss=float("nan"))
        seconds = warm_start(
            base,
            train,
            directory / "model",
            seed,
            lambda step, loss: display.update(task, completed=step, loss=loss),
        )
    overrides = [
        f"seed={seed}",
        f"model.path={directory / 'model'}",
        f"data.train_files={train}",
        f"data.val_files={held_out}",
    ]
    return overrides, seconds


def free_name(runs: Path, wanted: str) -> str:
    """The name, or the first of `name_2`, `name_3`, … that no earlier run has taken."""
    names = (wanted if i == 1 else f"{wanted}_{i}" for i in count(1))
    return next(name for name in names if not (runs / name).exists())


def train(overrides: list[str], warm_start_seconds: float) -> dict[str, Any]:
    """Run GRPO as `dovetail train` does, and count the warm start as training time."""
    from dovetail.cli.train import run_training
    from dovetail.telemetry import RunDirectory, write_report

    summary = run_training(CONFIG, tuple(overrides))
    summary = {
        **summary,
        "train_seconds": summary["train_seconds"] + warm_start_seconds,
        "warm_start_seconds": warm_start_seconds,
    }
    directory = RunDirectory.open(summary["directory"])
    directory.write_json("summary.json", summary)
    write_report(directory.path)
    return summary


def main() -> int:
    """Run the demo; the exit status is 0 where held-out accuracy rose as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where everything goes")
    parser.add_argument("--seed", type=int, default=1, help="of data, model and training")
    parser.add_argument(
        "overrides", nargs="*", help="of the config, as `dovetail train` takes them"
    )
    arguments = parser.parse_args()

    from transformers.utils import logging as transformers_logging

    from dovetail.errors import DovetailError

    transformers_logging.disable_progress_bar()
    name = f"seed_{arguments.seed}"
    runs = arguments.out / "runs"
    try:
        overrides, seconds = prepare(arguments.out / name, arguments.seed)
        print("3. GRPO: the reward is 1 for the right number after ####, else 0")
        overrides += [
            f"output_dir={runs}",
            f"experiment={free_name(runs / 'arithmetic', name)}",
            *arguments.overrides,
        ]
        summary = train(overrides, seconds)
    except DovetailError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    print(
        f"Held-out accuracy {before:.1%} → {after:.1%} in {summary['train_seconds']:.0f} s of training "
        f"(warm start {seconds:.0f} s); seed {arguments.seed}"
    )
    if after < RISEN or after <= before:
        print(f"It should have passed {RISEN:.0%}. Please report this with {summary['directory']}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
