"""Data and a warm-started model for the demo's task, and the loss of every step of the warm start in `metrics.jsonl`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "arithmetic"))

from data import make_data
from model import HIDDEN_SIZE, make_base
from warm_start import warm_start


def main() -> None:
    """Make `data`, `base` and `model` in a directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory")
    parser.add_argument("--seed", type=int, default=1, help="of data, model and order")
    parser.add_argument("--hidden-size", type=int, default=HIDDEN_SIZE, help="of the model")
    parser.add_argument("--device", default="cpu", help="torch device of the warm start")
    arguments = parser.parse_args()

    out: Path = arguments.out
    train_file, _ = make_data(out / "data", arguments.seed)
    base = make_base(out / "base", arguments.seed, arguments.hidden_size)
    rows: list[str] = []
    warm_start(
        base,
        train_file,
        out / "model",
        arguments.seed,
        lambda step, loss: rows.append(json.dumps({"step": step, "warm_start/loss": loss}) + "\n"),
        arguments.device,
    )
    (out / "metrics.jsonl").write_text("".join(rows))


if __name__ == "__main__":
    main()
