"""JSON lines on disk, readable even if a killed run left the last line incomplete; and the tracker `jsonl`."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import time
from typing import Any

from dovetail.interfaces.plugin import PluginConfig, PluginContext
from dovetail.interfaces.tracker import Tracker

_LOGGER = logging.getLogger("dovetail.telemetry")
_ESCAPED = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029, *range(0xD800, 0xE000))}
"""Escapes of line breaks that JSON allows in strings, and of surrogates, which UTF-8 can't encode."""
_LEVELS = 100
"""Maximum nesting of containers that is written; deeper ones become `…`. It is below Python's recursion limit."""
_BITS = 10_000
"""Maximum bits of an integer that is written as a number: Python neither prints nor parses longer ones in decimal."""


def plain(value: object, level: int = 0) -> Any:
    """Return the value in JSON types: NaN and infinity become null, arrays become lists, other objects their text, deep nesting `…`."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _BITS else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if level == _LEVELS:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): plain(item, level + 1) for key, item in value.items()}
    if hasattr(value, "tolist"):  # NumPy scalars and arrays, without importing NumPy
        return plain(value.tolist(), level + 1)
    if isinstance(value, Iterable):
        return [plain(item, level + 1) for item in value]
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - a user's own __str__ may raise anything
        return f"<no text: {type(error).__name__}>"


def dump_json(value: object, indent: int | None = None) -> str:
    """Return a value as JSON text that UTF-8 can always encode, in one line unless `indent` is given."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=False).translate(_ESCAPED)


def dump_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as lines of JSON."""
    return "".join(dump_json(row) + "\n" for row in rows)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append one line for each row, and flush the file.

    An unfinished line of a killed process is cut off first. Only one process at a time may write a file.
    """
    with path.open("ab+") as file:
        _cut_torn_line(file)
        file.write(dump_rows(rows).encode())


def _cut_torn_line(file: Any) -> None:
    """Truncate an open file after its last newline."""
    end = file.seek(0, os.SEEK_END)
    keep = end
    while keep:
        start = max(0, keep - 4096)
        file.seek(start)
        newline = file.read(keep - start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep != end:
        file.truncate(keep)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return every row of a file of JSON lines; empty if the file is absent.

    A torn last line, which a killed run leaves, is skipped; any other unreadable line is skipped with a warning.
    """
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number < len(lines):
                _LOGGER.warning("%s: line %d is not JSON and was skipped", path, number)
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def step_of(row: Mapping[str, Any]) -> float:
    """Return the step of a row of metrics; infinity if the row is damaged."""
    step = row.get("step", 0)
    return step if isinstance(step, int | float) else math.inf


def keep_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Remove the rows for which `keep` is false, replacing the file in one rename; return the number of removed rows."""
    rows = read_rows(path)
    kept = [row for row in rows if keep(row)]
    if path.exists():
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        append_rows(temporary, kept)
        temporary.replace(path)
    return len(rows) - len(kept)


class JsonlTracker(Tracker):
    """Writes `metrics.jsonl`: a JSON object for each log call, `{"step", "time", metrics…}`, on disk when the call returns.

    `time` is in seconds since 1970. NaN and infinite values are written as null. Training and validation may log the same step: readers
    merge the lines of one step.
    """

    name = "jsonl"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._directory = context.run_directory

    def metrics_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._directory is not None:
            row = {"step": step, "time": round(time(), 3), **metrics}
            append_rows(self._directory / "metrics.jsonl", [row])
