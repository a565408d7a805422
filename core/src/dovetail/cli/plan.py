"""`dovetail plan CONFIG`: the stages, models and counts of a run, and why each is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dovetail.cli import render as rendering

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.config.sections import RunConfig
    from dovetail.flow.plan import Plan
    from dovetail.interfaces.preflight import Finding


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print which stages and models a run of CONFIG needs, with resolved counts and a memory estimate.

    What the preflight rules find in the config follows, as `dovetail check` prints it. Exits with 2 where that is an
    error.
    """
    import attrs

    from dovetail.config import load_config
    from dovetail.flow.build import load_data, plan_from_data
    from dovetail.flow.memory import estimate_memory
    from dovetail.flow.preflight import refusal, rule_findings
    from dovetail.flow.run import describe

    loaded = load_config(config, overrides)
    made = plan_from_data(loaded.config, load_data(loaded.config))
    memory = estimate_memory(loaded.config, made)
    findings = rule_findings(loaded.config, made)
    if as_json:
        found = [attrs.asdict(finding) for finding in findings]
        click.echo(
            json.dumps({**describe(made), "memory_bytes": memory, "findings": found}, indent=1)
        )
    else:
        render(made, loaded.config)
        total = sum(memory.values())
        parts = ", ".join(f"{what} {size / 2**20:,.0f} MiB" for what, size in memory.items())
        where = "" if made.placement.in_process else " of the fullest rank"
        click.echo(f"memory{where}, without activations: {total / 2**20:,.0f} MiB ({parts})")
        for warning in loaded.warnings:
            rendering.warning(warning)
        render_warnings(findings)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise refusal(str(config), errors)


def render_warnings(findings: Sequence[Finding]) -> None:
    """Print the warnings among findings, each with how to mend it on a line of its own."""
    for finding in findings:
        if finding.severity == "warning":
            rendering.warning(str(finding))


def render(made: Plan, config: RunConfig) -> None:
    """Print a plan for people."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    preset = made.refs.get("algorithm.preset")
    if preset is not None:
        console.print(f"algorithm: preset {preset.name!r}")
    table = Table("stage", "who", "because", box=SIMPLE_HEAD, pad_edge=False)
    for stage in made.stages:
        table.add_row(stage.name, stage.who, stage.because)
    console.print(table)
    for model in made.models:
        verb = "trained" if model.trained else "frozen"
        console.print(
            f"model {model.role}: {model.path} on {model.engine.name}, {verb}; {model.because}"
        )
    for what, how_many in made.counts.rows():
        console.print(f"{what}: {how_many}")
    for line in made.placement.lines(made.models):
        console.print(f"placement: {line}")
    console.print(f"seed {config.seed}")
