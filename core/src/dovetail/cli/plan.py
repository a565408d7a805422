"""`dovetail plan [CONFIG] [KEY=VALUE]...`: the stages, models and counts of a run, and why each is there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dovetail.cli import render as rendering
from dovetail.cli.render import config_arguments, title
from dovetail.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dovetail.interfaces.preflight import Finding
    from dovetail.interfaces.source import PlannedPart
    from dovetail.interfaces.source_data import SourceData
    from dovetail.interfaces.source_description import PlanNote
    from dovetail.planning.memory import PlannedMemory
    from dovetail.planning.plan import Plan
    from dovetail.planning.stage_list import PlannedStage
    from dovetail.sections import RunConfig


def _bytes_of(_: click.Context, __: click.Parameter, size: str | None) -> int | None:
    """Return the bytes that `24GB`, `512MiB` or a number names.

    Raises:
        click.BadParameter: it names none.
    """
    if size is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM])i?B?|(\d+)", size.strip(), re.IGNORECASE)
    if found is None:
        raise click.BadParameter(f"{size!r} is not a size of memory, such as 24GB")
    if found[3]:
        return int(found[3])
    # An accelerator's GB are GiB: one of 80 GB reports 79.6 GiB.
    return int(float(found[1]) * (2**20 if found[2] in "Mm" else 2**30))


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
@click.option(
    "--fit",
    "card",
    metavar="SIZE",
    callback=_bytes_of,
    help="Propose settings under which the run fits accelerators of this memory, such as 24GB.",
)
def plan(
    config: tuple[str, ...],
    overrides: tuple[str, ...],
    as_json: bool,
    columns: bool,
    run: Path | None,
    card: int | None,
) -> None:
    """Print which stages and models a run of CONFIG, or of overrides alone, needs, with resolved counts and a memory estimate.

    With --from-run, a prediction of seconds a step and of the shares in which trainer and rollout wait for each other follows. With
    --fit, overrides follow under which no accelerator's memory is exceeded.

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
    memory: PlannedMemory | None = None
    notes: list[PlanNote] = []
    unknown = ""
    try:
        notes.extend(source.cls.notes(source.config, made))  # keeps those before an error
        memory = estimate_memory(loaded.config, made, card=card)
    except ModelError as error:
        unknown = error.message
    saved, most = checkpoint_bytes(loaded.config, made), most_checkpoints(loaded.config, made)
    findings = rule_findings(loaded.config, made)
    predicted = [] if run is None else [source.cls.forecast(source.config, made, run)]
    predicted += [] if card is None else [_fit_note(config, overrides, data, card)]
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
                    "memory": None if memory is None else attrs.asdict(memory),
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
        where = "memory" if made.placement.in_process else "memory of the fullest rank"
        render_memory(memory, where, unknown)
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
    """Print a note of the source, and its limitations."""
    for line in note.text.splitlines():
        rendering.line(line)
    for warning in note.warnings:
        rendering.warning(warning)


def render_memory(memory: PlannedMemory | None, where: str, unknown: str) -> None:
    """Print the phase of a step with the highest memory use, its parts, and the other phases' use; or why it is unknown."""
    if memory is None:
        rendering.line(f"{where}: not known: {unknown}")
        return
    fullest = memory.fullest
    parts = "; ".join(f"{what} {_bytes(n)}" for what, n in memory.phases[fullest].items() if n)
    uncounted = ", ".join(memory.uncounted)
    without = f", without activations of {uncounted}" if uncounted else ""
    rendering.line(f"{where}{without}: {_bytes(memory.peak)} in {fullest} ({parts})")
    if spare := memory.spare.get(fullest, 0):
        least = _bytes(memory.least(fullest))
        rendering.line(
            f"  where memory is short, {least}: {_bytes(spare)} of activations are then computed again"
        )
    for phase, held in memory.phases.items():
        if phase != fullest:
            rendering.line(f"  {_bytes(sum(held.values()))} in {phase}")


def _fit_note(
    config: tuple[str, ...], overrides: tuple[str, ...], data: SourceData, card: int
) -> PlanNote:
    """Return the overrides under which a run fits accelerators of so many bytes."""
    import attrs

    from dovetail.config.load import load_config
    from dovetail.interfaces.source_description import PlanNote
    from dovetail.planning.fit import fitting
    from dovetail.run.data import plan_from_data

    def planned(changes: Mapping[str, object]) -> Plan:
        given = [f"{key}={_word(value)}" for key, value in changes.items()]
        return plan_from_data(load_config(config, (*overrides, *given)).config, data)

    fit = fitting(planned, card)
    words = " ".join(shlex.quote(f"{key}={_word(value)}") for key, value in fit.changes.items())
    how = f"with {words}" if words else "as it is"
    verb = "fits" if fit.fits else "does not fit"
    text = f"{verb} accelerators of {_bytes(card)} {how}: {_bytes(fit.least)} at least"
    return PlanNote(name="fit", text=text, value=attrs.asdict(fit))


def _word(value: object) -> str:
    """A value as an override writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _bytes(size: int) -> str:
    """A size in the largest unit of which there is at least one."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size / 2**10:,.1f} KiB"


def render_warnings(findings: Sequence[Finding]) -> None:
    """Print the warnings among findings, each with its fix on a separate line."""
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
