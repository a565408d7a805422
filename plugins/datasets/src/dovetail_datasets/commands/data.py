"""The command-line interface of `dovetail data`."""

from __future__ import annotations

from pathlib import Path

import click

from dovetail.cli import render
from dovetail_datasets.prepare.command import prepare

_METAVAR = "(CONFIG | FILE) [KEY=VALUE]..."


@click.group()
def data() -> None:
    """Make datasets, look at their rows as the model sees them, and check them."""


data.add_command(prepare)


@data.command()
@render.config_arguments(_METAVAR)
@click.option(
    "--rows", default=3, show_default=True, type=click.IntRange(1), help="The number of rows."
)
@click.option("--from", "first", default=0, show_default=True, type=click.IntRange(0), help="The number of the first row.")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path), help="Write a page, with images as thumbnails.")  # fmt: skip
def look(
    config: tuple[str, ...], overrides: tuple[str, ...], rows: int, first: int, html: Path | None
) -> None:
    r"""Show rows of the first training dataset: their text with special tokens, and the parts that are trained on.

    \b
      dovetail data look sft.yaml --from 1000
      dovetail data look conversations.jsonl model.path=Qwen/Qwen3-0.6B

    ⟦…⟧ marks text that is trained on. For prompts, the reward of the reference answer is shown.
    """
    from dovetail_datasets.commands.look import as_html, as_text, seen
    from dovetail_datasets.commands.opened import opened

    found = seen(opened(config, overrides), first, rows)
    if html is not None:
        html.write_text(as_html(render.title(config), found), encoding="utf-8")
        render.line(f"{html}: written")
        return
    for row in found:
        for line in as_text(row):
            click.echo(line)


@data.command()
@render.config_arguments(_METAVAR)
def check(config: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """List problems in the rows of a config's data, or of a file; exits with 1 if there are any.

    Problems are bad rows, duplicates, held-out rows that are trained on, rows that are too long, content that the chat template leaves out,
    and reference answers that the reward refuses. If the data is streamed, only the rows that are read before a run
    starts are checked; data.streaming=false reads all.
    """
    from dovetail_datasets.commands.faults import faults_of
    from dovetail_datasets.commands.opened import opened

    found = opened(config, overrides)
    held_out = "" if found.data.val is None else f", {len(found.data.val):,} held out"
    rows = f"{len(found.data.train):,} training {found.data.rows_are}{held_out}"
    if found.data.train.streamed:
        render.line(f"streamed: {found.data.train.streamed}")
    faults = list(faults_of(found))
    for fault in faults:
        render.warning(fault)
    if faults:
        raise SystemExit(1)
    render.line(f"OK: {render.title(config)}: {rows}")
