"""The arguments `[CONFIG] [KEY=VALUE]...` of commands that take a config."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

COMMAND_LINE = "the command line"
"""What messages call a config that no file gives."""


def config_arguments(
    metavar: str = "[CONFIG] [KEY=VALUE]...",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the parameters `config`, one file or none, as a tuple of str, and `overrides`.

    A first argument with `=` that is no file's name is an override: keys then come from the command line alone.

    Args:
        metavar: what the command's help calls the arguments.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(arguments: tuple[str, ...], **options: Any) -> Any:
            files = 0 if "=" in arguments[0] and not Path(arguments[0]).is_file() else 1
            return command(config=arguments[:files], overrides=arguments[files:], **options)

        return click.argument("arguments", nargs=-1, required=True, metavar=metavar)(run)

    return decorate


def title(config: tuple[str, ...]) -> str:
    """Return what messages call a config."""
    return config[0] if config else COMMAND_LINE
