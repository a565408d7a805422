"""Logging of a run: every event to `events.jsonl`, warnings to stderr for a person to read."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, cast

import structlog
from rich.console import Console
from rich.text import Text

from dovetail.telemetry.jsonl import append_rows
from dovetail.telemetry.terminal import visible

LOGGER = "dovetail"
"""Name of the standard logger above all of Dovetail's."""


def setup_logging(run_directory: str | os.PathLike[str]) -> structlog.stdlib.BoundLogger:
    """Route what Dovetail and the libraries below it log.

    Dovetail's own events from `info` on, and other libraries' warnings, go to `events.jsonl` as
    `{"timestamp", "level", "event", "step", "logger", …}`; warnings and errors of both go to stderr too,
    one readable line each, above a live progress display where there is one. Python warnings are
    logged as `py.warnings`. Setting up again replaces the former set-up.

    Args:
        run_directory: where `events.jsonl` goes.

    Returns:
        A structlog logger with the standard methods: `logger.info("checkpoint saved", path=path)`.
    """
    close_logging()
    session = _Session()
    session.handlers.append(_EventsHandler(Path(run_directory) / "events.jsonl", session))
    session.handlers.append(_PeopleHandler(session))
    session.install()
    _ACTIVE.append(session)
    return get_logger()


def get_logger(name: str = LOGGER) -> structlog.stdlib.BoundLogger:
    """A structlog logger over the standard logger of that name."""
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
    )
    return cast("structlog.stdlib.BoundLogger", logger)


def set_step(step: int | None) -> None:
    """The step that events belong to from now on."""
    for session in _ACTIVE:
        session.step = step


def close_logging() -> None:
    """Take the handlers away and leave the standard loggers as they were; safe to call twice."""
    while _ACTIVE:
        _ACTIVE.pop().remove()


class _Session:
    """The handlers of one set-up, the step that they report, and what they replaced."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.handlers: list[logging.Handler] = []
        self._level_before = logging.NOTSET

    def install(self) -> None:
        own = logging.getLogger(LOGGER)
        self._level_before = own.level
        own.setLevel(logging.INFO)
        for handler in self.handlers:
            logging.getLogger().addHandler(handler)
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").addFilter(_is_for_users)
        _adopt_transformers(adopt=True)

    def remove(self) -> None:
        for handler in self.handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()
        logging.getLogger(LOGGER).setLevel(self._level_before)
        logging.captureWarnings(False)
        logging.getLogger("py.warnings").removeFilter(_is_for_users)
        _adopt_transformers(adopt=False)


_ACTIVE: list[_Session] = []
"""The set-up in force, if there is one."""


def _is_for_users(warning: logging.LogRecord) -> bool:
    """False for what Python says of the code of libraries while it compiles it: nobody who reads a run's warnings can fix that."""
    return "SyntaxWarning: " not in warning.getMessage()


def _adopt_transformers(*, adopt: bool) -> None:
    """Let transformers' records reach our handlers in place of its own stderr handler, or undo that."""
    from transformers.utils import logging as transformers_logging

    if adopt:
        transformers_logging.disable_default_handler()
        transformers_logging.enable_propagation()
    else:
        transformers_logging.enable_default_handler()
        transformers_logging.disable_propagation()


def _event(record: logging.LogRecord, step: int | None) -> dict[str, Any]:
    """A record as an event, whether structlog or a library made it; `error` and `exception` where it has one."""
    fields = dict(record.msg) if isinstance(record.msg, dict) else {"event": record.getMessage()}
    raised = fields.pop("exc_info", None) or record.exc_info
    event = {
        "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "event": str(fields.pop("event", "")).strip(),
        "step": fields.pop("step", step),
        "logger": record.name,
        **fields,
    }
    if raised:
        error = raised if isinstance(raised, BaseException) else sys.exception()
        if isinstance(raised, tuple):
            error = raised[1]
        if error is not None:
            event["error"] = f"{type(error).__name__}: {error}"
            event["exception"] = "".join(traceback.format_exception(error))
    return event


class _EventsHandler(logging.Handler):
    """Appends each record to a file of JSON lines."""

    def __init__(self, path: Path, session: _Session) -> None:
        super().__init__()
        self._path = path
        self._session = session

    def emit(self, record: logging.LogRecord) -> None:
        try:
            append_rows(self._path, [_event(record, self._session.step)])
        except FileNotFoundError:
            pass  # the run directory was given back before the log was closed
        except OSError:
            self.handleError(record)


class _PeopleHandler(logging.Handler):
    """Writes a warning or an error as a line for a person: level, event, fields."""

    _STYLES: ClassVar[dict[str, str]] = {"warning": "yellow"}
    _LEFT_OUT = frozenset({"timestamp", "level", "event", "logger", "exception", "error"})

    def __init__(self, session: _Session) -> None:
        super().__init__(logging.WARNING)
        self._session = session

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self._render(_event(record, self._session.step)))
            sys.stderr.flush()
        except OSError:
            self.handleError(record)

    def _render(self, event: dict[str, Any]) -> str:
        line = Text(f"{event['level']}: ", style=self._STYLES.get(event["level"], "bold red"))
        line.append(visible(event["event"]), style="default not bold")
        further = "".join(
            f"  {name}={value}"
            for name, value in event.items()
            if name not in self._LEFT_OUT and value is not None
        )
        line.append(visible(further), style="dim default not bold")
        if error := event.get("error"):
            line.append(visible(f"\n  {error}"), style="default not bold")
        # Written through sys.stderr, not by rich itself: a live display replaces sys.stderr to stay whole.
        console = Console(stderr=True)
        with console.capture() as capture:
            console.print(line, soft_wrap=True, highlight=False)
        return capture.get()
