"""How fast the policy losses are: forward and backward against memory bandwidth and against a loop over padded samples.

    python benchmarks/losses.py                                        # about a minute on two cores
    python benchmarks/losses.py --samples 4096 --max-tokens 4096       # the full size

The bound is what it takes to read each input once, at the bandwidth that plain copies and sums reach in the same run.
`whole` times all samples at once; `pieces` times them in micro-batches of `--piece` tokens, as an engine calls a loss;
`compiled` is torch.compile of the whole. Figures are the fastest of several repeats: other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dovetail.batch import Batch, Ragged
from dovetail.batch.partition import budget_partition
from dovetail.interfaces import LocalReduction, LossInputs, PluginContext, PluginRef
from dovetail.plugins import make_plugin

LOSSES = (
    "ppo_clip",
    "gspo",
    "cispo",
    "sapo",
    "gpg",
    "gmpo",
    "clip_cov",
    "kl_cov",
    "dppo",
    "reinforce",
    "dro",
)

LARGE = 64 << 20
"""Numbers in the arrays that bandwidth is measured with: more than a cache holds."""


def mini_batch(samples: int, max_tokens: int, seed: int) -> Batch:
    """Samples of 1 to `max_tokens` tokens, a tenth of them masked, with every column that a loss reads."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, max_tokens + 1, samples))])
    tokens = int(offsets[-1])
    log_probs = -rng.exponential(0.5, tokens).astype(np.float32)
    near = lambda: np.minimum(log_probs + 0.2 * rng.standard_normal(tokens, np.float32), 0)  # noqa: E731
    return Batch(
        {
            "sample_id": [str(sample) for sample in range(samples)],
            "response_mask": Ragged(rng.random(tokens, np.float32) < 0.9, offsets),
            "advantages": rng.normal(size=samples).astype(np.float32),
            "log_probs": Ragged(log_probs, offsets),
            "old_log_probs": Ragged(near(), offsets),
            "rollout_log_probs": Ragged(near(), offsets),
        }
    )


def loss_inputs(batch: Batch, names: list[str]) -> LossInputs:
    """The samples as a loss sees them."""
    mask: Ragged = batch["response_mask"]
    flat = lambda c: c.values if isinstance(c, Ragged) else np.repeat(c, mask.lengths)  # noqa: E731
    return LossInputs(
        log_probs_T=torch.tensor(batch["log_probs"].values * mask.values).requires_grad_(),
        mask_T=torch.tensor(mask.values),
        offsets_N1=torch.tensor(mask.offsets),
        columns={name: torch.tensor(flat(batch[name]) * mask.values) for name in names},
    )


def forward_backward(loss: Any) -> Callable[[LossInputs], list[Tensor]]:
    """Losses, their gradient, and every tensor of the metrics."""

    def call(inputs: LossInputs) -> list[Tensor]:
        found = loss.token_losses(inputs)
        found.losses_T.backward(torch.ones_like(found.losses_T))
        gradient_T = inputs.log_probs_T.grad
        inputs.log_probs_T.grad = None
        return [found.losses_T, gradient_T, *figures(found.metrics)]

    return call


def compiled(loss: Any, example: LossInputs) -> Callable[[LossInputs], list[Tensor]]:
    """The same with the loss compiled, for inputs of the example's sizes.

    It is traced into a graph of tensor operations first, because torch.compile can't look into frozen attrs classes.
    """

    def forward(log_probs_T: Tensor, columns: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        inputs = attrs.evolve(example, log_probs_T=log_probs_T, columns=columns)
        found = loss.token_losses(inputs)
        return found.losses_T, figures(found.metrics)

    graph = make_fx(forward)(example.log_probs_T, dict(example.columns))
    fast = torch.compile(graph, dynamic=False)

    def call(inputs: LossInputs) -> list[Tensor]:
        losses_T, rest = fast(inputs.log_probs_T, dict(inputs.columns))
        losses_T.backward(torch.ones_like(losses_T))
        gradient_T = inputs.log_probs_T.grad
        inputs.log_probs_T.grad = None
        return [losses_T, gradient_T, *rest]

    return call


def figures(metrics: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor in the metrics."""
    found = [getattr(m, field.name) for m in metrics.values() for field in attrs.fields(type(m))]
    return [value for value in found if isinstance(value, Tensor)]


def padded_loop(loss: Any, batch: Batch, names: list[str], count: int) -> Callable[[], None]:
    """One sample after another, each padded to the longest, every metric fetched; the first `count` of them."""
    width = int(batch["response_mask"].lengths.max())
    call = forward_backward(loss)
    rows = []
    for row in range(count):
        inputs = loss_inputs(batch.slice(row, row + 1), names)
        fill = lambda x: torch.nn.functional.pad(x, (0, width - len(x)))  # noqa: E731
        rows.append(
            LossInputs(
                log_probs_T=fill(inputs.log_probs_T.detach()).requires_grad_(),
                mask_T=fill(inputs.mask_T),
                offsets_N1=torch.tensor([0, width]),
                columns={name: fill(column) for name, column in inputs.columns.items()},
            )
        )

    def run() -> None:
        for inputs in rows:
            for value in call(inputs)[2:]:
                value.item()

    return run


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several calls, after one that is not measured."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def bandwidth(repeats: int) -> float:
    """Bytes a second that plain copies and sums of large float32 arrays reach, whichever is more."""
    source, target = torch.ones(LARGE), torch.empty(LARGE)
    copy = 2 * source.nbytes / fastest(lambda: target.copy_(source), repeats)
    return max(copy, source.nbytes / fastest(source.sum, repeats))


def measure(name: str, batch: Batch, options: argparse.Namespace) -> dict[str, Any]:
    """One loss: seconds of every way to run it, and of the bound."""
    loss: Any = make_plugin(PluginRef(kind="policy_loss", name=name), PluginContext())
    config = loss.config
    result: dict[str, Any] = {"loss": name}
    prepared: dict[str, Ragged] = {}
    if type(loss).prepares(config):
        result["prepare"] = fastest(lambda: loss.prepare(batch, LocalReduction()), 1)
        prepared = dict(loss.prepare(batch, LocalReduction()))
    batch = batch.with_columns(prepared)
    names = sorted(type(loss).requires(config) | prepared.keys())
    inputs = loss_inputs(batch, names)
    tensors = [inputs.log_probs_T, inputs.mask_T, inputs.offsets_N1, *inputs.columns.values()]
    result["bytes"] = sum(tensor.nbytes for tensor in tensors)
    result["bound"] = result["bytes"] / bandwidth(options.repeats)

    call = forward_backward(loss)
    result["whole"] = fastest(lambda: call(inputs), options.repeats)
    parts = budget_partition(batch["response_mask"].lengths, options.piece)
    pieces = [loss_inputs(batch.take(np.sort(np.array(part))), names) for part in parts]
    result["pieces"] = fastest(lambda: [call(piece) for piece in pieces], options.repeats)
    if options.compile:
        fast = compiled(loss, inputs)
        for got, want in zip(fast(inputs), call(inputs), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        result["compiled"] = fastest(lambda: fast(inputs), options.repeats)
        torch.compiler.reset()
    few = min(options.loop_samples, options.samples)
    result["loop"] = fastest(padded_loop(loss, batch, names, few), 1) * options.samples / few
    return result


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1024, help="the full size is 4096")
    parser.add_argument("--max-tokens", type=int, default=1024, help="a sample; full size 4096")
    parser.add_argument("--piece", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--loop-samples", type=int, default=128, help="the rest is scaled up")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, help="of torch; as many as it likes where absent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()

    if options.threads:
        torch.set_num_threads(options.threads)
    batch = mini_batch(options.samples, options.max_tokens, options.seed)
    tokens = len(batch["response_mask"].values)
    results = [measure(name, batch, options) for name in options.losses]
    ways = ["whole", "pieces", *(["compiled"] if options.compile else [])]
    table = Table(
        title=f"{options.samples} samples of 1 to {options.max_tokens} tokens, {tokens:,} tokens, "
        f"{torch.get_num_threads()} threads; full size: 4096 samples of up to 4096"
    )
    for title in ("loss", "bound ms", *(f"{way} × bound" for way in ways), "loop / whole"):
        table.add_column(title, justify="left" if title == "loss" else "right")
    table.add_column("loop / best", justify="right")
    table.add_column("prepare ms", justify="right")
    for row in results:
        best = min(row[way] for way in ways)
        table.add_row(
            row["loss"],
            f"{row['bound'] * 1e3:.2f}",
            *(f"{row[way] / row['bound']:.1f}" for way in ways),
            f"{row['loop'] / row['whole']:.1f}",
            f"{row['loop'] / best:.1f}",
            f"{row['prepare'] * 1e3:.0f}" if "prepare" in row else "",
        )
    Console().print(table)
    if options.json:
        sizes = {"samples": options.samples, "max_tokens": options.max_tokens, "tokens": tokens}
        options.json.write_text(json.dumps({**sizes, "results": results}, indent=1))


if __name__ == "__main__":
    main()
