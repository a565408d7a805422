"""`dovetail train CONFIG --sweep KEY=A,B KEY=C,D`: a run for each combination of values, one after the other."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import attrs
import click

from dovetail.cli import render
from dovetail.cli.child_process import ChildProcess
from dovetail.config.keys import format_path, parse_path
from dovetail.config.load import LoadedConfig, load_config
from dovetail.config.plain_yaml import YamlTextError, entries
from dovetail.errors import ConfigError, DovetailError
from dovetail.run.examination import examine, refusal
from dovetail.run.requeue import changes_of, is_finished, refuse_another_run
from dovetail.telemetry.run_directory import RunDirectory, run_path


@attrs.frozen
class SweptRun:
    """One combination of a sweep."""

    overrides: tuple[str, ...]
    path: Path
    finished: bool
    """Whether it has come to its end in an earlier call, with these settings."""


def run_sweep(
    config: Sequence[str], overrides: Sequence[str], swept: Sequence[str], *, accept_changes: bool
) -> None:
    """Check every combination, train each in a process of its own, and print how all of them ended.

    What an earlier call finished stays as it is; what it began is continued.

    Args:
        config: files.
        overrides: `key=value`, of every run.
        swept: `key=value,value`, a key each.
        accept_changes: continue runs that began with another model, data, algorithm or reward.

    Raises:
        ConfigError: a key or a value is wrong, in any combination; no run has started.
        click.exceptions.Exit: a run failed (1), or a signal ended the sweep (128 and its number).
    """
    runs = _checked(config, overrides, swept, accept_changes)
    command = [sys.executable, "-P", "-m", "dovetail", "train", *config]
    command += ["--accept-changes"] if accept_changes else []
    child, codes = ChildProcess(), dict[Path, int]()
    with child:
        for number, run in enumerate(runs, start=1):
            if child.received is not None:
                break
            done = ", finished already" if run.finished else ""
            render.line(f"\nrun {number} of {len(runs)}: {run.path}{done}", bold=True)
            if not run.finished:
                codes[run.path] = child.call([*command, *run.overrides])
    render.line()
    _list([run.path for run in runs if RunDirectory.begun(run.path)])
    for run in runs:
        if not RunDirectory.begun(run.path):
            render.line(f"{run.path}: {'failed' if run.path in codes else 'not started'}")
    failed = sum(code != 0 for code in codes.values())
    if child.received is not None:
        render.line(f"stopped by {child.received.name}: the same command continues", err=True)
        raise click.exceptions.Exit(128 + child.received)
    if failed:
        render.line(f"{failed} of {len(runs)} runs failed: the same command tries again", err=True)
        raise click.exceptions.Exit(1)


def _checked(
    config: Sequence[str], overrides: Sequence[str], swept: Sequence[str], accept_changes: bool
) -> list[SweptRun]:
    """Return a run for each combination; every error of every combination is printed first, each once."""
    runs: list[SweptRun] = []
    errors: dict[str, DovetailError] = {}
    for chosen, suffix in _combinations(swept):
        given = [*overrides, *chosen]
        try:
            name = load_config(config, given).config.experiment
            given.append(f"experiment={json.dumps(f'{name}_{suffix}', ensure_ascii=False)}")
            loaded = load_config(config, given)
            path = run_path(loaded.config)
            finished = _is_finished(path, loaded, accept_changes)
            runs.append(SweptRun(tuple(given), path, finished))
            if not finished and (found := examine(loaded).errors):
                raise refusal(suffix, found)
        except DovetailError as error:
            errors.setdefault(error.message.removeprefix(suffix), error)
    if len({run.path for run in runs}) < len(runs):
        errors["names"] = ConfigError(
            "values of the sweep give two runs one name: " + ", ".join(r.path.name for r in runs),
            hint="write the values so that their letters, digits, dots and signs differ",
        )
    if errors:
        *others, last = errors.values()
        for other in others:
            render.error(other)
        raise last
    render.line(f"{len(runs)} runs are checked")
    return runs


def _is_finished(path: Path, loaded: LoadedConfig, accept_changes: bool) -> bool:
    """Whether a run in this place is finished, with these settings.

    Raises:
        RunDirectoryError: it is under way.
        ConfigError: it is another run, which can't be continued so.
    """
    if loaded.config.trainer.resume == "never" or not RunDirectory.begun(path):
        return False
    directory = RunDirectory.open(path)
    with directory.held():
        changes = changes_of(directory, loaded)
        if not accept_changes:
            refuse_another_run(path, changes)
        return is_finished(directory) and not changes


def _combinations(swept: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the overrides of each combination with what its run's name ends with: `lr=1e-6_seed=2`.

    Raises:
        ConfigError: no `key=value,value`, a key or a value that is there twice, or the key `experiment`.
    """
    values: dict[str, list[str]] = {}
    for text in swept:
        key, _, raw = text.partition("=")
        try:
            key, found = format_path(parse_path(key)), entries(raw)
        except ValueError as error:
            hint = error.hint if isinstance(error, YamlTextError) else None
            raise ConfigError(f"--sweep {text}: {error}", hint=hint) from error
        if not found or key in values or key == "experiment" or len(set(found)) < len(found):
            raise ConfigError(
                f"--sweep {text} gives {len(found)} values of {key}; expected key=value,value with different values, each "
                "key once, and not experiment, which the values name",
                hint="write for example --sweep actor.optim.lr=1e-6,3e-6 seed=1,2,3; a value with a comma is a YAML list or quoted",
            )
        values[key] = found
    short = {key: str(parse_path(key)[-1]) for key in values}
    names = [k if [*short.values()].count(short[k]) > 1 else short[k] for k in values]
    for chosen in itertools.product(*values.values()):
        pairs = zip(names, (_as_name(value) for value in chosen), strict=True)
        overrides = tuple(f"{k}={v}" for k, v in zip(values, chosen, strict=True))
        yield overrides, "_".join(map("=".join, pairs))


def _as_name(value: str) -> str:
    """Return a value as a part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "-", value).strip("-" if value[:1] != "-" else "")


def _list(paths: Sequence[Path]) -> None:
    """Print how runs stand, by the command `runs list` where it is installed."""
    context = click.get_current_context()
    group = cast("click.Group", context.find_root().command).get_command(context, "runs")
    command = group.get_command(context, "list") if isinstance(group, click.Group) else None
    if command is None:
        for path in paths:
            render.line(f"{path}: {RunDirectory(path).state}")
    elif paths:
        context.invoke(command, paths=tuple(paths), as_json=False)
        if len(paths) > 1:
            render.line(f"\ncurves: dovetail runs compare {shlex.join(map(str, paths))}")
