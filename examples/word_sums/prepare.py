"""Sums of two numbers in words, as JSON lines: `What is forty-one plus seven?` and 48.

No held-out sum stands among the training sums, in either order of its numbers.
Usage: `python examples/word_sums/prepare.py DIRECTORY` writes train.jsonl and val.jsonl there.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import combinations_with_replacement
from pathlib import Path

ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
HELD_OUT = 200


def in_words(number: int) -> str:
    """A number from 0 to 99 as English writes it."""
    if number < len(ONES):
        return ONES[number]
    ten = TENS[number // 10 - 2]
    return ten if number % 10 == 0 else f"{ten}-{ONES[number % 10]}"


def row(first: int, second: int) -> dict[str, object]:
    """One problem, in the columns of `data.train_files`."""
    question = f"What is {in_words(first)} plus {in_words(second)}? Answer with digits only."
    return {
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": str(first + second)},
    }


def prepare(directory: Path, seed: int = 1) -> None:
    """Write every sum of two numbers from 1 to 99, the held-out ones apart."""
    rng = random.Random(seed)
    pairs = list(combinations_with_replacement(range(1, 100), 2))
    rng.shuffle(pairs)
    directory.mkdir(parents=True, exist_ok=True)
    parts = {"val.jsonl": pairs[:HELD_OUT], "train.jsonl": pairs[HELD_OUT:]}
    for name, part in parts.items():
        lines = [json.dumps(row(*rng.sample(pair, 2))) for pair in part]
        (directory / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    prepare(parser.parse_args().directory)
