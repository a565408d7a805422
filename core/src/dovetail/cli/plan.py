"""`dovetail plan CONFIG`: the stages, models and counts of a run, and why each is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dovetail.config.sections import RunConfig
    from dovetail.flow.plan import Plan


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print which stages and models a run of CONFIG needs, with resolved counts and a memory estimate."""
    from dovetail.config import load_config
    from dovetail.flow.build import load_data, plan_from_data
    from dovetail.flow.memory import estimate_memory
    from dovetail.flow.run import describe

    loaded = load_config(config, overrides)
    made = plan_from_data(loaded.config, load_data(loaded.config))
    memory = estimate_memory(loaded.config, made)
    if as_json:
        click.echo(json.dumps({**describe(made), "memory_bytes": memory}, indent=1))
        return
    render(made, loaded.config)
    total = sum(memory.values())
    parts = ", ".join(f"{what} {size / 2**20:,.0f} MiB" for what, size in memory.items())
    click.echo(f"memory, without activations: {total / 2**20:,.0f} MiB ({parts})")


def render(made: Plan, config: RunConfig) -> None:
    """Print a plan for people."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
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
    runtime = made.refs["runtime"].name
    console.print(f"placement: every role in one worker ({runtime}); seed {config.seed}")
