"""Log files of worker processes: one a role and rank for what Dovetail logs, one a process for all that is printed."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dovetail.telemetry import get_logger
from dovetail_runtime_ray.wire import Warned

FOLDER = "logs"
"""Below the run directory."""
KEPT_WARNINGS = 20
"""Most warnings that go back with one answer."""
LAST_LINES = 12
"""Of what a lost process printed."""


class WorkerLogs:
    """The log files of this process.

    Args:
        run_directory: where `logs/` goes; None writes nothing.
        name: `<label>-<rank>`.
    """

    def __init__(self, run_directory: str | None, name: str) -> None:
        self._folder = Path(run_directory) / FOLDER if run_directory is not None else None
        self._printed: Path | None = None
        self._warnings = _Warnings()
        logging.getLogger("dovetail").setLevel(logging.INFO)
        logging.getLogger().addHandler(self._warnings)
        logging.captureWarnings(True)
        # What Python says of the code of libraries while it compiles it: nobody who reads a run's warnings can fix that.
        warnings.filterwarnings("ignore", category=SyntaxWarning)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._printed = self._folder / f"{name}.out"
            _redirect(self._printed)

    def logger(self, role: str, rank: int) -> Any:
        """A logger that writes to `logs/<role>-<rank>.log`, and whose warnings also go back to the controller."""
        name = f"dovetail.workers.{role}.{rank}"
        standard = logging.getLogger(name)
        if self._folder is not None and not standard.handlers:
            handler = logging.FileHandler(self._folder / f"{role}-{rank}.log", delay=True)
            handler.setFormatter(_Lines())
            standard.addHandler(handler)
        return get_logger(name)

    def warnings(self) -> tuple[Warned, ...]:
        """What was warned of since this was last asked."""
        return self._warnings.take()

    def close(self) -> None:
        """Remove the file of what was printed, if nothing was."""
        sys.stdout.flush()
        sys.stderr.flush()
        if (
            self._printed is not None
            and self._printed.exists()
            and not self._printed.stat().st_size
        ):
            self._printed.unlink()


def last_printed(run_directory: str | None, name: str) -> str:
    """The last lines of what a process printed, in words for an error; empty where nothing can be read here."""
    if run_directory is None:
        return ""
    try:
        text = (Path(run_directory) / FOLDER / f"{name}.out").read_text(errors="replace")
    except OSError:
        return ""  # another machine's
    lines = text.strip().splitlines()[-LAST_LINES:]
    return "; it last printed:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""


def remove_empty(run_directory: str | None) -> None:
    """Remove the files of processes that printed nothing; those that were killed could not do so themselves."""
    if run_directory is None:
        return
    for path in (Path(run_directory) / FOLDER).glob("*.out"):
        if not path.stat().st_size:
            path.unlink()


class _Lines(logging.Formatter):
    """`2026-11-21T15:00:00.000Z warning event key=value`, with the traceback below."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _event(record)
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = " ".join(
            [when, record.levelname.lower(), event, *(f"{k}={v}" for k, v in fields.items())]
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _Warnings(logging.Handler):
    """Keeps warnings until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: list[Warned] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._kept) < KEPT_WARNINGS:
            event, fields = _event(record)
            self._kept.append(Warned(event=event, fields=fields))

    def take(self) -> tuple[Warned, ...]:
        kept, self._kept = self._kept, []
        return tuple(kept)


def _event(record: logging.LogRecord) -> tuple[str, dict[str, str]]:
    """A record as an event and its fields, whether structlog or a library made it."""
    if not isinstance(record.msg, dict):
        return record.getMessage().strip(), {}
    fields = {key: str(value) for key, value in record.msg.items() if key != "exc_info"}
    return fields.pop("event", "").strip(), fields


def _redirect(path: Path) -> None:
    """Send what this process and its libraries print to a file: a native crash says there why."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    for text in (sys.stdout, sys.stderr):
        reconfigure = getattr(text, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
    faulthandler.enable()
