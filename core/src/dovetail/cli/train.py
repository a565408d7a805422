"""`dovetail train [CONFIG] [key=value …]` and `dovetail resume RUN_DIRECTORY [key=value …]`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from dovetail.cli import render as rendering
from dovetail.cli.render import config_arguments
from dovetail.errors import PluginNotFoundError

if TYPE_CHECKING:
    from dovetail.config.load import LoadedConfig
    from dovetail.planning.plan import Plan
    from dovetail.sections import RunConfig


SUPERVISED = "DOVETAIL_SUPERVISED"
"""Environment variable that the supervisor sets in the process of the run: the path of the run directory."""
CAUSE = "DOVETAIL_SUPERVISED_CAUSE"
"""Environment variable that the supervisor sets in the process of the run: the path of a file for the message of the run's error."""


@click.command()
@config_arguments()
@click.option(
    "--accept-changes",
    is_flag=True,
    help="Continue a run that began with another model, data, algorithm or reward.",
)
def train(config: tuple[str, ...], overrides: tuple[str, ...], accept_changes: bool) -> None:
    """Train with CONFIG, a YAML file; further arguments are overrides such as `actor.optim.lr=1e-5`. Overrides can stand alone, without a
    file.

    The same command again continues a run that was stopped or killed (`trainer.resume`).
    """
    run_training(config, overrides, accept_changes=accept_changes)


@click.command()
@click.argument("run_directory", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def resume(run_directory: Path, overrides: tuple[str, ...]) -> None:
    """Continue the run in RUN_DIRECTORY from its latest checkpoint, and print each setting that the overrides change."""
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
    """Train in processes that a supervisor restarts, if `trainer.run_restarts` is set and this process is not one of them.

    Returns:
        Whether the run was trained, so that this process has nothing left to do.

    Raises:
        PluginNotFoundError: no supervisor is installed.
    """
    watched = str(path.absolute())
    if not config.trainer.run_restarts or os.environ.get(SUPERVISED) == watched:
        return False
    from dovetail.plugins.index import default_index
    from dovetail.plugins.kinds import SUPERVISOR_GROUP

    found = default_index().extensions(SUPERVISOR_GROUP)
    if not found:
        raise PluginNotFoundError(
            f"trainer.run_restarts={config.trainer.run_restarts} needs a supervisor, but no installed package provides one",
            hint="pip install dovetail-console, or set trainer.run_restarts=0",
        )
    supervise = found[0][0].load()
    with TemporaryDirectory(prefix="dovetail-") as folder:
        cause = Path(folder) / "cause"
        supervise(config, path, arguments, {SUPERVISED: watched, CAUSE: str(cause)}, cause)
    return True


@contextmanager
def cause_kept() -> Iterator[None]:
    """Write the message of an error that ends the block to the file named by `CAUSE`, and raise the error again.

    The supervisor, which started this process and may restart the run, reads the file. Without a supervisor, nothing is written.
    """
    try:
        yield
    except Exception as error:
        if file := os.environ.get(CAUSE):
            with suppress(OSError):
                text = str(error).partition("\n")[0][:500] or type(error).__name__
                Path(file).write_text(text, encoding="utf-8")
        raise


def run_training(
    config: Sequence[str | Path], overrides: tuple[str, ...] = (), *, accept_changes: bool = False
) -> dict[str, Any]:
    """Train with the merged config files and print progress; implements `dovetail train`."""
    from dovetail.config.load import load_config
    from dovetail.run.requeue import summary_of
    from dovetail.run.run import train as train_run
    from dovetail.telemetry.run_directory import RunDirectory

    loaded = load_config(config, overrides)
    path = RunDirectory.path_for(loaded.config)
    options = ["--accept-changes"] if accept_changes else []
    if _supervised(loaded.config, path, ["train", *map(str, config), *overrides, *options]):
        return summary_of(RunDirectory(path))
    with cause_kept():
        return train_run(loaded, (), announce, accept_changes=accept_changes, say=rendering.line)


def announce(loaded: LoadedConfig, plan: Plan, path: Path) -> None:
    """Print the plan of a run, its warnings and its run directory, before the run starts.

    The plan shows stages, models, placement, and the numbers of prompts, samples and steps. `dovetail check` prints the same warnings.
    """
    from dovetail.cli.plan_text import render_plan, render_warnings
    from dovetail.run.examination import rule_findings

    for warning in loaded.warnings:
        rendering.warning(warning)
    render_plan(plan)
    render_warnings(rule_findings(loaded.config, plan))
    rendering.line(f"run directory: {path}")
