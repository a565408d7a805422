"""Logging of a process by structlog: every event as a line of JSON in the run directory, warnings as readable lines on stderr."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import structlog
from rich.console import Console
from rich.text import Text
from structlog.typing import EventDict, ExcInfo, WrappedLogger

from dovetail.telemetry.escapes import visible
from dovetail.telemetry.jsonl import append_rows, dump_json
from dovetail.telemetry.run_directory import RunDirectory

LOGGER = "dovetail"
"""Name of the standard logger that is the parent of all of Dovetail's loggers."""

_CONTEXT: dict[str, Any] = {}
"""Fields of every event of this process. They are not contextvars, which are absent in threads started by libraries."""
_UNDO = ExitStack()
"""Callbacks that undo the current set-up of logging."""


def setup_logging(run_directory: str | os.PathLike[str]) -> structlog.stdlib.BoundLogger:
    """Configure logging of Dovetail and of the libraries that it uses.

    Dovetail's own events from `info` on, and other libraries' warnings, go to `events.jsonl` as `{"event", "level", "logger", "timestamp",
    "run", "step", …}`, with `role` and `rank` during a worker's call. Warnings and errors also go to stderr, one readable line each, above
    a live progress display if there is one. Python warnings are logged as `py.warnings`. Setting up again replaces the former set-up.

    Args:
        run_directory: the directory of `events.jsonl`.

    Returns:
        A structlog logger with the standard methods: `logger.info("checkpoint saved", path=path)`.
    """
    close_logging()
    directory = Path(run_directory)
    _CONTEXT.clear()
    bind_process(run=RunDirectory(directory).name)
    _UNDO.callback(_CONTEXT.clear)
    root, own = logging.getLogger(), logging.getLogger(LOGGER)
    _UNDO.callback(own.setLevel, own.level)
    own.setLevel(logging.INFO)
    for handler in (json_handler(directory / "events.jsonl"), _ConsoleHandler()):
        root.addHandler(handler)
        _UNDO.callback(handler.close)
        _UNDO.callback(root.removeHandler, handler)
    logging.captureWarnings(True)
    _UNDO.callback(logging.captureWarnings, False)
    python = logging.getLogger("py.warnings")
    python.addFilter(_is_for_users)
    _UNDO.callback(python.removeFilter, _is_for_users)
    return get_logger()


def close_logging() -> None:
    """Remove the handlers of `setup_logging` and restore the standard loggers; safe to call twice."""
    _UNDO.close()


def get_logger(name: str = LOGGER) -> structlog.stdlib.BoundLogger:
    """Return a structlog logger that wraps the standard logger `name`."""
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


def bind_process(**facts: Any) -> None:
    """Add facts to every later event of this process, in all threads: `bind_process(step=7)`."""
    _CONTEXT.update(facts)


def process_context() -> dict[str, Any]:
    """Return the facts bound to this process, for `bind_process` in another process."""
    return dict(_CONTEXT)


def bound_logs(directory: Path, most: int) -> None:
    """Limit each log file below `logs/` of a run directory to `most` bytes; 0 means no limit.

    The last `most` bytes of a longer file are moved to FILE.1, and the file is emptied.

    Processes append to their files (`O_APPEND`), so that they continue at the new end. Lines written during the move are lost.
    """
    for file in (directory / "logs").glob("*") if most else ():
        with suppress(OSError):  # another process may have removed the file
            size = file.stat().st_size
            if size <= most or file.suffix == ".1" or not file.is_file():
                continue
            with file.open("rb+") as written:
                written.seek(size - most)
                file.with_name(f"{file.name}.1").write_bytes(written.read(most))
                written.truncate(0)


def json_handler(path: Path) -> logging.Handler:
    """Return a handler that appends every record, structlog's or a library's, to a file of JSON lines."""
    append_rows(path, [])  # creates the file, or cuts off a killed process's unfinished line
    handler = _EventFile(path, encoding="utf-8")
    handler.setFormatter(json_formatter())
    return handler


def json_formatter() -> logging.Formatter:
    """Return a formatter that writes a record as a line of JSON, with the facts bound by `bind_process`."""
    return _formatter(
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(serializer=lambda event, **_: dump_json(event)),
    )


def _formatter(*processors: Any) -> logging.Formatter:
    """Return a formatter that ends with these processors; the last one renders the event."""
    return structlog.stdlib.ProcessorFormatter(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.contextvars.merge_contextvars,
            _complete,
            *processors[:-1],
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            processors[-1],
        ]
    )


def _complete(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Add the fields of the process, and strip the message, because Python's warnings end with a newline."""
    # Role and rank get a fixed place: structlog's order of contextvars differs between processes.
    worker = {name: event[name] for name in ("role", "rank") if name in event}
    return {**_CONTEXT, **worker, **event, "event": str(event.get("event", "")).strip()}


class _EventFile(logging.FileHandler):
    """File handler that reports only its first failure, such as a full disk, on stderr: a failing log must not end a run."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            why = error.strerror or error
            sys.stderr.write(
                f"warning: the log {self.baseFilename} can't be written: {why}; events are missing from it\n"
            )

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _ConsoleHandler(logging.StreamHandler[Any]):
    """Handler that writes warnings and errors to the current `sys.stderr`, which a live display replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.setFormatter(_formatter(structlog.processors.ExceptionRenderer(_name_error), _words))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _name_error(exc_info: ExcInfo) -> str:
    """Render an exception as `Type: message`, without the traceback, which `events.jsonl` contains."""
    return f"{exc_info[0].__name__}: {exc_info[1]}"


def _words(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """Render an event for the terminal: `warning: message  step=7  name=value`, and its error on the next line."""
    level, message, _ = (event.pop(name, None) for name in ("level", "event", "run"))
    below = [event.pop(name) for name in ("error", "exception") if name in event]
    fields = "".join(f"  {name}={value}" for name, value in event.items() if value is not None)
    line = Text(f"{level}: ", style="yellow" if level == "warning" else "bold red")
    line.append(visible(message), style="default not bold")
    line.append(visible(fields), style="dim default not bold")
    line.append(visible("".join(f"\n  {text}" for text in below)), style="default not bold")
    console = Console(stderr=True)
    with console.capture() as capture:
        console.print(line, soft_wrap=True, highlight=False, end="")
    return capture.get()


def _is_for_users(warning: logging.LogRecord) -> bool:
    """Return whether to log a Python warning: not a SyntaxWarning, which concerns library code that a user of a run can't change."""
    return "SyntaxWarning: " not in warning.getMessage()
