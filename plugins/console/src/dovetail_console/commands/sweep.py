"""`dovetail sweep CONFIG KEY=A,B KEY=C,D`: a run for each combination of values, one after the other."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import click

from dovetail.cli import render


@attrs.frozen
class SweptRun:
    """One combination of a sweep's values, trained as one run."""

    overrides: tuple[str, ...]
    path: Path


@click.command()
@render.config_arguments()
@click.option(
    "--accept-changes",
    is_flag=True,
    help="Continue runs that began with another model, data, algorithm or reward.",
)
@click.pass_context
def sweep(
    context: click.Context,
    config: tuple[str, ...],
    overrides: tuple[str, ...],
    accept_changes: bool,
) -> None:
    """Train a run for each combination of values, one after the other, as `dovetail sweep CONFIG seed=1,2,3` does.

    An override with several values (a YAML list without brackets) is swept; other overrides apply to every run. Each run is named after
    its values, `NAME_lr=1e-6_seed=2`. All runs are checked before the first run starts. Each run trains in a separate process, and a
    failed run does not end the sweep. The same command again skips finished runs and continues unfinished runs.
    """
    from dovetail.telemetry import RunDirectory
    from dovetail_console.child_process import ChildProcess
    from dovetail_console.commands.runs import list_runs

    runs = _checked(config, overrides)
    command = [sys.executable, "-P", "-m", "dovetail", "train", *config]
    command += ["--accept-changes"] if accept_changes else []
    child, codes = ChildProcess(), dict[Path, int]()
    with child:
        for number, run in enumerate(runs, start=1):
            if child.received is not None:
                break
            render.line(f"\nrun {number} of {len(runs)}: {run.path}", bold=True)
            codes[run.path] = child.call([*command, *run.overrides])
    render.line()
    begun = tuple(run.path for run in runs if RunDirectory.begun(run.path))
    if begun:
        context.invoke(list_runs, paths=begun, as_json=False)
    if len(begun) > 1:
        render.line(f"\ncurves: dovetail runs compare {shlex.join(map(str, begun))}")
    for run in runs:
        if run.path not in begun:
            render.line(f"{run.path}: {'failed' if run.path in codes else 'not started'}")
    failed = sum(code != 0 for code in codes.values())
    if child.received is not None:
        render.line(f"stopped by {child.received.name}: to continue, repeat the command", err=True)
        raise click.exceptions.Exit(128 + child.received)
    if failed:
        render.line(f"{failed} of {len(runs)} runs failed: to retry, repeat the command", err=True)
        raise click.exceptions.Exit(1)


def _checked(config: Sequence[str], overrides: Sequence[str]) -> list[SweptRun]:
    """Check the runs of a sweep that are not completed, and return all its runs, one for each combination of values.

    If several checks fail, all different errors but the last are printed, and the last is raised.

    Raises:
        DovetailError: a combination is invalid.
    """
    import dovetail
    from dovetail.config import load_config
    from dovetail.errors import ConfigError, DovetailError
    from dovetail.telemetry import RunDirectory

    runs: list[SweptRun] = []
    errors: dict[str, DovetailError] = {}
    fixed, swept = _divided(overrides)
    for chosen, suffix in _combinations(swept):
        given = [*fixed, *chosen]
        try:
            name = load_config(config, given).config.experiment
            given.append(f"experiment={json.dumps(f'{name}_{suffix}', ensure_ascii=False)}")
            path = RunDirectory.path_for(load_config(config, given).config)
            runs.append(SweptRun(tuple(given), path))
            completed = RunDirectory.begun(path) and RunDirectory(path).state == "completed"
            found = () if completed else dovetail.check(config, given).errors
        except DovetailError as error:
            errors.setdefault(error.message, error)
        else:
            if found:
                listed = "\n".join(map(str, found))
                errors.setdefault(listed, ConfigError(f"{suffix}: {listed}"))
    if len({run.path for run in runs}) < len(runs):
        errors["names"] = ConfigError(
            "several runs of the sweep would have the same name: "
            + ", ".join(r.path.name for r in runs),
            hint="change the values: names differ only in their letters, digits, dots and signs",
        )
    if errors:
        *others, last = errors.values()
        for other in others:
            render.error(other)
        raise last
    render.line(f"{len(runs)} runs are checked")
    return runs


def _divided(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the overrides with one value, and the lists of values of the other overrides, by key.

    Raises:
        ConfigError: no key has several values; or a swept key occurs twice, has a value twice, or is `experiment`.
    """
    from dovetail.errors import ConfigError

    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for text in overrides:
        key, _, raw = text.partition("=")
        values = _values(raw)
        if len(values) < 2:
            fixed.append(text)
            continue
        if key in swept or key == "experiment" or len(set(values)) < len(values):
            raise ConfigError(
                f"the override {text} can't be swept; expected one override for each swept key, all its values different, and a key other than `experiment`",
                hint="write for example actor.optim.lr=1e-6,3e-6 seed=1,2,3; write a single value with a comma as a YAML list or in quotes",
            )
        swept[key] = values
    if not swept:
        raise ConfigError(
            "no override has several values, such as seed=1,2,3",
            hint="`dovetail train` trains one run",
        )
    return fixed, swept


def _values(text: str) -> list[str]:
    """Return the entries of a YAML list without its brackets, as written: `1e-6, [a, b]` has two. Any other text is one entry."""
    import yaml

    listed = f"[{text}]"
    try:
        node = yaml.compose(listed, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return [text]  # the error is reported when the override is read
    return [listed[each.start_mark.index : each.end_mark.index] for each in node.value]


def _combinations(swept: Mapping[str, Sequence[str]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the overrides of each combination, with the suffix of its run's name, such as `lr=1e-6_seed=2`."""
    short = {key: key.rpartition(".")[2] for key in swept}
    names = [key if [*short.values()].count(short[key]) > 1 else short[key] for key in swept]
    for chosen in itertools.product(*swept.values()):
        pairs = zip(names, (_as_name(value) for value in chosen), strict=True)
        overrides = tuple(f"{k}={v}" for k, v in zip(swept, chosen, strict=True))
        yield overrides, "_".join(map("=".join, pairs))


def _as_name(value: str) -> str:
    """Return a value as a part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "-", value).strip("-" if value[:1] != "-" else "")
