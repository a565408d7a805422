"""`dovetail plan [CONFIG] [KEY=VALUE]...`: the stages, models and counts (such as prompts per mini-batch) of a run, with reasons."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dovetail.cli import render as rendering
from dovetail.errors import ModelError
from dovetail_console.sizes import write_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.interfaces import PlanNote, SourceData
    from dovetail.planning import Plan
    from dovetail_console.memory import PlannedMemory


def _bytes_of(_: click.Context, __: click.Parameter, size: str | None) -> int | None:
    """Parse a memory size, such as `24GB`, `512MiB` or a number of bytes, and return it in bytes; None if no size is given.

    GB is read as GiB and MB as MiB.

    Raises:
        click.BadParameter: the text is not a size.
    """
    if size is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM])i?B?|(\d+)", size.strip(), re.IGNORECASE)
    if found is None:
        raise click.BadParameter(f"{size!r} is not a memory size; expected one such as 24GB")
    if found[3]:
        return int(found[3])
    # GB of accelerators are in fact GiB: one of 80 GB reports 79.6 GiB.
    return int(float(found[1]) * (2**20 if found[2] in "Mm" else 2**30))


@click.command()
@rendering.config_arguments()
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
    """Print the stages, models, counts (such as prompts per mini-batch) and memory estimate of a run of CONFIG, or of overrides alone.

    --from-run predicts, from the timings of the run RUN, the seconds per step and the shares of time in which trainer and rollout
    wait for each other. --fit prints overrides with which the run fits accelerators of the memory SIZE.

    Findings of the preflight rules follow, as `dovetail check` prints them. Exits with 2 if a finding is an error.
    """
    import attrs

    from dovetail.cli import plan_text
    from dovetail.config import load_config
    from dovetail.planning import adapters_of
    from dovetail.run import describe, load_data, plan_from_data, refusal, rule_findings
    from dovetail_console.memory import estimate_memory, most_checkpoints

    loaded = load_config(config, overrides)
    data = load_data(loaded.config)
    made = plan_from_data(loaded.config, data)
    source = made.facts.plugins["source"]
    memory: PlannedMemory | None = None
    notes: list[PlanNote] = []
    unknown = ""
    try:
        notes.extend(source.cls.notes(source.config, made))  # notes before an error are kept
        memory = estimate_memory(made, card=card)
    except ModelError as error:
        unknown = error.message
    saved, most = made.checkpoint_bytes(), most_checkpoints(made)
    findings = rule_findings(loaded.config, made)
    predicted = [] if run is None else [source.cls.forecast(source.config, made, run)]
    predicted += [] if card is None else [_fit_note(config, overrides, data, card)]
    if as_json:
        found = [attrs.asdict(finding) for finding in findings]
        adapters = [attrs.asdict(adapter) for adapter in adapters_of(made)]
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
        plan_text.render_plan(made)
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
                f"checkpoints: {write_bytes(saved)} each, at most {most} at once: {write_bytes(saved * most)}"
            )
        for note in predicted:
            rendering.line()
            render_note(note)
        for warning in loaded.warnings:
            rendering.warning(warning)
        plan_text.render_warnings(findings)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise refusal(rendering.title(config), errors)


def render_note(note: PlanNote) -> None:
    """Print the text of a note on the plan, and then its warnings. The experience source, `--from-run` and `--fit` add such notes."""
    for line in note.text.splitlines():
        rendering.line(line)
    for warning in note.warnings:
        rendering.warning(warning)


def render_memory(memory: PlannedMemory | None, where: str, unknown: str) -> None:
    """Print the memory use of each phase of a step, with the fullest phase divided by purpose.

    Args:
        memory: the memory use; None if it is unknown.
        where: the label of the first line, such as `memory`.
        unknown: the reason why the use is unknown, printed if `memory` is None.
    """
    if memory is None:
        rendering.line(f"{where}: not known: {unknown}")
        return
    fullest = memory.fullest
    parts = "; ".join(f"{what} {write_bytes(n)}" for what, n in memory.phases[fullest].items() if n)
    uncounted = ", ".join(memory.uncounted)
    without = f", without activations of {uncounted}" if uncounted else ""
    rendering.line(f"{where}{without}: {write_bytes(memory.peak)} in {fullest} ({parts})")
    if spare := memory.spare.get(fullest, 0):
        least = write_bytes(memory.least(fullest))
        rendering.line(
            f"  where memory is short, {least}: {write_bytes(spare)} of activations are then computed again"
        )
    for phase, held in memory.phases.items():
        if phase != fullest:
            rendering.line(f"  {write_bytes(sum(held.values()))} in {phase}")


def _fit_note(
    config: tuple[str, ...], overrides: tuple[str, ...], data: SourceData, card: int
) -> PlanNote:
    """Return a note that says whether the run fits accelerators of `card` bytes, and with which additional overrides."""
    import attrs

    from dovetail.config import load_config
    from dovetail.interfaces import PlanNote
    from dovetail.run import plan_from_data
    from dovetail_console.fit import fitting

    def planned(changes: Mapping[str, object]) -> Plan:
        given = [f"{key}={_word(value)}" for key, value in changes.items()]
        return plan_from_data(load_config(config, (*overrides, *given)).config, data)

    fit = fitting(planned, card)
    words = " ".join(shlex.quote(f"{key}={_word(value)}") for key, value in fit.changes.items())
    how = f"with {words}" if words else "as it is"
    verb = "fits" if fit.fits else "does not fit"
    text = f"{verb} accelerators of {write_bytes(card)} {how}: {write_bytes(fit.least)} at least"
    return PlanNote(name="fit", text=text, value=attrs.asdict(fit))


def _word(value: object) -> str:
    """Return a value as written in an override."""
    return value if isinstance(value, str) else json.dumps(value)


def render_columns(made: Plan) -> None:
    """Print the columns of every stage. Columns that a stage reads have a version: 1 as first written, plus 1 for each rewrite."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from dovetail.telemetry import Terminal

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
