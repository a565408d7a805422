"""Batch: N samples as named columns. Dense columns are arrays [N], ragged ones packed, objects lists of N.

Batches share their arrays: every method returns a new batch and changes nothing. Ragged columns of a selection
are gathered when their values are first read, and a column may lie in another process's store until then (`rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from dovetail.batch.ragged import Ragged, contiguous_run, normal_indices, plain_array, same_array
from dovetail.batch.rows import RaggedRows
from dovetail.errors import ColumnError, nearest

Values = np.ndarray | Ragged | list[Any]
"""The values of a column: a dense array [N, …], a ragged column, or a list of N JSON values."""


class Batch:
    """N samples as named columns.

    Pickle protocol 5 sends the arrays out of band, without a copy.
    """

    __slots__ = ("_columns", "_length")

    def __init__(self, columns: Mapping[str, Values], *, length: int | None = None) -> None:
        """Check and keep the columns, without copying.

        Args:
            columns: name to dense array [N, …], Ragged with N rows, or list of N JSON values.
            length: N, for a batch without columns.

        Raises:
            ColumnError: the columns differ in length, or one has an unknown type or dtype.
        """
        self._columns = {name: _checked(name, values) for name, values in columns.items()}
        self._length = _common_length(self._columns, length)

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """Return the samples of all batches, one batch after another.

        Raises:
            ColumnError: there is no batch, or the batches differ in a column's name, dtype, or kind (dense, ragged or object).
        """
        if not batches:
            raise ColumnError("no batches were given to concatenate; expected at least one")
        if len(batches) == 1:
            return batches[0]
        _check_same_names(batches)
        columns = {
            name: _concat(name, [batch[name] for batch in batches]) for name in batches[0].names
        }
        return cls(columns, length=sum(map(len, batches)))

    def __len__(self) -> int:
        return self._length

    # Without this, iteration would call `__getitem__` with 0, 1, …: iterate over `names` or `columns`.
    __iter__ = None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Any:
        """Return the column of this name: an array, a Ragged or a list.

        Raises:
            ColumnError: there is no such column; the error names the nearest.
        """
        if name not in self._columns:
            raise ColumnError(
                f"the batch has no column {name!r}; it has {self._known()}",
                hint=_did_you_mean([name], self._columns),
            )
        return self._columns[name]

    def __repr__(self) -> str:
        columns = ", ".join(f"{name}: {_kind(values)}" for name, values in self._columns.items())
        return f"Batch({self._length} samples; {columns})"

    @property
    def columns(self) -> Mapping[str, Any]:
        """All columns by name, read-only."""
        return MappingProxyType(self._columns)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(self._columns)

    def select(self, names: Iterable[str]) -> Batch:
        """Return the batch with only these columns, in this order."""
        return Batch({name: self[name] for name in names}, length=self._length)

    def drop(self, names: Iterable[str]) -> Batch:
        """Return the batch without these columns; absent ones are ignored."""
        gone = set(names)
        kept = {name: values for name, values in self._columns.items() if name not in gone}
        return Batch(kept, length=self._length)

    def with_columns(self, columns: Mapping[str, Values]) -> Batch:
        """Return a new batch with these columns besides the existing ones; existing columns of the same names are replaced."""
        return Batch({**self._columns, **columns}, length=self._length)

    def require(self, names: Iterable[str], who: str) -> None:
        """Check that the batch has these columns. In the error, `who` is the name of the stage or plugin that needs them.

        Raises:
            ColumnError: columns are missing; the error also names the existing columns.
        """
        missing = [name for name in names if name not in self._columns]
        if missing:
            raise ColumnError(
                f"{who} needs {', '.join(map(repr, missing))}, which the batch lacks; it has {self._known()}",
                hint=_did_you_mean(missing, self._columns),
            )

    def take(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """Return the samples at these indices, in the order given; an index may repeat.

        Contiguous samples are views; otherwise ragged rows are copied on first read.

        Args:
            indices: integers [M], negative ones counting from the end, or a bool mask [N].
        """
        index_M = normal_indices(indices, self._length)
        run = contiguous_run(index_M)
        if run is not None:
            return self.slice(*run)
        columns = {name: _take(values, index_M) for name, values in self._columns.items()}
        return Batch(columns, length=len(index_M))

    def slice(self, start: int, stop: int) -> Batch:
        """Return the samples from `start` up to, but not including, `stop`; arrays are views."""
        start, stop, _ = slice(start, stop).indices(self._length)
        stop = max(start, stop)
        if (start, stop) == (0, self._length):
            return self
        columns = {name: _slice(values, start, stop) for name, values in self._columns.items()}
        return Batch(columns, length=stop - start)

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Return consecutive batches of these sizes, as views.

        Raises:
            ColumnError: the sizes do not add up to N, or one is negative.
        """
        if sum(sizes) != self._length or any(size < 0 for size in sizes):
            raise ColumnError(
                f"the batch can't be split: sizes {list(sizes)} add up to {sum(sizes)}; expected sizes ≥ 0 that add up to "
                f"its {self._length} samples"
            )
        bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()
        return [self.slice(a, b) for a, b in pairwise(bounds)]

    def repeat(self, times: int) -> Batch:
        """Return each sample `times` times, the copies next to each other."""
        return self.take(np.repeat(np.arange(self._length), times))

    def read_only(self) -> Batch:
        """Return the same samples in read-only arrays, without a copy."""
        columns = {name: _read_only(values) for name, values in self._columns.items()}
        return Batch(columns, length=self._length)

    def equals(self, other: object) -> bool:
        """Compare column names (in any order), dtypes and values; NaN equals NaN."""
        return (
            isinstance(other, Batch)
            and len(self) == len(other)
            and set(self.names) == set(other.names)
            and all(_same(values, other[name]) for name, values in self._columns.items())
        )

    def _known(self) -> str:
        return ", ".join(self._columns) or "no columns"


def _read_only(values: Values) -> Values:
    if isinstance(values, Ragged):
        return values.read_only()
    if isinstance(values, list):
        return values
    view = values.view()
    view.flags.writeable = False
    return view


def _checked(name: str, values: object) -> Values:
    if isinstance(values, Ragged | list):
        return values
    if isinstance(values, tuple):
        return list(values)
    return plain_array(values, f"column {name!r}")


def _common_length(columns: Mapping[str, Values], length: int | None) -> int:
    if length is None:
        length = len(next(iter(columns.values()))) if columns else 0
        first = repr(next(iter(columns))) if columns else ""
    else:
        first = "the batch"
    wrong = [f"{name!r} has {len(v)}" for name, v in columns.items() if len(v) != length]
    if wrong:
        raise ColumnError(
            f"columns of one batch must have the same length: {first} has {length}, but "
            + ", ".join(wrong)
        )
    return length


def _check_same_names(batches: Sequence[Batch]) -> None:
    first = batches[0].names
    for number, batch in enumerate(batches[1:], start=1):
        odd = set(first) ^ set(batch.names)
        if odd:
            raise ColumnError(
                f"batches 0 and {number} can't be concatenated: only one of them has "
                + ", ".join(map(repr, sorted(odd))),
                hint="select the same columns in both batches first",
            )


def _concat(name: str, parts: list[Values]) -> Values:
    kinds = {_kind(values) for values in parts}
    if len(kinds) > 1:
        raise ColumnError(
            f"column {name!r} can't be concatenated: its kinds differ between the batches: {' and '.join(sorted(kinds))}"
        )
    if isinstance(parts[0], Ragged):
        return RaggedRows.join(parts)  # type: ignore[arg-type]  # one kind, as checked above
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    return np.concatenate(parts)  # type: ignore[arg-type]  # likewise


def _take(values: Values, index_M: np.ndarray) -> Values:
    if isinstance(values, Ragged):
        return RaggedRows.of(values).take(index_M)
    if isinstance(values, list):
        return [values[i] for i in index_M.tolist()]
    return values[index_M]


def _slice(values: Values, start: int, stop: int) -> Values:
    if isinstance(values, Ragged):
        return RaggedRows.of(values).slice(start, stop)
    return values[start:stop]


def _same(one: Values, other: Values) -> bool:
    if isinstance(one, Ragged):
        return one.equals(other)
    if isinstance(one, list) or isinstance(other, Ragged | list):
        return one is other or (isinstance(other, list) and one == other)
    return same_array(one, other)


def _kind(values: Values) -> str:
    if isinstance(values, Ragged):
        return f"ragged {values.dtype}{list(values.inner) or ''}"
    if isinstance(values, list):
        return "object"
    return f"{values.dtype}{list(values.shape[1:]) or ''}"


def _did_you_mean(missing: Sequence[str], known: Iterable[str]) -> str | None:
    close = [near for name in missing if (near := nearest(name, known))]
    return f"did you mean {', '.join(map(repr, close))}?" if close else None
