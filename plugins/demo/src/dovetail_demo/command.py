"""`dovetail demo`: makes data and a model, fine-tunes the model on worked answers, and trains it with GRPO."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from dovetail.errors import DovetailError, RunDirectoryError
from dovetail_demo import CONFIG, SFT_CONFIG

if TYPE_CHECKING:
    from dovetail.telemetry import RunDirectory

EXPECTED_ACCURACY = 0.8
"""Held-out accuracy that the demo's default settings exceed."""


@click.command()
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="demo",
    show_default=True,
    help="Folder of data, models and runs.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Of data, model and training.",
)
@click.pass_context
def demo(context: click.Context, overrides: tuple[str, ...], out: Path, seed: int) -> None:
    """Train a tiny model with GRPO to add two numbers, on a CPU in about a minute.

    Makes the data and a Qwen2 of half a million parameters, fine-tunes it on worked answers (`dovetail sft`), and trains it with
    GRPO (`dovetail train`); nothing is downloaded. Overrides such as rollout.n=4 change the settings of the GRPO run.
    """
    # Threads that wait for each other sleep instead of spinning. The demo's steps are short, and spinning threads would make
    # them several times slower if cores are shared. OpenMP reads the variable when torch is loaded, which happens later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from dovetail.telemetry import RunDirectory, visible
    from dovetail_demo.data import make_data
    from dovetail_demo.model import make_base
    from dovetail_demo.warm_start import write_demonstrations

    text = config_text(CONFIG, out, seed)
    run, folder = run_path(text, overrides), out / f"seed_{seed}"
    RunDirectory.check_free(run)
    config = write_config(folder / "config.yaml", text)
    supervised = write_config(folder / "sft.yaml", config_text(SFT_CONFIG, out, seed))
    root = context.find_root()

    def invoke(name: str, **arguments: Any) -> None:
        command = cast("click.Group", root.command).get_command(root, name)
        context.invoke(cast("click.Command", command), **arguments)

    click.echo(
        "1. Data: sums of two numbers below 100. Model: a Qwen2 of half a million parameters"
    )
    train_file, _ = make_data(folder / "data", seed)
    write_demonstrations(train_file, seed)
    make_base(folder / "base", seed)
    click.echo(
        "2. Supervised fine-tuning on worked answers, of which two of three forget the carry:"
    )
    click.echo(visible(f"   dovetail sft {supervised}"))
    invoke("sft", arguments=(str(supervised),))
    click.echo("3. GRPO; the reward is 1 for the right number after ####, else 0:")
    click.echo(visible(f"   dovetail train {config}"))
    invoke("train", arguments=(str(config), *overrides))

    seconds = RunDirectory.open(folder / "warm_start").read_json("summary.json")["train_seconds"]
    summary = add_warm_start(RunDirectory.open(run), seconds)
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    click.echo()
    if before is not None and after is not None:
        click.echo(
            f"Held-out accuracy {before:.1%} → {after:.1%} in {summary['train_seconds']:.0f} s of training "
            f"(warm start {seconds:.0f} s); seed {seed}"
        )
    click.echo(visible(f"What each setting does: {config}"))
    click.echo("Report: ", nl=False)
    invoke("report", run=run)
    if not overrides and not before < EXPECTED_ACCURACY < after:
        raise DovetailError(
            f"held-out accuracy is {after:.1%} after training; expected more than {EXPECTED_ACCURACY:.0%}",
            hint=f"report this, and attach the run directory {run}",
        )


def config_text(config: Path, out: Path, seed: int) -> str:
    """Return the demo's config, comments included, with paths and names for this folder and seed."""
    folder = json.dumps(str(out), ensure_ascii=False)[1:-1]  # for within the quotes of YAML
    text = config.read_text(encoding="utf-8")
    text = text.replace("seed: 1 ", f"seed: {seed} ").replace("seed_1", f"seed_{seed}")
    # Replaced in one pass, since the folder's own name may contain `demo/`.
    return re.sub('"demo"|demo/', lambda match: match[0].replace("demo", folder), text)


def run_path(text: str, overrides: tuple[str, ...]) -> Path:
    """Return the run directory that a config and overrides name.

    Raises:
        ConfigError: an override is wrong.
    """
    import yaml

    from dovetail.config import config_from_mapping

    config = config_from_mapping(yaml.safe_load(text), overrides, name="demo").config
    return Path(config.output_dir) / config.project / config.experiment


def write_config(path: Path, text: str) -> Path:
    """Write a config file, whose directory is created if missing, and return the file's path.

    Raises:
        RunDirectoryError: the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(
            f"the config {str(path)!r} can't be written: {error.strerror or error}",
            hint="choose a writable folder with --out DIR",
        ) from error
    return path


def add_warm_start(run: RunDirectory, seconds: float) -> dict[str, Any]:
    """Count the `seconds` of the warm start (the fine-tuning before GRPO) as training time in a run's summary, and return the summary."""
    summary: dict[str, Any] = run.read_json("summary.json")
    summary["train_seconds"] += seconds
    summary["warm_start_seconds"] = seconds
    run.write_json("summary.json", summary)
    return summary
