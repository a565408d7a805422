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
    from dovetail.sections import RunConfig


class SweepCommand(click.Command):
    """A command whose option `--sweep` takes every argument behind it, up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        expanded: list[str] = []
        sweeping = False
        for arg, following in zip(args, [*args[1:], "--"], strict=False):
            if arg.startswith("--"):
                sweeping = arg == "--sweep"
            valueless = arg == "--sweep" and following.startswith("--")
            if not sweeping or (valueless and not ctx.resilient_parsing):
                expanded.append(arg)
            elif arg != "--sweep":
                expanded += ["--sweep", arg]
        return super().parse_args(ctx, expanded)


@click.command(cls=SweepCommand)
@config_arguments()
@click.option(
    "--sweep",
    "swept",
    multiple=True,
    metavar="KEY=A,B [KEY=C,D]...",
    shell_complete=rendering.complete,
    help="A run for each combination of values, one after the other; takes all arguments up to the next option.",
)
@click.option(
    "--accept-changes",
    is_flag=True,
    help="Continue a run that began with another model, data, algorithm or reward.",
)
def train(
    config: tuple[str, ...],
    overrides: tuple[str, ...],
    swept: tuple[str, ...],
    accept_changes: bool,
) -> None:
    """Train with CONFIG, a YAML file; further arguments are overrides such as `actor.optim.lr=1e-5`. They can stand alone, without a file.

    The same command again continues a run that was stopped or killed (`trainer.resume`).

    The values of `--sweep` are a YAML list without its brackets. Each run is named by its values, `NAME_lr=1e-6_seed=2`. All of
    them are checked before the first starts. One that fails does not end the others. The same command again
    continues what is unfinished.
    """
    if swept:
        from dovetail.cli.sweep import run_sweep

        run_sweep(config, overrides, swept, accept_changes=accept_changes)
    else:
        run_training(config, overrides, accept_changes=accept_changes)


@click.command()
@click.argument("run_directory", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def resume(run_directory: Path, overrides: tuple[str, ...]) -> None:
    """Continue the run in RUN_DIRECTORY from its latest checkpoint, and print each setting that the overrides change."""
    from dovetail.cli.supervise import cause_kept
    from dovetail.config.load import load_config
    from dovetail.run.run import resume as resume_run
    from dovetail.telemetry.run_directory import RunDirectory

    directory = RunDirectory.open(run_directory)
    if directory.config.exists():
        config = load_config(directory.config, overrides).config
        if _supervised(config, directory.path, ["resume", str(run_directory), *overrides]):
            return
    with cause_kept():
        resume_run(run_directory, overrides, announce, say=rendering.line)


def _supervised(config: RunConfig, path: Path, arguments: Sequence[str]) -> bool:
    """Whether the run was trained by processes that a supervisor started, as `trainer.run_restarts` asks."""
    if not config.trainer.run_restarts:
        return False
    from dovetail.cli.supervise import is_supervised, supervise

    if is_supervised(path):
        return False
    supervise(config, path, arguments)
    return True


def run_training(
    config: Sequence[str | Path], overrides: tuple[str, ...] = (), *, accept_changes: bool = False
) -> dict[str, Any]:
    """Train with files of which later ones win, showing what is about to run; what `dovetail train` does."""
    from dovetail.cli.supervise import cause_kept
    from dovetail.config.load import load_config
    from dovetail.run.requeue import summary_of
    from dovetail.run.run import train as train_run
    from dovetail.telemetry.run_directory import RunDirectory, run_path

    loaded = load_config(config, overrides)
    path = run_path(loaded.config)
    options = ["--accept-changes"] if accept_changes else []
    if _supervised(loaded.config, path, ["train", *map(str, config), *overrides, *options]):
        return summary_of(RunDirectory(path))
    with cause_kept():
        return train_run(loaded, (), announce, accept_changes=accept_changes, say=rendering.line)


def announce(loaded: LoadedConfig, plan: Plan, path: Path) -> None:
    """Print what is about to run: stages, counts, and warnings as `dovetail check` prints them."""
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
