"""Rows: what a dataset source has read, and where each row came from."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import attrs
import numpy as np


@attrs.frozen(kw_only=True)
class FileRows:
    """The rows of one file."""

    path: str
    rows: Sequence[Mapping[str, Any]]
    lines: Sequence[int] | None = None
    """Line of each row in a text file, counted from 1; None where rows are counted from 0."""

    @property
    def columns(self) -> list[str]:
        """Columns in order of first appearance."""
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def where(self, row: int) -> str:
        """How a message names this row."""
        if self.lines is not None:
            return f"{self.path}, line {self.lines[row]}"
        return f"{self.path}, row {row}"


class Rows(Sequence[Mapping[str, Any]]):
    """The rows of several files, in order."""

    def __init__(self, files: Sequence[FileRows]) -> None:
        self.files = tuple(files)
        self._ends = list(accumulate(len(file.rows) for file in files))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        file, row = self._find(index)
        return file.rows[row]

    def where(self, index: int) -> str:
        """File and row, for messages."""
        file, row = self._find(index)
        return file.where(row)

    def folder(self, index: int) -> str:
        """The directory of the row's file."""
        return str(Path(self._find(index)[0].path).parent)

    def _find(self, index: int) -> tuple[FileRows, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return self.files[number], index - (self._ends[number - 1] if number else 0)


def where(rows: Sequence[Mapping[str, Any]], index: int) -> str:
    """File and row where the source knows them, else the row's number."""
    return rows.where(index) if isinstance(rows, Rows) else f"row {index}"


def folder_of(rows: Sequence[Mapping[str, Any]], index: int) -> str | None:
    """The directory of the row's file where the source knows it, else None."""
    return rows.folder(index) if isinstance(rows, Rows) else None


def unfilled(value: Any) -> Any:
    """Return what a table of Arrow holds at one place, as plain containers and without the keys that it filled.

    A struct has the keys of all rows, and nulls, or in pandas NaN, where a row has no such key. A null that the row had can't be told
    from those.
    """
    if isinstance(value, Mapping):
        filled = {key: unfilled(part) for key, part in value.items()}
        return {key: part for key, part in filled.items() if part is not None and not is_nan(part)}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [unfilled(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value


def is_nan(value: object) -> bool:
    """Whether a value is NaN, which pandas has where a row lacks a value."""
    return isinstance(value, float) and math.isnan(value)
