"""Made-up preference pairs, and an untrained model.

A line of a file is `{"prompt": "…", "chosen": "…", "rejected": "…"}`.
Usage: `python examples/reward_model/pairs.py --out demo/reward_model`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import attrs
import numpy as np

HELD_OUT = 256


@attrs.frozen(kw_only=True)
class Pair:
    """Two responses to one prompt, of which people prefer the first."""

    prompt: str
    chosen: str
    rejected: str


def larger_numbers(seed: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs for training, and held-out ones: which of two numbers is the larger one?

    No two numbers of a held-out pair stand together in a training pair, in either order.
    """
    rng = np.random.default_rng(seed)
    both = [(a, b) for a in range(100) for b in range(a)]
    order = rng.permutation(len(both))
    made = [_pair(*both[i], swapped=bool(rng.integers(2))) for i in order[:HELD_OUT]]
    train = [
        _pair(*both[i], swapped=swapped) for i in order[HELD_OUT:] for swapped in (False, True)
    ]
    return train, made


def _pair(larger: int, smaller: int, *, swapped: bool) -> Pair:
    first, second = (smaller, larger) if swapped else (larger, smaller)
    return Pair(prompt=f"{first} or {second}?", chosen=str(larger), rejected=str(smaller))


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    """Write a line for each pair."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(attrs.asdict(pair)) for pair in pairs)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Make pairs and an untrained model from the command line."""
    from dovetail_demo.model import make_base

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo/reward_model"), help="directory")
    parser.add_argument("--seed", type=int, default=1, help="of split and weights")
    arguments = parser.parse_args()
    for name, pairs in zip(("train", "held_out"), larger_numbers(arguments.seed), strict=True):
        write_pairs(arguments.out / f"{name}.jsonl", pairs)
        print(f"{arguments.out / name}.jsonl: {len(pairs)} pairs")
    print(
        f"{make_base(arguments.out / 'base', arguments.seed)}: a model of half a million parameters"
    )


if __name__ == "__main__":
    main()
