"""How long advantage estimators and policy losses take on one large step.

    python benchmarks/algorithms.py
    python benchmarks/algorithms.py --samples 4096 --tokens 4096

Estimators work on the whole step; losses, forward and backward, on micro-batches of `--piece` tokens. Times are the
fastest of several repeats: other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dovetail.batch import Batch, Ragged
from dovetail.batch.partition import balanced_partition
from dovetail.interfaces import Groups, LocalReduction, LossInputs, PluginContext, PluginRef
from dovetail.plugins import make_plugin
from dovetail.plugins.index import default_index


def make_step(samples: int, tokens: int, seed: int) -> Batch:
    """Samples of `tokens` tokens in eight turns, a tenth of them a tool's, with every column that estimators and losses read."""
    rng = np.random.default_rng(seed)
    total = samples * tokens
    mask = Ragged(rng.random(total) < 0.9, np.arange(samples + 1) * tokens)
    pi_T = rng.uniform(0.05, 1.0, total)
    scores_N = rng.choice([0.0, 1.0], samples).astype(np.float32)
    rewards_T = np.zeros(total, np.float32)
    rewards_T[mask.offsets[1:] - 1] = scores_N
    turns_T = np.tile(np.arange(tokens) * 8 // tokens, samples)
    ragged = {
        "token_rewards": rewards_T,
        "process_rewards": rng.normal(size=total),
        "values": rng.normal(size=total),
        "log_probs": np.log(pi_T),
        "old_log_probs": np.log(pi_T) + 0.1 * rng.normal(size=total),
        "rollout_log_probs": np.log(pi_T) + 0.1 * rng.normal(size=total),
        "sum_pi_squared": pi_T**2 + rng.random(total) * (1 - pi_T) ** 2,
    }
    return Batch(
        {
            "sample_id": [str(sample) for sample in range(samples)],
            "response_mask": mask,
            "prompt_ids": Ragged(rng.integers(0, 1000, 16 * samples), np.arange(samples + 1) * 16),
            "response_ids": mask.with_values(rng.integers(0, 1000, total)),
            "turn_ids": mask.with_values(np.where(mask.values, turns_T, -1)),
            "scores": scores_N,
            "baseline_scores": scores_N[::-1].copy(),
            "reward_components": [{"right": float(score), "form": 1.0} for score in scores_N],
            "advantages": rng.normal(size=samples).astype(np.float32),
            **{
                name: mask.with_values(values.astype(np.float32)) for name, values in ragged.items()
            },
        }
    )


def loss_inputs(loss: Any, batch: Batch) -> LossInputs:
    """The samples as a loss sees them."""
    mask: Ragged = batch["response_mask"]
    made = loss.prepare(batch, LocalReduction())
    columns = {name: batch[name] for name in type(loss).requires(loss.config)} | dict(made)
    flat = lambda c: c.values if isinstance(c, Ragged) else np.repeat(c, mask.lengths)  # noqa: E731
    return LossInputs(
        log_probs_T=torch.tensor(batch["log_probs"].values * mask.values).requires_grad_(),
        mask_T=torch.tensor(mask.values),
        offsets_N1=torch.tensor(mask.offsets),
        columns={name: torch.tensor(flat(c) * mask.values) for name, c in columns.items()},
    )


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of the fastest of several calls, after one that is not measured."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def main() -> None:
    """Measure, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sample")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--piece", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    step = make_step(options.samples, options.tokens, seed=0)
    groups = Groups.of(np.arange(options.samples) // options.group_size)
    lengths = step["response_mask"].lengths
    count = -(-lengths.sum() // options.piece)
    pieces = [step.take(part) for part in balanced_partition(lengths, int(count))]
    for kind in ("advantage", "policy_loss"):
        for entry in default_index().entries(kind):
            plugin: Any = make_plugin(PluginRef(kind=kind, name=entry.name), PluginContext())
            if kind == "advantage":
                call = lambda: plugin.estimate(step, groups)  # noqa: B023, E731
            else:
                inputs = [loss_inputs(plugin, piece) for piece in pieces]
                call = lambda: [  # noqa: E731
                    plugin.token_losses(piece).losses_T.sum().backward()  # noqa: B023
                    for piece in inputs  # noqa: B023
                ]
            print(f"{kind}/{entry.name}: {fastest(call, options.repeats):.1f} ms")


if __name__ == "__main__":
    main()
