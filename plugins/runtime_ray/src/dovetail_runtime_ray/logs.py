"""Log files of a worker process: one with log events, as lines of JSON, and one with printed output."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dovetail.telemetry import (
    RunDirectory,
    bind_process,
    drop_import_messages,
    json_formatter,
    json_handler,
)

FOLDER = "logs"
"""The folder of log files below the run directory."""
KEPT_WARNINGS = 20
"""Largest number of warnings that one answer returns."""
LAST_LINES = 12
"""Number of last output lines of a lost process that an error shows."""
_STAYS = {"level", "logger", "timestamp", "run", "exception"}
"""Fields of a warning that are not sent to the controller, whose log adds its own fields and shows no traceback."""


class WorkerLogs:
    """The log files of this process. A log event has the role and rank of the call that logs it; outside a call, `label` and `rank`.

    Args:
        run_directory: the directory of `logs/`; None for no files.
        label: the role, or the roles that share the process.
        rank: the rank in the pool, or the replica's number.
    """

    def __init__(self, run_directory: str | None, label: str, rank: int) -> None:
        self._files: list[Path] = []
        self._warnings = _Warnings()
        root = logging.getLogger()
        root.addHandler(self._warnings)
        logging.getLogger("dovetail").setLevel(logging.INFO)
        logging.captureWarnings(True)
        # Python's warnings about the source code of libraries, which a user of a run can't change.
        warnings.filterwarnings("ignore", category=SyntaxWarning)
        drop_import_messages()
        bind_process(role=label, rank=rank)
        if run_directory is not None:
            bind_process(run=RunDirectory(Path(run_directory)).name)
            folder = Path(run_directory) / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            logged, printed = (folder / f"{label}-{rank}.{end}" for end in ("jsonl", "out"))
            root.addHandler(json_handler(logged))
            _redirect(printed)
            self._files = [logged, printed]

    def warnings(self) -> tuple[dict[str, Any], ...]:
        """Return the warnings since the last call."""
        return self._warnings.take()

    def close(self) -> None:
        """Remove log files that are empty."""
        sys.stdout.flush()
        sys.stderr.flush()
        _remove_empty(self._files)


def last_printed(run_directory: str | None, name: str) -> str:
    """Return the last lines of a process's output, as text for an error; empty if they can't be read on this machine."""
    if run_directory is None:
        return ""
    try:
        text = (Path(run_directory) / FOLDER / f"{name}.out").read_text(errors="replace")
    except OSError:
        return ""  # the file is on another machine
    lines = text.strip().splitlines()[-LAST_LINES:]
    return "; it last printed:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""


def remove_empty(run_directory: str | None) -> None:
    """Remove the empty log files of processes that were killed."""
    if run_directory is not None:
        _remove_empty((Path(run_directory) / FOLDER).glob("*.*"))


def _remove_empty(files: Iterable[Path]) -> None:
    for path in files:
        if path.is_file() and not path.stat().st_size:
            path.unlink()


class _Warnings(logging.Handler):
    """A handler that keeps warnings until `take` returns them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(json_formatter())
        self._kept: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._kept) < KEPT_WARNINGS:
            event = json.loads(self.format(record))
            self._kept.append({key: event[key] for key in event.keys() - _STAYS})

    def take(self) -> tuple[dict[str, Any], ...]:
        kept, self._kept = self._kept, []
        return tuple(kept)


def _redirect(path: Path) -> None:
    """Redirect the output of this process and its libraries to a file, to which a native crash also writes its stack."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    for text in (sys.stdout, sys.stderr):
        reconfigure = getattr(text, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
    faulthandler.enable()
