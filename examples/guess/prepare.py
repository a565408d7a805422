"""Numbers to guess, and an untrained model. Usage: `python examples/guess/prepare.py --out demo/guess`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dovetail_demo.model import make_base


def prepare(directory: Path, seed: int = 1) -> None:
    """Write `train.jsonl`, every number 32 times, `val.jsonl`, every number once, and the folder `base`."""
    make_base(directory / "base", seed)
    for name, times in (("train", 32), ("val", 1)):
        rows = [
            {"prompt": "guess", "reward_model": {"ground_truth": str(number)}}
            for number in range(1, 8)
        ]
        lines = [json.dumps(row) for row in rows * times]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo/guess"), help="directory")
    parser.add_argument("--seed", type=int, default=1, help="of the weights")
    arguments = parser.parse_args()
    prepare(arguments.out, arguments.seed)
