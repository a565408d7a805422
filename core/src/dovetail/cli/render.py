"""What commands print: errors, warnings, plain tables and JSON. Imports click alone, so that listings start fast."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

import click

from dovetail.errors import DovetailError


def error(failure: DovetailError) -> None:
    """Print an error on stderr: the message, its problems where the message does not list them itself, the hint."""
    _say(failure.message, click.style("error: ", fg="red", bold=True))
    listed = getattr(failure, "lists_problems", False)
    for problem in getattr(failure, "problems", ()) if not listed else ():
        if problem not in failure.message and "\n" not in problem:
            _say(f"  - {problem}")
    if failure.hint:
        _say(f"  → {failure.hint}")
    for note in getattr(failure, "__notes__", ()):
        # Where in the run it was raised; longer notes are tracebacks, which the log keeps.
        if "\n" not in note:
            _say(f"  ({note})")
    worker_traceback = getattr(failure, "worker_traceback", "")
    if worker_traceback:
        click.echo("\nthe worker's traceback:", err=True)
        _say("".join(f"  {line}\n" for line in worker_traceback.splitlines()))


def warning(text: str) -> None:
    """Print a warning on stderr."""
    _say(text, click.style("warning: ", fg="yellow", bold=True))


def _say(text: str, prefix: str = "") -> None:
    """Print on stderr what may hold text of a model or of a reward function."""
    from dovetail.telemetry.terminal import visible

    click.echo(prefix + visible(text), err=True)


def paragraph(text: str, indent: int = 0) -> None:
    """Print a paragraph, wrapped at the width of the terminal; as one line where the output is no terminal."""
    start = " " * indent
    wrapped = textwrap.fill(
        text,
        shutil.get_terminal_size((sys.maxsize, 0)).columns,
        initial_indent=start,
        subsequent_indent=start + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    click.echo(wrapped)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns; the last is as wide as it needs to be."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        click.echo("  ".join(padded).rstrip())


def fields(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names with values, the values aligned; a continued value is indented below itself."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        first, *rest = value.splitlines() or [""]
        click.echo(f"{name.ljust(width)}  {first}".rstrip())
        for line in rest:
            click.echo(" " * (width + 2) + line)


def dump_json(value: object) -> None:
    """Print JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
