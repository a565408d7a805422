"""What commands print: errors, warnings, plain tables and JSON. Imports click alone, so that listings start fast."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

import click

from dovetail.errors import DovetailError
from dovetail.telemetry.escapes import visible, visible_json


def error(failure: DovetailError) -> None:
    """Print an error on stderr: the message, its problems where the message does not list them itself, the hint."""
    line(failure.message, label=click.style("error: ", fg="red", bold=True), err=True)
    listed = getattr(failure, "lists_problems", False)
    for problem in getattr(failure, "problems", ()) if not listed else ():
        if problem not in failure.message and "\n" not in problem:
            line(f"  - {problem}", err=True)
    if failure.hint:
        line(f"  → {failure.hint}", err=True)
    for note in getattr(failure, "__notes__", ()):
        # Where in the run it was raised; longer notes are tracebacks, which the log keeps.
        if "\n" not in note:
            line(f"  ({note})", err=True)
    worker_traceback = getattr(failure, "worker_traceback", "")
    if worker_traceback:
        line("\nthe worker's traceback:", err=True)
        line(textwrap.indent(worker_traceback, "  "), err=True)


def warning(text: str) -> None:
    """Print a warning on stderr."""
    line(text, label=click.style("warning: ", fg="yellow", bold=True), err=True)


def line(
    text: str = "", *, label: str = "", bold: bool = False, err: bool = False, nl: bool = True
) -> None:
    """Print text on stdout, or stderr, with its control characters made visible: it may come from a plugin or a model.

    Args:
        text: the line.
        label: stands before it as it is, with its style.
        bold: style of the text.
        err: on stderr.
        nl: end the line.
    """
    shown = visible(text)
    click.echo(label + (click.style(shown, bold=True) if bold else shown), err=err, nl=nl)


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
    line(wrapped)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns; the last is as wide as it needs to be."""
    lines = [[visible(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(cells[i]) for cells in lines) for i in range(len(headers))]
    for cells in lines:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        line("  ".join(padded).rstrip())


def fields(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names with values, the values aligned; a continued value is indented below itself."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        first, *rest = value.splitlines() or [""]
        line(f"{name.ljust(width)}  {first}".rstrip())
        for further in rest:
            line(" " * (width + 2) + further)


def dump_json(value: object) -> None:
    """Print JSON."""
    click.echo(visible_json(value))
