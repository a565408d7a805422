"""Rows of a dataset source, each with its index in the dataset and its location in a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, NamedTuple

import attrs
import numpy as np

from dovetail.errors import DataError, PluginBrokenError
from dovetail.interfaces import BadRow, DatasetSource, PlacedRow, RowGroups
from dovetail.plugins import called, title_of


class NumberedRow(NamedTuple):
    """A row of a dataset, with its index in the dataset (`number`)."""

    number: int
    columns: Mapping[str, Any] | DataError
    """The row's values by column, or the error if it can't be read."""
    where: str
    """The row's file and number, for messages."""
    folder: str | None
    """The folder to which relative paths in the row refer; None for rows that are in no file."""


@attrs.frozen(kw_only=True)
class FileRows:
    """All rows of one file, or the first ones."""

    path: str
    rows: Sequence[Mapping[str, Any]]

    @property
    def columns(self) -> list[str]:
        """Columns in order of first appearance."""
        return list(dict.fromkeys(key for row in self.rows for key in row))


def check_bad_rows(row: BadRow, count: int, most: int) -> None:
    """Refuse a dataset with more bad rows than allowed.

    Args:
        row: the last bad row, for the error.
        count: the number of bad rows.
        most: the limit (`data.max_bad_rows`).

    Raises:
        DataError: more than `most` rows are bad.
    """
    if count > most:
        many = (
            f" ({count:,} rows are bad so far, more than data.max_bad_rows={most:,} allows)"
            if most
            else ""
        )
        raise DataError(row.message + many, hint=row.hint)


class CheckedGroups(RowGroups):
    """The groups of rows that a dataset source yields, checked against the interface as they are read.

    Args:
        source: the dataset source.
        paths: the paths of its files.

    Raises:
        DataError: there are no rows; for further errors see `DatasetSource.read`.
        PluginBrokenError: the source raised an error of its own, or yielded something other than rows; the message names the source
            and its version.
    """

    def __init__(self, source: DatasetSource, paths: Sequence[str]) -> None:
        self._title = partial(title_of, "dataset", source)
        groups = called(self._title, source.stream, paths)
        if not isinstance(groups, RowGroups):
            raise self._broken(
                f"`stream` returned {type(groups).__name__}; expected RowGroups",
                "return RowGroups, or remove `stream`: the default one yields all rows of `read`",
            )
        self._groups = groups
        self._sizes: tuple[int, ...] = called(self._title, lambda: (*map(index, groups.sizes),))
        if not self._sizes:
            raise DataError(
                f"there are no rows in {', '.join(paths)}", hint="name files that contain rows"
            )
        if min(self._sizes) < 1:
            raise self._broken(
                "a group in `sizes` has no row; expected at least 1",
                "leave empty groups out of `sizes`",
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._sizes

    def read(self, group: int, start: int = 0) -> Iterator[PlacedRow]:
        rows = called(self._title, lambda: iter(self._groups.read(group, start)))
        count = start
        while (found := called(self._title, next, rows, None)) is not None:
            match found:
                case (str(), Mapping() | DataError()):
                    count += 1
                    yield found
                case (str(), row):
                    raise self._broken(
                        f"row {count} of group {group} is of type {type(row).__name__}; expected a mapping from column to value",
                        "yield each row as a mapping, such as {'prompt': …, 'reward_model': {'ground_truth': …}}",
                    )
                case _:
                    raise self._broken(
                        f"`read` yielded {found!r:.60} for row {count} of group {group}; expected a pair of location and row",
                        "yield pairs of a row's location, as text, and the row",
                    )
        if count != self._sizes[group]:
            raise self._broken(
                f"group {group} ended after {count} row(s); `sizes` says {self._sizes[group]}",
                "return in `sizes` the number of rows that `read` yields for each group",
            )

    def folder(self, group: int) -> str | None:
        found: str | None = called(self._title, self._groups.folder, group)
        return found

    def digest(self) -> str:
        return str(called(self._title, self._groups.digest))

    def _broken(self, problem: str, hint: str) -> PluginBrokenError:
        return PluginBrokenError(f"{self._title()}: {problem}", hint=hint)


def numbered(groups: RowGroups, group: int, start: int, first: int) -> Iterator[NumberedRow]:
    """Yield rows of a group, from the row `start` on.

    Args:
        groups: the groups of a dataset.
        group: the index of the group.
        start: the index in the group of the first row to yield.
        first: that row's index in the dataset.
    """
    folder = groups.folder(group)
    for number, (where, row) in enumerate(groups.read(group, start), first):
        yield NumberedRow(number, row, where, folder)


def by_file(rows: Iterable[NumberedRow], paths: Sequence[str]) -> list[FileRows]:
    """Return the readable rows of each file.

    Args:
        rows: the rows in order.
        paths: the files, for rows that do not name their file.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        file = found.setdefault(row.where.rpartition(", ")[0] or ", ".join(paths), [])
        if not isinstance(row.columns, DataError):
            file.append(row.columns)
    return [FileRows(path=path, rows=own) for path, own in found.items() if own]


def unfilled(value: Any) -> Any:
    """Return a value of an Arrow table as plain containers, without the keys that Arrow filled in.

    Arrow's structs have the keys of all rows, with nulls (NaN in pandas) for keys that a row lacks. A row's own nulls can't be
    distinguished from them and are removed too.
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
    """Return whether a value is NaN, which pandas writes for a missing value."""
    return isinstance(value, float) and math.isnan(value)
