"""Makes an error of Dovetail from an engine's exception and output, if the engine did not start or has died."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import DovetailError, RolloutError

_TAIL_BYTES = 64 * 1024
_SHOWN_LINES = 25


@attrs.frozen
class Known:
    """A cause of failure that can be recognised in an engine's exception or output."""

    pattern: str
    """A regular expression, searched for in the text of the exception and the output. Each run of white space in this text is
    reduced to one blank before the search.
    """
    error: type[DovetailError]
    """The type of the error that is raised for this cause."""
    message: str
    """The error's message as a format string: `{name}` is a group of the pattern, `{config.key}` a setting of the rollout."""
    hint: str
    """The error's hint, a format string like `message`."""

    def found_in(self, text: str, config: Any) -> DovetailError | None:
        """Return the error for this cause of failure; None if the text does not match the pattern.

        Args:
            text: the text of the exception and of the engine's output.
            config: the rollout's config, for the placeholders of `message` and `hint`.
        """
        found = re.search(self.pattern, text)
        if found is None:
            return None
        groups = {**found.groupdict(), "config": config}
        return self.error(self.message.format(**groups), hint=self.hint.format(**groups))


@attrs.frozen
class Failures:
    """Turns an engine's exceptions and output into errors. If the cause of a failure is known, the error states it, with the fix."""

    engine: str
    """The engine's name in messages."""
    marks: re.Pattern[str]
    """A regular expression of the prefix of output lines, such as a timestamp; errors show the lines without it."""
    known: tuple[Known, ...] = ()
    """Known causes of failure, tried in this order."""

    def tail_of(self, log: Path | None, lines: int = _SHOWN_LINES) -> str:
        """Return the last lines of the engine's log, without prefixes such as timestamps (`marks`); empty if there is no log."""
        return "\n".join(self._text(log).splitlines()[-lines:])

    def start(self, error: BaseException, log: Path | None, config: Any) -> DovetailError:
        """Return the error for an engine or a server that did not start.

        Args:
            error: the exception raised in this process, which often only reports that another process of the engine failed.
            log: the log file of the engine's processes.
            config: the rollout's config.
        """
        if isinstance(error, DovetailError):
            return error
        message = " ".join(f"{error}\n{self._text(log)}".split())
        for cause in self.known:
            if (known := cause.found_in(message, config)) is not None:
                return known
        return RolloutError(
            f"{self.engine} did not start: {type(error).__name__}: {error}{self._end_of(log)}",
            hint="fix the first error in the engine's output: it is the cause of the others",
        )

    def death(self, error: BaseException | str, log: Path | None) -> RolloutError:
        """Return the error for an engine or a server that died after its start.

        Args:
            error: the exception raised in this process, or a text that says how the engine died.
            log: the log file of the engine's processes.
        """
        return RolloutError(
            f"{self.engine} has died: {error}{self._end_of(log)}",
            hint="the run restarts the engine, up to rollout.max_restarts times in a row",
        )

    def _end_of(self, log: Path | None) -> str:
        printed = self.tail_of(log)
        return f"\nThe end of {log}:\n{printed}" if printed else ""

    def _text(self, log: Path | None) -> str:
        if log is None or not log.is_file():
            return ""
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            found = file.read().decode("utf-8", "replace")
        return "\n".join(self._bare(line) for line in found.splitlines())

    def _bare(self, line: str) -> str:
        while True:
            shorter = self.marks.sub("", line, count=1)
            if shorter == line:
                return line.rstrip()
            line = shorter
