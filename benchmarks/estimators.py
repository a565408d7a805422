"""How long advantage estimators take: compiled, in NumPy, and as the straightforward loop over padded arrays.

    python benchmarks/estimators.py
    python benchmarks/estimators.py --samples 512 --tokens 512 --only gae grpo

Each repetition runs every variant once, in turn, so that a busy machine slows all of them. Medians are reported, also as
a multiple of the time that reading the estimator's input once takes, at the bandwidth measured in the same run (a dot
product over a buffer beyond any cache).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from statistics import median
from typing import Any
from unittest import mock

import estimator_loops
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Groups, PluginContext
from dovetail_algorithms.estimators import scans

COMPONENTS = ("accuracy", "format")
BUFFER = 1 << 30
"""Bytes of the buffer whose reading measures bandwidth."""
SHORTEST = 0.01
"""Seconds that are worth timing."""


@dataclass
class Workload:
    """One batch, packed and padded, and its groups."""

    batch: Batch
    padded: Mapping[str, Any]
    groups: Groups


@dataclass
class Row:
    """Medians of one estimator, in seconds, and the bytes of its input."""

    name: str
    level: str
    input_bytes: int
    eager: float
    compiled: float | None
    loop: float


def make_workload(samples: int, tokens: int, group_size: int, tools: float, seed: int) -> Workload:
    """Responses of 1 to `tokens` tokens, of which one span with this share of the response is a tool's."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, tokens + 1, samples)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    length_T = np.repeat(lengths, lengths)
    mask_T = (position < length_T // 3) | (
        position >= length_T // 3 + (tools * length_T).astype(int)
    )
    scores = rng.choice([0.0, 1.0], samples).astype(np.float32)
    rewards_T = np.zeros(offsets[-1], np.float32)
    rewards_T[offsets[1:] - 1] = scores
    pi_T = rng.uniform(0.05, 1.0, offsets[-1])
    columns: dict[str, Any] = {
        "token_rewards": rewards_T,
        "response_mask": mask_T,
        "values": rng.normal(size=offsets[-1]).astype(np.float32),
        "old_log_probs": np.log(pi_T).astype(np.float32),
        "sum_pi_squared": (pi_T**2 + rng.random(offsets[-1]) * (1 - pi_T) ** 2).astype(np.float32),
    }
    inside = np.arange(tokens) < lengths[:, None]
    padded: dict[str, Any] = {}
    for name, values_T in columns.items():
        padded[name] = np.zeros((samples, tokens), values_T.dtype)
        padded[name][inside] = values_T
    dense: dict[str, Any] = {
        "scores": scores,
        "baseline_scores": rng.choice([0.0, 1.0], samples).astype(np.float32),
        "group_id": np.repeat(np.arange(-(-samples // group_size)), group_size)[:samples],
        "reward_components": [
            {"accuracy": float(score), "format": float(form)}
            for score, form in zip(scores, rng.choice([0.0, 1.0], samples), strict=True)
        ],
    }
    ragged = {name: Ragged(values_T, offsets) for name, values_T in columns.items()}
    return Workload(Batch({**ragged, **dense}), {**padded, **dense}, Groups.of(dense["group_id"]))


def bandwidth_reader() -> Callable[[], float]:
    """A function that measures bytes a second once."""
    buffer = np.ones(BUFFER // 8)

    def read() -> float:
        begin = time.perf_counter()
        np.dot(buffer, buffer)
        return buffer.nbytes / (time.perf_counter() - begin)

    return read


def measure(
    name: str, work: Workload, repetitions: int, read: Callable[[], float]
) -> tuple[Row, list[float]]:
    """One estimator's medians, and the bandwidths measured between its repetitions."""
    estimator: Any = _estimator(name)
    made = estimator(estimator.Config(name=name), PluginContext())
    required = sorted(estimator.requires(made.config))
    batch = work.batch.select(required)
    loop = getattr(estimator_loops, name)
    kernels = scans.compiled()
    variants: dict[str, tuple[Any, Callable[[], Any]]] = {
        "eager": (None, lambda: made.estimate(batch, work.groups)),
        "compiled": (kernels, lambda: made.estimate(batch, work.groups)),
        "loop": (None, lambda: loop(work.padded)),
    }
    if kernels is None or estimator.level == "sample":
        del variants["compiled"]
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    bandwidths = []
    for _ in range(repetitions):
        bandwidths.append(read())
        for variant, (module, call) in variants.items():
            with mock.patch.object(scans, "compiled", return_value=module):
                call()
                times[variant].append(_seconds(call))
    row = Row(
        name=name,
        level=estimator.level,
        input_bytes=sum(_bytes(batch[column]) for column in required),
        eager=median(times["eager"]),
        compiled=median(times["compiled"]) if "compiled" in times else None,
        loop=median(times["loop"]),
    )
    return row, bandwidths


def _estimator(name: str) -> Any:
    (entry,) = entry_points(group="dovetail.advantage", name=name)
    return entry.load()


def _seconds(call: Callable[[], Any]) -> float:
    """Of one call; a short one is repeated, and the mean taken."""
    begin, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - begin < SHORTEST:
        call()
        calls += 1
    return (time.perf_counter() - begin) / calls


def _bytes(column: Any) -> int:
    if isinstance(column, list):
        return 8 * len(COMPONENTS) * len(column)
    return int(column.values.nbytes if isinstance(column, Ragged) else column.nbytes)


def report(rows: list[Row], bandwidth: float, work: Workload) -> None:
    """Print the table."""
    mask = work.batch["response_mask"]
    table = Table(
        title=f"{len(mask):,} samples, {len(mask.values) / 1e6:.2f} million tokens, "
        f"{work.groups.count:,} groups; reading {bandwidth / 1e9:.1f} GB/s",
        caption="×: how many times faster than the loop. of bound: multiple of reading the input once",
    )
    for heading in (
        "estimator", "level", "input MB", "NumPy ms", "×", "of bound", "compiled ms", "×",
        "of bound", "loop ms",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading in {"estimator", "level"} else "right")
    for row in rows:
        bound = row.input_bytes / bandwidth
        table.add_row(
            row.name,
            row.level,
            f"{row.input_bytes / 1e6:.2f}",
            *_cells(row.eager, row.loop, bound),
            *(_cells(row.compiled, row.loop, bound) if row.compiled else ("", "", "")),
            f"{1e3 * row.loop:.1f}",
        )  # fmt: skip
    Console(width=140).print(table)


def _cells(seconds: float, loop: float, bound: float) -> tuple[str, str, str]:
    return f"{1e3 * seconds:.2f}", f"{loop / seconds:.0f}", f"{seconds / bound:.1f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096, help="of the longest response")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tools", type=float, default=0.1, help="share of tool tokens")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(estimator_loops.NAMES))
    options = parser.parse_args()
    work = make_workload(
        options.samples, options.tokens, options.group_size, options.tools, options.seed
    )
    read = bandwidth_reader()
    read()
    rows, bandwidths = [], []
    for name in options.only:
        row, measured = measure(name, work, options.repetitions, read)
        rows.append(row)
        bandwidths += measured
    report(rows, median(bandwidths), work)


if __name__ == "__main__":
    main()
