"""Data and a warm-started model for the demo's task, and the loss of every step of the warm start in `metrics.jsonl`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dovetail_demo.model import HIDDEN_SIZE
from dovetail_demo.prepare import prepare


def main() -> None:
    """Make `data`, `base` and `model` in a directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory")
    parser.add_argument("--seed", type=int, default=1, help="of data, model and order")
    parser.add_argument("--hidden-size", type=int, default=HIDDEN_SIZE, help="of the model")
    parser.add_argument("--device", default="cpu", help="torch device of the warm start")
    arguments = parser.parse_args()

    out: Path = arguments.out
    model = prepare(out, arguments.seed, hidden_size=arguments.hidden_size, device=arguments.device)
    (out / "model").symlink_to(model.resolve())
    lines = (out / "warm_start" / "metrics.jsonl").read_text().splitlines()
    losses = {
        row["step"]: row["actor/loss"] for row in map(json.loads, lines) if "actor/loss" in row
    }
    rows = [json.dumps({"step": step, "warm_start/loss": loss}) for step, loss in losses.items()]
    (out / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))


if __name__ == "__main__":
    main()
