"""Counts the named functions and files that one step of GRPO enters.

Usage: python tests/architecture/trace_step.py FOLDER [--list]

Trains the demo's model for four steps in FOLDER, with `hf` and `fsdp2` in this process, 4 prompts of 4 samples and a reference model,
and watches step 3 from its samples to the publication of its weights, in all threads. Comprehensions, lambdas and methods such as
`__init__` are not counted. The packages of the two engines are counted apart.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("plugins/rollout_hf/", "plugins/train_fsdp2/")
STEP = 3


@attrs.frozen
class Entered:
    """What a step has entered, apart from engines and inside them."""

    functions: frozenset[tuple[str, str]]
    """File, relative to the checkout, and qualified name."""

    def part(self, engines: bool) -> list[tuple[str, str]]:
        """Return the functions of engines, or the others."""
        return sorted(f for f in self.functions if f[0].startswith(ENGINES) is engines)

    def counts(self) -> dict[str, int]:
        """Return the table's rows about a step."""
        step, engines = self.part(False), self.part(True)
        return {
            "functions": len(step),
            "files": len({file for file, _ in step}),
            "engine_functions": len(engines),
            "engine_files": len({file for file, _ in engines}),
        }


def trace(train: Callable[[], object]) -> Entered:
    """Return what step 3 of a training run in this process enters."""
    from dovetail.run.training_run import TrainingRun

    entered: set[tuple[str, str]] = set()
    files: dict[str, str | None] = {}
    watching = False

    def note(frame: FrameType, event: str, _: object) -> None:
        if not watching or event != "call":
            return
        code = frame.f_code
        if code.co_filename not in files:
            path = Path(code.co_filename)
            ours = path.is_relative_to(ROOT) and "src" in path.parts
            files[code.co_filename] = str(path.relative_to(ROOT)) if ours else None
        file = files[code.co_filename]
        if file is not None and not code.co_name.startswith(("<", "__")):
            entered.add((file, code.co_qualname))

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(run: TrainingRun, *args: Any, **kwargs: Any) -> Any:
            nonlocal watching
            watching = run._steps_begun == STEP
            try:
                return method(run, *args, **kwargs)
            finally:
                watching = False

        return call

    for name in ("collect", "learn", "publish_weights"):
        setattr(TrainingRun, name, watched(getattr(TrainingRun, name)))
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        train()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return Entered(frozenset(entered))


def demo_run(folder: Path) -> Callable[[], object]:
    """Write the demo's model and data, and return what trains on them."""
    import torch

    import dovetail
    from dovetail_demo.data import make_data
    from dovetail_demo.model import make_base

    torch.set_num_threads(1)
    rows, _ = make_data(folder / "data", 1)
    config = {
        "seed": 1,
        "output_dir": str(folder / "runs"),
        "model": {"path": str(make_base(folder / "base", 1)), "dtype": "float32"},
        "data": {
            "train_files": str(rows),
            "train_batch_size": 4,
            "max_prompt_length": 16,
            "max_response_length": 16,
        },
        "rollout": {"name": "hf", "n": 4},
        "actor": {"engine": "fsdp2", "optim": {"lr": 1e-5}, "mini_batch_size": 4},
        "algorithm": {
            "advantage": "grpo",
            "kl": {"in_loss": {"estimator": "k3", "coef": 1e-3}},
        },
        "trainer": {"total_steps": STEP + 1, "save_every": 0},
        "tracking": ["jsonl"],
    }
    return lambda: dovetail.train(config, reward=_reward)


def _reward(solution_str: str, ground_truth: str) -> float:
    return float(len(solution_str) % 2)


if __name__ == "__main__":
    found = trace(demo_run(Path(sys.argv[1])))
    if "--list" in sys.argv:
        for of_engines in (False, True):
            for file, name in found.part(of_engines):
                sys.stdout.write(f"{'engine' if of_engines else 'step'}  {file}  {name}\n")
    sys.stdout.write(json.dumps(found.counts()) + "\n")
