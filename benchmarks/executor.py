"""What a step costs besides engines: processor time of a whole run over stub engines, a step.

    python benchmarks/executor.py --steps 1000
    python benchmarks/executor.py --steps 1000 --against OTHER_ENVIRONMENT/bin/python --rounds 5

The rollout answers from its stream, and every model answers with zeros at once; the rest is what a run of PPO with a critic,
a reference and a KL penalty in the reward does: prompts, scoring, batches, dispatch, stages, checks, metrics. `--against`
names the Python of an environment with another state of Dovetail, which runs the same file in alternation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dovetail.batch import Batch
from dovetail.interfaces import TrainEngine, WeightManifest
from dovetail.metrics import Last, Metric
from dovetail.sections import EngineSection
from dovetail_sdk.testing import ScriptedRollout

PROMPTS, SAMPLES = 32, 8


class StubRollout(ScriptedRollout):
    """Answers from the samples' streams, and remembers nothing."""

    name = "stub"

    async def submit(self, request: Any) -> Any:
        self.requests.clear()
        async for completion in super().submit(request):
            yield completion


class StubEngine(TrainEngine):
    """Gives zeros and learns nothing."""

    name = "stub"
    api = ">=3.0,<4"
    capabilities = frozenset({"value_head"})
    Config = EngineSection

    def forward(self, batch: Batch, outputs: frozenset[str]) -> Batch:
        mask = batch["response_mask"]
        zeros = mask.with_values(np.zeros(len(mask.values), np.float32))
        return Batch(dict.fromkeys(sorted(outputs), zeros))

    def update(self, mini_batch: Batch, objective: Any) -> Mapping[str, Metric]:
        return {f"{self.context.role}/grad_norm": Last(0.0)}

    def weight_manifest(self, version: int) -> WeightManifest:
        return WeightManifest(version=version, tensors=())

    def send_weights(self, version: int, manifest: WeightManifest) -> None: ...

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True)

    def load(self, directory: Path) -> None: ...

    def export(self, directory: Path) -> None: ...


def processor_seconds(steps: int) -> float:
    """Processor seconds of a run of so many steps, with its start and its end."""
    import dovetail
    from dovetail_sdk.testing import tiny_model_and_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_model_and_tokenizer(Path(folder) / "model"))
        stub = {"path": str(Path(__file__).resolve())}
        config = {
            "model": {"path": model},
            "output_dir": folder,
            "data": {"train_batch_size": PROMPTS, "max_response_length": 16},
            "rollout": {**stub, "attribute": "StubRollout", "n": SAMPLES},
            "actor": {
                "engine": {**stub, "attribute": "StubEngine"},
                "mini_batch_size": PROMPTS // 2,
            },
            "algorithm": {"preset": "ppo", "kl": {"in_reward": {"coef": 0.01}}},
            "trainer": {
                "total_steps": steps,
                "save_last": False,
                "export": "none",
                "samples_per_step": 0,
            },
            "tracking": ["jsonl"],
        }
        rows = [
            {"prompt": f"{i} + 1 =", "reward_model": {"ground_truth": str(i)}} for i in range(256)
        ]
        began = time.process_time()
        dovetail.train(config, reward=lambda solution_str, **_: len(solution_str) % 2, dataset=rows)
        return time.process_time() - began


def measured(python: str, steps: int) -> float:
    """Milliseconds of processor time a step, in a fresh process, without the start and the end of a run."""
    command = [python, str(Path(__file__).resolve()), "--steps", str(steps), "--once"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure this environment, and another one in alternation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against")
    parser.add_argument(
        "--once", action="store_true", help="measure in this process and print JSON"
    )
    args = parser.parse_args()
    if args.once:
        few = max(args.steps // 10, 1)
        start = processor_seconds(few)
        whole = processor_seconds(few + args.steps)
        print(json.dumps((whole - start) / args.steps * 1e3))
        return
    pythons = {"here": sys.executable} | ({"against": args.against} if args.against else {})
    found: dict[str, list[float]] = {name: [] for name in pythons}
    for _ in range(args.rounds):
        for name, python in pythons.items():
            found[name].append(measured(python, args.steps))
            print(f"{name}: {found[name][-1]:.2f} ms a step")
    for name, values in found.items():
        print(f"median of {name}: {median(values):.2f} ms of processor time a step")
    if args.against:
        print(f"ratio: {median(found['here']) / median(found['against']):.3f}")


if __name__ == "__main__":
    main()
