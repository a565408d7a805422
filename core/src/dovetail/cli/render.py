"""Output of commands: errors, warnings, plain tables and JSON; and the arguments of commands that take a config.

Imports no third-party package but click, so that listings start fast.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, ZshComplete, add_completion_class

from dovetail.errors import DovetailError
from dovetail.telemetry.escapes import visible, visible_json


def error(failure: DovetailError) -> None:
    """Print an error on stderr: message, problems that the message does not list, hint, one-line notes, and a worker's traceback."""
    line(failure.message, label=click.style("error: ", fg="red", bold=True), err=True)
    listed = getattr(failure, "lists_problems", False)
    for problem in getattr(failure, "problems", ()) if not listed else ():
        if problem not in failure.message and "\n" not in problem:
            line(f"  - {problem}", err=True)
    if failure.hint:
        line(f"  → {failure.hint}", err=True)
    for note in getattr(failure, "__notes__", ()):
        # A one-line note says where in the run the error was raised; longer ones are tracebacks, which are in the log.
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
    """Print text on stdout, or stderr, with control characters made visible: the text may come from a plugin or a model.

    Args:
        text: the line.
        label: text before the line, printed unchanged in its own style.
        bold: whether the text is bold.
        err: whether to print to stderr.
        nl: whether to end the line with a newline.
    """
    shown = visible(text)
    click.echo(label + (click.style(shown, bold=True) if bold else shown), err=err, nl=nl)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows in columns that are as wide as their longest cell; no cell is cut."""
    lines = [[visible(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(cells[i]) for cells in lines) for i in range(len(headers))]
    for cells in lines:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        line("  ".join(padded).rstrip())


def fields(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names with aligned values; further lines of a value are indented below its first."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        first, *rest = value.splitlines() or [""]
        line(f"{name.ljust(width)}  {first}".rstrip())
        for further in rest:
            line(" " * (width + 2) + further)


def dump_json(value: object) -> None:
    """Print a value as JSON."""
    click.echo(visible_json(value))


COMMAND_LINE = "the command line"
"""Name, in messages, of a config given without a file."""


def config_arguments(
    metavar: str = "[CONFIG] [KEY=VALUE]...",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the parameters `config` (a tuple of at most one path) and `overrides` to a command.

    If the first argument contains `=` and no file has this name, it is an override, and no config file is read.

    Args:
        metavar: the name of the arguments in the command's help.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(arguments: tuple[str, ...], **options: Any) -> Any:
            files = 0 if "=" in arguments[0] and not Path(arguments[0]).is_file() else 1
            return command(config=arguments[:files], overrides=arguments[files:], **options)

        return click.argument(
            "arguments", nargs=-1, required=True, metavar=metavar, shell_complete=complete
        )(run)

    return decorate


def complete(
    context: click.Context, _parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Return shell completions: files for a command's first argument; for later ones `key=` for each key of that config.

    Only keys that begin with `begun`, the text typed so far, are returned.
    """
    arguments = context.params.get("arguments") or ()
    if not arguments:
        return [CompletionItem(begun, type="file")]
    from dovetail.config.explain import all_keys
    from dovetail.config.load import load_config

    with suppress(DovetailError):  # a config with errors completes no keys
        loaded = load_config([a for a in arguments[:1] if "=" not in a], partial=True)
        keys = (key for key, _, _ in all_keys(loaded) if key.startswith(begun))
        return [CompletionItem(f"{key}=") for key in keys]
    return []


# bash appends a blank to a completion; after `key=` the value must follow without a blank.
class _Bash(BashComplete):
    source_template = BashComplete.source_template.replace(
        "    return 0", "    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace\n    return 0"
    )


class _Zsh(ZshComplete):
    source_template = ZshComplete.source_template.replace(
        "compadd -U", 'compadd -qS "${${completions[1]:#*=}:+ }" -U'
    )


add_completion_class(_Bash)
add_completion_class(_Zsh)


def title(config: tuple[str, ...]) -> str:
    """Return the name of a config in messages: its path, or `the command line`."""
    return config[0] if config else COMMAND_LINE
