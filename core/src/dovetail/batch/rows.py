"""RaggedRows: rows selected from other columns, local or in a store, gathered when their values are read.

Selecting, reordering and joining rows only computes the positions of the rows in those other columns, and copies no values.
Legend: N rows, T values in all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from dovetail.batch.ragged import Ragged, contiguous_run, kinds, normal_indices, offsets_of
from dovetail.batch.remote import StoredArray, fetch
from dovetail.errors import ColumnError

SHORT = 64
"""Threshold in values: if runs of contiguous rows are shorter on average, values are gathered one by one instead of run by run."""

Source = Ragged | StoredArray
"""Storage of rows: a plain column of this process, or an array in a store."""


class RaggedRows(Ragged):
    """A ragged column whose rows lie in other columns (`sources`). The first access to `values` gathers the values and keeps them;
    `offsets` and `dtype` are known without it.

    If all rows are contiguous in one source, `values` is a view of it. Every method of Ragged works; a method that needs the values
    reads them. Pickling sends a plain Ragged.

    Attributes:
        sources: the plain columns and stored arrays that contain the rows.
        source_N: int64 [N], the source of each row.
        start_N: int64 [N], the index of each row's first value in its source.
    """

    __slots__ = ("_dtype", "_inner", "_locked", "source_N", "sources", "start_N")

    def __init__(
        self,
        sources: Sequence[Source],
        source_N: np.ndarray,
        start_N: np.ndarray,
        offsets: np.ndarray,
        *,
        dtype: np.dtype[Any],
        inner: tuple[int, ...] = (),
        locked: bool = False,
    ) -> None:
        """Describe the rows, unchecked: the rows must lie within their sources, and the sources must fit `dtype` and `inner`.

        Args:
            sources: the attribute of the same name.
            source_N: the attribute of the same name.
            start_N: the attribute of the same name.
            offsets: int64 [N + 1], as in Ragged.
            dtype: the dtype of the values.
            inner: shape of one value.
            locked: whether the gathered values are read-only.
        """
        # `values` stays unset: reading an unset slot calls `__getattr__`, which gathers the values.
        self.sources = tuple(sources)
        self.source_N = source_N
        self.start_N = start_N
        self.offsets = offsets
        self._dtype = dtype
        self._inner = inner
        self._locked = locked

    @classmethod
    def of(cls, column: Ragged) -> RaggedRows:
        """Return all N rows of a column with values [T, …]; nothing is copied."""
        if isinstance(column, RaggedRows):
            return column
        return cls(
            (column,),
            np.zeros(len(column), np.int64),
            column.offsets[:-1],
            column.offsets,
            dtype=column.dtype,
            inner=column.inner,
        )

    @classmethod
    def stored(cls, source: StoredArray, offsets: np.ndarray) -> RaggedRows:
        """Return the N rows of a stored array [T, …]; row i is source[offsets[i] : offsets[i + 1]], with offsets int64 [N + 1]."""
        count = len(offsets) - 1
        return cls(
            (source,),
            np.zeros(count, np.int64),
            offsets[:-1],
            offsets,
            dtype=source.dtype,
            inner=source.inner,
        )

    @classmethod
    def join(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of all parts, one part after another; if a part is a RaggedRows, values are not read.

        Raises:
            ColumnError: there is no part, or the parts differ in dtype or trailing shape.
        """
        if len(parts) < 2 or not any(isinstance(part, RaggedRows) for part in parts):
            return Ragged.concat(parts)
        found = {(part.dtype, part.inner) for part in parts}
        if len(found) > 1:
            raise ColumnError(
                f"ragged columns of different dtypes or inner shapes can't be concatenated: {kinds(found)}"
            )
        rows = [cls.of(part) for part in parts]
        counts = accumulate((len(part.sources) for part in rows), initial=0)
        source_N = [part.source_N + before for part, before in zip(rows, counts, strict=False)]
        joined = cls(
            [source for part in rows for source in part.sources],
            np.concatenate(source_N),
            np.concatenate([part.start_N for part in rows]),
            offsets_of(np.concatenate([part.lengths for part in rows])),
            dtype=parts[0].dtype,
            inner=parts[0].inner,
            locked=any(part._locked for part in rows),  # noqa: SLF001 - of its own class
        )
        return joined._tidied()

    def __getattr__(self, name: str) -> Any:
        """Gather and keep the attribute `values` on its first access. Python calls this method only for attributes that are not set."""
        if name != "values":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.values = self._gathered()
        return self.values

    def __repr__(self) -> str:
        return f"RaggedRows({len(self)} rows, {self.total} values, {kinds([(self.dtype, self.inner)])})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Ragged, (self.values, self.offsets)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self._dtype

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of one value; () for numbers."""
        return self._inner

    @property
    def fetched(self) -> bool:
        """Whether all values are in this process; else the first read fetches them from another process."""
        return all(source.fetched for source in self.sources)

    def finite(self) -> bool:
        """Return whether every value is finite. Stored arrays are not read: their attribute `finite` is used."""
        known = all(isinstance(source, StoredArray) and source.finite for source in self.sources)
        return known or super().finite()

    def read_only(self) -> RaggedRows:
        """Return the same rows, whose values are read-only once gathered."""
        return self._with(self.source_N, self.start_N, self.offsets, locked=True)

    def take(self, indices: np.ndarray) -> RaggedRows:
        """Return the rows at `indices` (int64 [M] or a bool mask [N]) in that order, without reading values."""
        index_M = normal_indices(indices, len(self))
        run = contiguous_run(index_M)
        if run is not None:
            return self.slice(*run)
        offsets = offsets_of(self.lengths[index_M])
        return self._with(self.source_N[index_M], self.start_N[index_M], offsets)

    def slice(self, start: int, stop: int) -> RaggedRows:
        """Return the rows from `start` up to, but not including, `stop`, without reading values."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        if (start, stop) == (0, len(self)):
            return self
        offsets = self.offsets[start : stop + 1] - self.offsets[start]
        return self._with(self.source_N[start:stop], self.start_N[start:stop], offsets)

    def _with(
        self,
        source_M: np.ndarray,
        start_M: np.ndarray,
        offsets: np.ndarray,
        locked: bool | None = None,
    ) -> RaggedRows:
        rows = RaggedRows(
            self.sources,
            source_M,
            start_M,
            offsets,
            dtype=self._dtype,
            inner=self._inner,
            locked=self._locked if locked is None else locked,
        )
        return rows._tidied()

    def _tidied(self) -> RaggedRows:
        """Drop duplicate and unused sources, so that unused ones can be freed."""
        if len(self.sources) < 2 and len(self):
            return self
        number_of: dict[int, int] = {}
        kept: list[Source] = []
        used = np.unique(self.source_N)
        new_S = np.zeros(len(self.sources), np.int64)
        for old in used.tolist():
            source = self.sources[old]
            if id(source) not in number_of:
                number_of[id(source)] = len(kept)
                kept.append(source)
            new_S[old] = number_of[id(source)]
        self.sources = tuple(kept)
        self.source_N = new_S[self.source_N]
        return self

    def _gathered(self) -> np.ndarray:
        source_R, start_R, stop_R = self.runs()
        needed = [self.sources[number] for number in np.unique(source_R).tolist()]
        if stored := [source for source in needed if isinstance(source, StoredArray)]:
            fetch(stored)
        if len(source_R) > 1 and self.total < SHORT * len(source_R):
            values = self._picked(source_R, start_R, stop_R)
        else:
            where = zip(source_R.tolist(), start_R.tolist(), stop_R.tolist(), strict=True)
            values = self._copied([self.sources[k].values[a:b] for k, a, b in where])
        if self._locked:
            values.flags.writeable = False
        return values

    def _copied(self, pieces: list[np.ndarray]) -> np.ndarray:
        """Return the values of all runs, end to end: a view if there is one run, else a copy. `pieces` has the values of each run."""
        if not pieces:
            return np.empty((0, *self._inner), self._dtype)
        return pieces[0].view() if len(pieces) == 1 else np.concatenate(pieces, dtype=self._dtype)

    def _picked(self, source_R: np.ndarray, start_R: np.ndarray, stop_R: np.ndarray) -> np.ndarray:
        """Return a copy of the values of all R runs, gathered by index, which is faster if runs are short. Arguments: see `runs`."""
        lengths_R = stop_R - start_R
        before_R = offsets_of(lengths_R)[:-1]
        at_T = np.arange(self.total) + np.repeat(start_R - before_R, lengths_R)
        numbers = np.unique(source_R).tolist()
        if len(numbers) == 1:
            return self.sources[numbers[0]].values[at_T]
        values = np.empty((self.total, *self._inner), self._dtype)
        source_T = np.repeat(source_R, lengths_R)
        for number in numbers:
            mine = source_T == number
            values[mine] = self.sources[number].values[at_T[mine]]
        return values

    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the R runs of rows that are contiguous in one source; rows without values are skipped.

        Returns:
            Three arrays, int64 [R]: for each run the index of its source, and (start, stop) of its values within the source.
        """
        filled = np.flatnonzero(self.lengths)
        source_F, start_F = self.source_N[filled], self.start_N[filled]
        stop_F = start_F + self.lengths[filled]
        begins_F = np.ones(len(filled), np.bool_)
        begins_F[1:] = (source_F[1:] != source_F[:-1]) | (start_F[1:] != stop_F[:-1])
        first_R = np.flatnonzero(begins_F)
        last_R = np.append(first_R, len(filled))[1:] - 1
        return source_F[first_R], start_F[first_R], stop_F[last_R]
