"""`dovetail check CONFIG`: everything that is wrong with a config, before anything runs."""

from __future__ import annotations

import time

import click

from dovetail.cli import render


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--static",
    is_flag=True,
    help="Look at the config alone: not at files, data, models or the plan.",
)
def check(config: str, overrides: tuple[str, ...], static: bool) -> None:
    """Check CONFIG, with overrides such as rollout.n=4, and list all that is wrong with it.

    Exits with 0 where nothing is, and with 2 where something is.
    """
    from dovetail.config import load_config

    started = time.perf_counter()
    loaded = load_config(config, overrides)
    for warning in loaded.warnings:
        render.warning(warning)
    if static:
        seconds = time.perf_counter() - started
        click.echo(f"OK: {config} is a valid config (static checks, {seconds:.2f} s)")
        return
    from dovetail.config.checks import missing_files
    from dovetail.config.load import raise_problems
    from dovetail.flow.preflight import run_checks

    raise_problems(config, missing_files(loaded.config), loaded.origins)
    for line in run_checks(loaded):
        click.echo(line)
    click.echo(f"OK: {config} is ready to train")
