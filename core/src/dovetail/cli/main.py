"""The `dovetail` command group: subcommands, loaded when used, and exit codes of errors."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from dovetail import __version__
from dovetail.cli import render
from dovetail.cli.further import ExtensibleGroup
from dovetail.errors import (
    DovetailError,
    StopRequested,
    causes,
)
from dovetail.telemetry import drop_import_messages, visible

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("dovetail.cli.train:train", "Train with a config."),
    "resume": ("dovetail.cli.train:resume", "Continue a run from its latest checkpoint."),
    "check": ("dovetail.cli.check:check", "Check a config without running it."),
    "config": ("dovetail.cli.config:config", "Show and explain configs."),
    "plugins": (
        "dovetail.cli.plugins:plugins",
        "List, show, lock, verify and write plugins; its commands come from packages.",
    ),
}
"""Name → (`module:attribute`, description for `--help`), so that help imports no command."""

_FULL = "free some space; set DOVETAIL_TRACEBACK=1 to see which file was being written"
_HINTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.ENAMETOOLONG: "shorten the name to at most 255 bytes, in the argument or config key that gives the path",
    errno.EISDIR: "a file is expected at this path: remove the folder, or give another path",
    errno.EIO: "check that the path names a file, and that its disk has no errors",
    errno.EACCES: "change the permissions of the path, or give another path",
}
"""The fix for an error of the operating system that ends a command, by errno."""

_OF_INFRASTRUCTURE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ETIMEDOUT,
}
"""Errors of the operating system (errno) after which the same command may work."""
_LOST_PEERS = {"DistBackendError", "DistNetworkError", "DistStoreError"}
"""Class names of torch.distributed's errors for a lost peer: names, so that torch need not be imported."""

EXTENSION_GROUP = "dovetail.cli"
"""Entry-point group in which packages add commands to `dovetail`; an entry point's name is the command's name."""
TRACEBACK_VARIABLE = "DOVETAIL_TRACEBACK"
"""Environment variable that, set to 1, shows an error's traceback."""


class CommandLine(ExtensibleGroup):
    """The group of all commands; a failed command ends with a message and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command as click does, and report a full disk or a path without permission as a Dovetail error."""
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _print_traceback
        drop_import_messages()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A model's text or a path may contain characters that the terminal's encoding lacks.
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().main(*args, **extra)
        except OSError as failure:
            if _traceback_wanted() or failure.errno not in _HINTS:
                raise
            message = str(failure)[:300]
            if failure.errno in (errno.ENOSPC, errno.EDQUOT):
                # The interpreter flushes stdout at exit, which would fail again.
                sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
                message = f"the disk is full: {failure}"
            render.error(DovetailError(message, hint=_HINTS[failure.errno]))
            sys.exit(_exit_code(failure))

    def invoke(self, ctx: click.Context) -> Any:
        if os.environ.get("NO_COLOR"):
            ctx.color = False  # rich reads NO_COLOR itself, click does not; subcommands inherit this setting
        try:
            return super().invoke(ctx)
        except DovetailError as failure:
            if _traceback_wanted():
                raise
            if isinstance(failure, StopRequested):
                render.line(f"{failure}; the work up to here is saved", err=True)
            else:
                render.error(failure)
            ctx.exit(_exit_code(failure))
        except click.ClickException as failure:
            failure.message = visible(failure.message)  # type: ignore[misc]  # shown by its `show`
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


@click.group(
    cls=CommandLine,
    group=EXTENSION_GROUP,
    own=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="dovetail")
def main() -> None:
    """Reinforcement-learning post-training of language models, where everything plugs in."""


def _exit_code(error: BaseException) -> int:
    """Return the error's exit code; 75 in place of 1 if a failure of the infrastructure caused the error."""
    own: int = getattr(error, "exit_code", 1)
    lost = any(
        getattr(cause, "exit_code", 1) == os.EX_TEMPFAIL
        or isinstance(cause, ConnectionError)
        or (isinstance(cause, OSError) and cause.errno in _OF_INFRASTRUCTURE)
        or type(cause).__name__ in _LOST_PEERS
        for cause in causes(error)
    )
    return os.EX_TEMPFAIL if own == 1 and lost else own


def _traceback_wanted() -> bool:
    return os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0")


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the traceback of an unexpected error, with control characters made visible: its message may contain a model's text."""
    render.line("".join(traceback.format_exception(kind, error, trace)), err=True, nl=False)


if __name__ == "__main__":
    main(prog_name="dovetail")
