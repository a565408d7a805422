"""The inputs of the GRPO run: the task's data, an untrained model, and the warm-started model.

Usage: `python -m dovetail_demo.prepare --out demo/seed_1 --seed 1`
"""

from __future__ import annotations

from pathlib import Path

import click

from dovetail.telemetry import visible
from dovetail_demo.data import make_data
from dovetail_demo.model import HIDDEN_SIZE, make_base
from dovetail_demo.warm_start import warm_start


def prepare(
    directory: Path, seed: int, *, hidden_size: int = HIDDEN_SIZE, device: str = "auto"
) -> Path:
    """Write `data`, `base` (the untrained model) and `warm_start` (the run that fine-tunes it) into a directory.

    Args:
        directory: the target directory, created if it does not exist.
        seed: the seed of the data, the weights, and the warm start.
        hidden_size: the number of features of the model.
        device: the torch device of the warm start.

    Returns:
        The warm-started model's directory, `warm_start/final`.
    """
    train_file, _ = make_data(directory / "data", seed)
    base = make_base(directory / "base", seed, hidden_size)
    return warm_start(base, train_file, directory / "warm_start", seed, device)


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="demo/seed_1",
    show_default=True,
    help="Folder of data and models.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of data and models."
)
@click.option(
    "--hidden-size",
    type=int,
    default=HIDDEN_SIZE,
    show_default=True,
    help="Features, in four heads; attention kernels on accelerators need 256.",
)
@click.option(
    "--device", default="auto", show_default=True, help="Of the warm start, such as cuda."
)
def main(out: Path, seed: int, hidden_size: int, device: str) -> None:
    """Write the demo's data, the untrained model and the warm-started model."""
    model = prepare(out, seed, hidden_size=hidden_size, device=device)
    click.echo(visible(f"{out}: data, base (the untrained model); the warm-started one is {model}"))


if __name__ == "__main__":
    main()
