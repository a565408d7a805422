"""`dovetail check [CONFIG] [KEY=VALUE]...`: everything that is wrong with a config, before anything runs."""

from __future__ import annotations

import time
from collections.abc import Sized

import click

from dovetail.cli import render
from dovetail.cli.render import config_arguments, title

_NEEDS = "environment_unfit"
"""The preflight rule whose warnings list what the run's machine must have, such as packages."""


@click.command()
@config_arguments()
@click.option(
    "--static",
    is_flag=True,
    help="Look at the config alone: not at files, data, models or the plan.",
)
def check(config: tuple[str, ...], overrides: tuple[str, ...], static: bool) -> None:
    """Check CONFIG with overrides such as rollout.n=4 (or overrides alone), and list everything that is wrong.

    Errors prevent a run; warnings do not, but should be read first. The name in brackets after a problem is that of the
    check that found the problem; if the check is a preflight rule, preflight.ignore=NAME silences its problems. Needs are what the
    run's machine must have and this machine lacks: packages of the chosen plugins, environments of runtime.environments, accelerators
    for the runtime's pools. Weights in local directories are searched for NaN and infinity, for at most 10 seconds a model; bad weights
    that this search does not reach make the first step of training fail. Exits with 0 if there is no error, else with 2.
    """
    from dovetail.config.load import load_config

    started = time.perf_counter()
    loaded, name = load_config(config, overrides), title(config)
    for warning in loaded.warnings:
        render.warning(warning)
    if static:
        seconds = time.perf_counter() - started
        render.line(f"OK: {name} is a valid config (static checks, {seconds:.2f} s)")
        return
    from dovetail.run.examination import examine, refusal

    found = examine(loaded)
    for line in found.notes:
        render.line(line)
    warnings = [finding for finding in found.warnings if finding.rule != _NEEDS]
    environments = [str(f) for f in found.warnings if f.rule == _NEEDS]
    needs = [*found.needs, *environments]
    for finding in warnings:
        render.warning(str(finding))
    for need in needs:
        render.line(f"needs: {need}")
    if found.errors:
        raise refusal(name, found.errors)
    verdict = "is a valid run" if needs else "is ready to train"
    noted = f", with {_counted(warnings, 'warning')}" if warnings else ""
    lines = _counted(needs, "line")
    unready = f"; not ready on this machine: see {lines} `needs:` above" if needs else ""
    render.line(f"OK: {name} {verdict}{noted}{unready}")


def _counted(found: Sized, noun: str) -> str:
    return f"{len(found)} {noun}{'s' if len(found) > 1 else ''}"
