"""Draws what `gpu_curves.py` found: held-out accuracy against samples, and against seconds of a run that has the accelerator alone.

    pip install matplotlib
    python benchmarks/curves_figure.py /tmp/curves/results.jsonl docs/images/learning_curves.svg

A line is the mean of a system's seeds, the band from the lowest to the highest. Seconds are steps times the median step of the
system's runs alone, so that runs which shared the accelerator do not count what the others took; a system that never ran alone has no
such line.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

SKIPPED = 2
"""First steps, left out of the median of a run alone."""


def drawn(axes: Any, runs: list[dict[str, Any]], a_step: float, colour: str) -> None:
    """Draw the mean and the range of one system's runs; `a_step` is what a step adds to the horizontal axis."""
    label = f"{runs[0]['system']} ({len(runs)} seed{'s' * (len(runs) > 1)})"
    accuracies = defaultdict(list)
    for run in runs:
        for step, _, accuracy in run["curve"]:
            accuracies[step].append(accuracy * 100)
    steps = sorted(step for step, found in accuracies.items() if len(found) == len(runs))
    across = [step * a_step for step in steps]
    means = [statistics.mean(accuracies[step]) for step in steps]
    axes.plot(across, means, label=label, color=colour)
    axes.fill_between(
        across,
        [min(accuracies[s]) for s in steps],
        [max(accuracies[s]) for s in steps],
        color=colour,
        alpha=0.15,
    )


def main() -> None:
    """Draw a row of two figures for each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("figure", type=Path)
    args = parser.parse_args()
    runs = [json.loads(line) for line in args.results.read_text().splitlines()]
    seconds = defaultdict(list)
    for run in runs:
        if run["alone"]:
            seconds[run["system"]] += run["steps_s"][SKIPPED:]
    alone = {system: statistics.median(found) for system, found in seconds.items() if found}
    kept = [run for run in runs if not run["alone"] and run["curve"]]
    tasks = list(dict.fromkeys(run["task"] for run in kept))
    colours = {system: f"C{i}" for i, system in enumerate(sorted({r["system"] for r in kept}))}
    mpl.rcParams["svg.hashsalt"] = "curves"  # the same figure gives the same file
    figure, rows = plt.subplots(len(tasks), 2, figsize=(9, 3.2 * len(tasks)), squeeze=False)
    for task, (by_samples, by_seconds) in zip(tasks, rows, strict=True):
        of_task = [run for run in kept if run["task"] == task]
        for system in dict.fromkeys(run["system"] for run in of_task):
            seeds = [run for run in of_task if run["system"] == system]
            drawn(by_samples, seeds, seeds[0]["samples_a_step"], colours[system])
            if system in alone:
                drawn(by_seconds, seeds, alone[system], colours[system])
        most = max(accuracy for run in of_task for _, _, accuracy in run["curve"])
        for axes, name in ((by_samples, "samples"), (by_seconds, "seconds, alone")):
            axes.set(title=task, xlabel=name, ylabel="held-out accuracy, %")
            axes.set_ylim(0, math.ceil(most * 12) * 10)
            axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(args.figure, metadata={"Date": None} if args.figure.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
