"""`dovetail train [CONFIG] [key=value …]` and `dovetail resume RUN_DIRECTORY [key=value …]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dovetail.cli import render as rendering
from dovetail.cli.render import config_arguments

if TYPE_CHECKING:
    from dovetail.config.load import LoadedConfig
    from dovetail.planning.plan import Plan


@click.command()
@config_arguments()
@click.option(
    "--accept-changes",
    is_flag=True,
    help="Continue a run that began with another model, data, algorithm or reward.",
)
def train(config: tuple[str, ...], overrides: tuple[str, ...], accept_changes: bool) -> None:
    """Train with CONFIG, a YAML file; further arguments are overrides such as `actor.optim.lr=1e-5`. They can stand alone, without a file.

    The same command again continues a run that was stopped or killed (`trainer.resume`).
    """
    run_training(config, overrides, accept_changes=accept_changes)


@click.command()
@click.argument("run_directory", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def resume(run_directory: Path, overrides: tuple[str, ...]) -> None:
    """Continue the run in RUN_DIRECTORY from its latest checkpoint, and print each setting that the overrides change."""
    from dovetail.run.run import resume as resume_run

    resume_run(run_directory, overrides, announce, say=rendering.line)


def run_training(
    config: Sequence[str | Path], overrides: tuple[str, ...] = (), *, accept_changes: bool = False
) -> dict[str, Any]:
    """Train with files of which later ones win, showing what is about to run; what `dovetail train` does."""
    from dovetail.config.load import load_config
    from dovetail.run.run import train as train_run

    loaded = load_config(config, overrides)
    return train_run(loaded, (), announce, accept_changes=accept_changes, say=rendering.line)


def announce(loaded: LoadedConfig, plan: Plan, path: Path) -> None:
    """Say what is about to run: stages, counts, and warnings as `dovetail check` prints them."""
    from dovetail.cli.plan import render, render_warnings
    from dovetail.plugins.environment import cpu_torch_on_gpu_host
    from dovetail.run.examination import rule_findings

    for warning in loaded.warnings:
        rendering.warning(warning)
    fix = cpu_torch_on_gpu_host()
    if fix:
        rendering.warning(fix)
    render(plan, loaded.config)
    render_warnings(rule_findings(loaded.config, plan))
    rendering.line(f"run directory: {path}")
