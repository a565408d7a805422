"""The task's data: sums of two numbers below 100, as parquet in the row schema that verl's users know.

Three of four problems need a carry in the ones. Held-out problems are split off by unordered pair: where 37+48 is held
out, neither it nor 48+37 is ever trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LARGEST = 99
"""Largest number in a problem."""
HELD_OUT = 256
"""The number of held-out problems."""
CARRY_SHARE = 0.75
"""Share of the problems that need a carry in the ones; a uniform draw would have 0.45."""

Pair = tuple[int, int]


def needs_carry(a: int, b: int) -> bool:
    """Return whether the ones digits of `a` and `b` add up to ten or more."""
    return a % 10 + b % 10 >= 10


def problems(seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return training and held-out problems, in a random order that the seed alone determines.

    Returns:
        The training pairs (a, b), each also as (b, a), and `HELD_OUT` held-out pairs, each in one order.
    """
    rng = np.random.default_rng(seed)
    unordered = [(a, b) for a in range(LARGEST + 1) for b in range(a, LARGEST + 1)]
    carry = [pair for pair in unordered if needs_carry(*pair)]
    plain = [pair for pair in unordered if not needs_carry(*pair)]
    plain = [plain[i] for i in rng.permutation(len(plain))]
    chosen = carry + plain[: round(len(carry) * (1 - CARRY_SHARE) / CARRY_SHARE)]
    chosen = [chosen[i] for i in rng.permutation(len(chosen))]

    held_out = [(b, a) if rng.random() < 0.5 else (a, b) for a, b in chosen[:HELD_OUT]]
    train = sorted({pair for a, b in chosen[HELD_OUT:] for pair in ((a, b), (b, a))})
    return [train[i] for i in rng.permutation(len(train))], held_out


def rows(pairs: list[Pair], split: str) -> list[dict[str, Any]]:
    """Return one row per problem, whose `data_source` selects a reward function: the number after the last `####` is the answer."""
    return [
        {
            "prompt": [{"role": "user", "content": f"{a}+{b}=?"}],
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "ability": "math",
            "extra_info": {"index": index, "split": split},
        }
        for index, (a, b) in enumerate(pairs)
    ]


def make_data(directory: Path, seed: int) -> tuple[Path, Path]:
    """Write `train.parquet` and `val.parquet`, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    train, held_out = problems(seed)
    paths = directory / "train.parquet", directory / "val.parquet"
    for path, pairs, split in zip(paths, (train, held_out), ("train", "val"), strict=True):
        pq.write_table(pa.Table.from_pylist(rows(pairs, split)), path)
    return paths
