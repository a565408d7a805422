"""The plan of a run as text on the terminal: stages, models, counts, placement, and warnings of preflight rules."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dovetail.cli import render as rendering

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.interfaces.preflight import Finding
    from dovetail.interfaces.source import PlannedPart
    from dovetail.planning.plan import Plan
    from dovetail.planning.stage_list import PlannedStage


def render_warnings(findings: Sequence[Finding]) -> None:
    """Print the warnings among findings, each with its fix on a separate line."""
    for finding in findings:
        if finding.severity == "warning":
            rendering.warning(str(finding))


def render_plan(made: Plan) -> None:
    """Print a plan as readable text."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from dovetail.planning.adapters import adapters_of
    from dovetail.telemetry.terminal import Terminal

    config = made.facts.config
    console = Terminal(highlight=False, markup=False, emoji=False)
    adapters = {adapter.role: adapter for adapter in adapters_of(made)}
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
    """Yield (phase, part) of everything that a step does, in order: `collect`, then the phases of the stages, then `publish`."""
    yield from (("collect", part) for part in made.collection)
    yield from ((stage.phase, stage) for stage in made.stages)
    if made.publication is not None:
        yield "publish", made.publication
