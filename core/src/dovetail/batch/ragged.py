"""Ragged: N rows of different lengths, packed end to end. There is no padding.

Legend: N rows, T values in all rows together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dovetail.errors import ColumnError

PLAIN_KINDS = "biuf"
"""Values of `dtype.kind` that a column may have, one character each: bool, signed and unsigned integer, float."""


class Ragged:
    """N rows of values, packed: row i is `values[offsets[i]:offsets[i + 1]]`.

    Rows and contiguous slices are views. Treat the arrays as read-only: other batches share them.

    Attributes:
        values: [T] (or [T, …]), bool, integer or float.
        offsets: int64 [N + 1], from 0 to T, never falling.
    """

    __slots__ = ("__weakref__", "offsets", "values")

    values: np.ndarray
    offsets: np.ndarray

    def __init__(self, values: np.ndarray, offsets: np.ndarray) -> None:
        """Check and keep both arrays, without copying.

        Raises:
            ColumnError: the arrays do not fit each other, or the dtype of the values is not bool, integer or float.
        """
        self.values = plain_array(values, "a ragged column's values")
        self.offsets = _checked_offsets(offsets, len(self.values))

    @classmethod
    def from_list(
        cls, rows: Iterable[Any], dtype: Any = None, *, inner: tuple[int, ...] | None = None
    ) -> Ragged:
        """Pack rows of numbers, or of values of one shape, given as sequences or arrays.

        Args:
            rows: N rows, some of which may be empty.
            dtype: the dtype of the values; by default NumPy's choice for the rows' values.
            inner: shape of one value; by default inferred from the non-empty rows.

        Raises:
            ColumnError: a row is not a sequence of numbers or equally shaped values, value shapes differ between rows, or no dtype can be
                inferred.
        """
        kept = list(rows)
        arrays = [_row_array(row, number, dtype) for number, row in enumerate(kept)]
        arrays = _of_one_shape(arrays, inner)
        offsets = offsets_of(np.fromiter((len(row) for row in arrays), np.int64, len(arrays)))
        # An empty Python list has no dtype of its own: NumPy would make the whole column float64.
        typed = [
            array
            for row, array in zip(kept, arrays, strict=True)
            if len(array) or isinstance(row, np.ndarray)
        ]
        if typed:
            return cls(np.concatenate(typed, dtype=dtype), offsets)
        if dtype is None:
            raise ColumnError(
                f"the dtype of a ragged column can't be inferred from {len(arrays)} empty rows",
                hint="pass dtype= to Ragged.from_list",
            )
        return cls(np.empty((0, *(inner or ())), dtype), offsets)

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of all parts, one part after another.

        Raises:
            ColumnError: there is no part, or the parts differ in dtype or trailing shape.
        """
        if not parts:
            raise ColumnError("no ragged columns were given to concatenate; expected at least one")
        if len(parts) == 1:
            return parts[0]
        found = {(part.dtype, part.inner) for part in parts}
        if len(found) > 1:
            raise ColumnError(
                f"ragged columns of different dtypes or inner shapes can't be concatenated: {kinds(found)}"
            )
        lengths_N = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate([part.values for part in parts]), offsets_of(lengths_N))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Return row `row` as a view; a negative index counts from the end."""
        count = len(self)
        if not -count <= row < count:
            raise IndexError(f"row {row} is out of range for a ragged column with {count} rows")
        row %= count
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {self.total} values, {kinds([(self.dtype, self.inner)])})"

    def __getstate__(self) -> tuple[np.ndarray, np.ndarray]:
        return (self.values, self.offsets)

    def __setstate__(self, state: tuple[np.ndarray, np.ndarray]) -> None:
        self.values, self.offsets = state

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of one value; () for numbers."""
        return self.values.shape[1:]

    @property
    def total(self) -> int:
        """T: the number of values in all rows together."""
        return int(self.offsets[-1])

    @property
    def fetched(self) -> bool:
        """Whether all values are in this process; else the first read fetches them from another process."""
        return True

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return self.total * math.prod(self.inner) * self.dtype.itemsize

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N]: the number of values in each row."""
        return np.diff(self.offsets)

    @property
    def row_index(self) -> np.ndarray:
        """int64 [T]: the index of the row that contains each value."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)

    def sum(self) -> np.ndarray:
        """Return float64 [N] (or [N, …]): the sum of each row's values, 0 for an empty one."""
        weights_T = self.values.astype(np.float64, copy=False)
        if self.inner:
            sums = np.zeros((len(self), *self.inner))
            np.add.at(sums, self.row_index, weights_T)
            return sums
        sums_N = np.bincount(self.row_index, weights=weights_T, minlength=len(self))
        return sums_N.astype(np.float64, copy=False)  # bincount of no values gives integers

    def finite(self) -> bool:
        """Return whether every value is finite, masked values included."""
        return self.dtype.kind != "f" or bool(np.isfinite(self.values).all())

    def finite_T(self) -> np.ndarray:
        """Return whether each value is finite, bool [T]; a value of several numbers is finite if all of them are."""
        return np.isfinite(self.values).all(axis=tuple(range(1, self.values.ndim)))

    def read_only(self) -> Ragged:
        """Return the same rows with read-only values [T, …]."""
        view = self.values.view()
        view.flags.writeable = False
        return Ragged(view, self.offsets)

    def to_list(self) -> list[list[Any]]:
        """Return the rows as lists of Python numbers, nested if a value has several numbers."""
        return [row.tolist() for row in self]

    def with_values(self, values: np.ndarray) -> Ragged:
        """Return a column with the same row lengths and these values, [T] or [T, …]."""
        return Ragged(values, self.offsets)

    def take(self, indices: np.ndarray) -> Ragged:
        """Return the rows at these indices, in the order given; an index may repeat. Contiguous rows are views.

        Args:
            indices: integers [M], negative ones counting from the end, or a bool mask [N].
        """
        index_M = normal_indices(indices, len(self))
        run = contiguous_run(index_M)
        if run is not None:
            return self.slice(*run)
        lengths_M = self.lengths[index_M]
        offsets = offsets_of(lengths_M)
        shift_M = self.offsets[index_M] - offsets[:-1]
        position_T = np.arange(offsets[-1]) + np.repeat(shift_M, lengths_M)
        return Ragged(self.values[position_T], offsets)

    def slice(self, start: int, stop: int) -> Ragged:
        """Return the rows from `start` up to, but not including, `stop`; their values [M, …] are a view."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        first = self.offsets[start]
        return Ragged(
            self.values[first : self.offsets[stop]], self.offsets[start : stop + 1] - first
        )

    def repeat(self, times: int) -> Ragged:
        """Return each of the N rows `times` times, the copies next to each other: rows [N · times]."""
        return self.take(np.repeat(np.arange(len(self)), times))

    def equals(self, other: object) -> bool:
        """Compare the rows' lengths, values and dtype; NaN equals NaN."""
        return (
            isinstance(other, Ragged)
            and np.array_equal(self.offsets, other.offsets)
            and same_array(self.values, other.values)
        )


def plain_array(values: object, what: str) -> np.ndarray:
    """Check that `values` is an array [N, …] of bool, integer or float, and return the array. `what` names the values in the error.

    Raises:
        ColumnError: `values` is not such an array.
    """
    if not isinstance(values, np.ndarray):
        raise ColumnError(
            f"{what} must be a NumPy array, not {type(values).__name__}",
            hint="a batch holds NumPy only: turn tensors into arrays with .numpy()",
        )
    if values.dtype.kind not in PLAIN_KINDS:
        raise ColumnError(
            f"{what} can't have dtype {values.dtype}; expected bool, integers or floats",
            hint="put anything else into an object column: a list of N JSON values",
        )
    if values.ndim == 0:
        raise ColumnError(f"{what} must have at least one dimension, but is the scalar {values}")
    return values


def normal_indices(indices: object, count: int) -> np.ndarray:
    """Convert integers [M], negative ones counting from the end, or a bool mask [count] to int64 indices [M] from 0 to count − 1.

    Raises:
        ColumnError: an index is out of range, or a mask has the wrong length.
    """
    index = np.asarray(indices)
    if index.dtype == np.bool_:
        if index.shape != (count,):
            raise ColumnError(
                f"a mask of shape {index.shape} can't select from {count} rows; expected shape ({count},)"
            )
        return np.flatnonzero(index)
    if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
        raise ColumnError(
            f"indices must be an integer array [M], not one of dtype {index.dtype} of shape {index.shape}"
        )
    index = index.astype(np.int64, copy=False)
    if index.size and (index.min() < -count or index.max() >= count):
        worst = index.max() if index.max() >= count else index.min()
        raise ColumnError(f"index {worst} is out of range for {count} rows")
    return np.where(index < 0, index + count, index) if index.size else index


def contiguous_run(index_M: np.ndarray) -> tuple[int, int] | None:
    """Return (start, stop) if the indices are start, start + 1, …, stop − 1; None if they are not, or if there is no index."""
    if index_M.size and np.array_equal(
        index_M, np.arange(index_M[0], index_M[0] + index_M.size, dtype=np.int64)
    ):
        return int(index_M[0]), int(index_M[0]) + index_M.size
    return None


def same_array(one: np.ndarray, other: np.ndarray) -> bool:
    """Compare dtype, shape and values; NaN equals NaN."""
    return one.dtype == other.dtype and np.array_equal(
        one, other, equal_nan=one.dtype.kind == "f" and other.dtype.kind == "f"
    )


def _row_array(row: Any, number: int, dtype: Any) -> np.ndarray:
    try:
        array = np.asarray(row, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise ColumnError(
            f"row {number} of a ragged column is not a row of numbers: {error}"
        ) from error
    if array.ndim == 0:
        raise ColumnError(f"row {number} of a ragged column is the scalar {array}, not a sequence")
    return array


def _of_one_shape(arrays: list[np.ndarray], inner: tuple[int, ...] | None) -> list[np.ndarray]:
    """Check that the values of all rows have one shape, `inner` if it is given; return the rows, with empty ones reshaped to fit."""
    shape = inner
    for number, array in enumerate(arrays):
        if len(array):
            shape = array.shape[1:] if shape is None else shape
            if array.shape[1:] != shape:
                raise ColumnError(
                    f"row {number} of a ragged column has values of shape {list(array.shape[1:])}; expected {list(shape)}",
                    hint="give all rows of the column values of the same shape",
                )
    return [array if len(array) else array.reshape(0, *(shape or ())) for array in arrays]


def offsets_of(lengths_N: np.ndarray) -> np.ndarray:
    """Convert lengths [N] to int64 offsets [N + 1]."""
    offsets = np.zeros(len(lengths_N) + 1, np.int64)
    np.cumsum(lengths_N, out=offsets[1:])
    return offsets


def _checked_offsets(offsets: object, total: int) -> np.ndarray:
    given = np.asarray(offsets)
    if given.ndim != 1 or not len(given) or given.dtype.kind not in "iu":
        raise ColumnError(
            f"offsets must be an integer array [N + 1], not one of dtype {given.dtype} and shape {given.shape}"
        )
    checked: np.ndarray = given.astype(np.int64, copy=False)
    falls = bool(np.any(checked[1:] < checked[:-1]))
    if checked[0] != 0 or checked[-1] != total or falls:
        raise ColumnError(
            f"offsets must rise from 0 to {total}, the number of values, but go from {checked[0]} to {checked[-1]}"
            + (" and fall in between" if falls else "")
        )
    return checked


def kinds(found: Iterable[tuple[np.dtype[Any], tuple[int, ...]]]) -> str:
    """Describe the values of several columns, each given as (dtype, shape of one value), as text such as `float32[3], int64`."""
    return ", ".join(sorted(f"{dtype}{list(shape) if shape else ''}" for dtype, shape in found))
