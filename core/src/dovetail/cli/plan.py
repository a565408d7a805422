"""`dovetail plan [CONFIG] [KEY=VALUE]...`: the stages, models and counts of a run, and why each is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dovetail.cli import render as rendering
from dovetail.cli.render import config_arguments, title
from dovetail.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.interfaces.preflight import Finding
    from dovetail.interfaces.source import PlannedPart
    from dovetail.interfaces.source_description import PlanNote
    from dovetail.planning.plan import Plan
    from dovetail.planning.stage_list import PlannedStage
    from dovetail.sections import RunConfig


@click.command()
@config_arguments()
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--columns", is_flag=True, help="Print which columns each stage reads and writes.")
@click.option(
    "--from-run",
    "run",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Predict seconds a step and who waits from what this run measured.",
)
def plan(
    config: tuple[str, ...],
    overrides: tuple[str, ...],
    as_json: bool,
    columns: bool,
    run: Path | None,
) -> None:
    """Print which stages and models a run of CONFIG, or of overrides alone, needs, with resolved counts and a memory estimate.

    With --from-run, a prediction of seconds a step and of the shares in which trainer and rollout wait for each other follows.

    What the preflight rules find in the config follows, as `dovetail check` prints it. Exits with 2 where that is an
    error.
    """
    import attrs

    from dovetail.config.load import load_config
    from dovetail.planning.adapters import adapters_of
    from dovetail.planning.memory import checkpoint_bytes, estimate_memory, most_checkpoints
    from dovetail.run.data import load_data, plan_from_data
    from dovetail.run.examination import refusal, rule_findings
    from dovetail.run.run import describe

    loaded = load_config(config, overrides)
    data = load_data(loaded.config)
    made = plan_from_data(loaded.config, data)
    source = made.facts.plugins["source"]
    memory: dict[str, int] = {}
    notes: list[PlanNote] = []
    unknown = ""
    try:
        notes.extend(source.cls.notes(source.config, made))  # keeps those before an error
        memory = estimate_memory(loaded.config, made)
    except ModelError as error:
        unknown = error.message
    saved, most = checkpoint_bytes(loaded.config, made), most_checkpoints(loaded.config, made)
    findings = rule_findings(loaded.config, made)
    predicted = [] if run is None else [source.cls.forecast(source.config, made, run)]
    if as_json:
        found = [attrs.asdict(finding) for finding in findings]
        adapters = [attrs.asdict(adapter) for adapter in adapters_of(loaded.config, made)]
        rendering.line(
            json.dumps(
                {
                    **describe(made),
                    "adapters": adapters,
                    "chat_template_args": dict(loaded.config.data.chat_template_args),
                    "streamed": data.train.streamed or None,
                    "memory_bytes": memory,
                    "memory_unknown": unknown or None,
                    "checkpoints": {"bytes": saved or None, "most": most},
                    "findings": found,
                    **{note.name: note.value for note in (*notes, *predicted)},
                },
                indent=1,
            )
        )
    else:
        render(made, loaded.config)
        if data.train.streamed:
            rendering.line(f"{data.rows_are} are streamed: {data.train.streamed}")
        if columns:
            render_columns(made)
        for note in notes:
            render_note(note)
        parts = "; ".join(f"{what} {_bytes(size)}" for what, size in memory.items())
        where = "" if made.placement.in_process else " of the fullest rank"
        total = _bytes(sum(memory.values()))
        told = f"not known: {unknown}" if unknown else f"{total} ({parts})"
        rendering.line(f"memory{where}, without activations: {told}")
        if saved and most:
            rendering.line(
                f"checkpoints: {_bytes(saved)} each, at most {most} at once: {_bytes(saved * most)}"
            )
        for note in predicted:
            rendering.line()
            render_note(note)
        for warning in loaded.warnings:
            rendering.warning(warning)
        render_warnings(findings)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise refusal(title(config), errors)


def render_note(note: PlanNote) -> None:
    """Print a note of the source, and what it does not take into account."""
    for line in note.text.splitlines():
        rendering.line(line)
    for warning in note.warnings:
        rendering.warning(warning)


def _bytes(size: int) -> str:
    """A size in the largest unit of which there is at least one."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size / 2**10:,.1f} KiB"


def render_warnings(findings: Sequence[Finding]) -> None:
    """Print the warnings among findings, each with how to fix it on a line of its own."""
    for finding in findings:
        if finding.severity == "warning":
            rendering.warning(str(finding))


def render(made: Plan, config: RunConfig) -> None:
    """Print a plan for people."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from dovetail.planning.adapters import adapters_of
    from dovetail.telemetry.terminal import Terminal

    console = Terminal(highlight=False, markup=False, emoji=False)
    adapters = {adapter.role: adapter for adapter in adapters_of(config, made)}
    preset = made.refs.get("algorithm.preset")
    if preset is not None:
        console.print(f"algorithm: preset {preset.name!r}")
    table = Table("phase", "stage", "who", "because", box=SIMPLE_HEAD, pad_edge=False)
    for phase, part in _parts(made):
        table.add_row(phase, part.name, part.who, part.because)
    console.print(table)
    for model in made.models:
        verb = "trained" if model.trained else "frozen"
        if model.follows is not None:
            verb = str(model.follows)
        elif model.role in adapters:
            verb = "frozen under its adapters"
        console.print(
            f"model {model.role}: {model.path} on {model.engine.name}, {verb}; {model.because}"
        )
    for adapter in adapters.values():
        console.print(str(adapter))
    for what, how_many in made.counts.rows():
        console.print(f"{what}: {how_many}")
    for name, value in config.data.chat_template_args.items():
        console.print(f"chat template: {name} = {json.dumps(value)}")
    for line in made.placement.lines(made.models):
        console.print(f"placement: {line}")
    console.print(f"seed {config.seed}")


def _parts(made: Plan) -> Iterator[tuple[str, PlannedPart | PlannedStage]]:
    """All that a step does, each with its phase."""
    yield from (("collect", part) for part in made.collection)
    yield from ((stage.phase, stage) for stage in made.stages)
    if made.publication is not None:
        yield "publish", made.publication


def render_columns(made: Plan) -> None:
    """Print the columns of every stage, each that it reads with its version: 1 as first written, 1 more after each rewrite."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from dovetail.telemetry.terminal import Terminal

    table = Table("stage", "reads", "writes", box=SIMPLE_HEAD, pad_edge=False)
    versions: dict[str, int] = {}
    for part in made.collection:
        versions |= dict.fromkeys(part.provides, 1)
        table.add_row(part.name, "", ", ".join(sorted(part.provides)))
    for stage in made.stages:
        for column in stage.provides | stage.rewrites:
            versions[column] = versions.get(column, 0) + 1
        written = sorted(stage.provides | stage.rewrites)
        table.add_row(
            stage.name,
            ", ".join(f"{column} {version}" for column, version in sorted(stage.reads.items())),
            ", ".join(f"{column} {versions[column]}" for column in written),
        )
    Terminal(highlight=False, markup=False, emoji=False).print(table)
