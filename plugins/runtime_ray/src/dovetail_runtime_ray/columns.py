"""The transfer of batches: each token column is sent once, in chunks, through a store; calls and results carry references.

A small share of a batch is sent within the call. For a larger share, rows that are not in the store yet are stored as one
chunk a column, and remembered as long as the column lives: a later call with the same rows (a forward pass of another
role, the update) sends a reference. Rows of several chunks (mini-batches, rows balanced differently over ranks) are sent as references and
row positions; the receiver joins the rows when it reads them. Columns arrive as `RaggedRows`: a column that an engine does not
read is never fetched. Results travel in the same way, so a column that only workers read again stays on its worker.
Legend: a share is the part of a batch in one call to a rank. N rows of a column that was made here, M rows of a share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np

from dovetail.batch import Batch, Ragged, RaggedRows, Store, StoredArray
from dovetail.interfaces import Call

ALONG = 1 << 16
"""Bytes below which the ragged columns of a share are sent within the call, since references would take longer."""


@attrs.frozen(eq=False)
class PackedColumn:
    """A batch's ragged column (M rows of different lengths), as references to arrays in the object store.

    Each stored array, a chunk, has the values of one or more rows.
    """

    chunks: tuple[tuple[Any, np.dtype[Any], tuple[int, ...], bool], ...]
    """For each chunk: its reference, its dtype, its shape, and whether all its values are finite."""
    chunk_M: np.ndarray | None
    """int64 [M], index of each row's chunk; None if all rows are in the first chunk."""
    start_M: np.ndarray | int
    """int64 [M], position in its chunk at which each row starts. An int if the rows follow each other in one chunk: that of the first."""
    offsets: np.ndarray
    """int64 [M + 1]: with the rows' values in one array, row i has the values from offsets[i] to before offsets[i + 1]."""


@attrs.frozen(eq=False)
class PackedBatch:
    """A batch as it is sent between processes: large ragged columns as `PackedColumn`, all other columns unchanged."""

    columns: dict[str, Any]
    length: int


class Chunks:
    """References to the stored rows of this process's columns, kept as long as the columns live. Thread-safe.

    Args:
        store: the object store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: WeakKeyDictionary[Ragged, _Placement] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def place(self, wanted: Sequence[tuple[Ragged, np.ndarray]]) -> list[_Placement]:
        """Put the wanted rows into the store, except those that it already has, and return where each column's rows are.

        Args:
            wanted: columns of N rows, each with the indices of its wanted rows, int64 [M]; no wanted row is empty. A column may occur twice.

        Returns:
            The positions of each column's rows in the store. Entries for rows that were not wanted may change at any time.
        """
        with self._lock:
            found = [self._placement(column) for column, _ in wanted]
            new: list[tuple[_Placement, Ragged]] = []
            for (column, row_M), placed in zip(wanted, found, strict=True):
                absent = row_M[placed.chunk_N[row_M] < 0]
                if absent.size:
                    # Each row once, in the order of the call, so that a later call with the same rows finds them consecutive.
                    _, first = np.unique(absent, return_index=True)
                    new.append((placed, placed.claim(column, absent[np.sort(first)])))
            try:
                stored = (
                    StoredArray.put(self._store, [rows.values for _, rows in new]) if new else []
                )
            except BaseException:
                for column, _ in wanted:  # claimed, but not stored
                    self._held.pop(column, None)
                raise
            for (placed, _), one in zip(new, stored, strict=True):
                placed.chunks.append(one)
            return found

    def _placement(self, column: Ragged) -> _Placement:
        placed = self._held.get(column)
        if placed is None:
            placed = self._held[column] = _Placement(
                [], np.full(len(column), -1, np.int64), np.zeros(len(column), np.int64)
            )
        return placed

    def clear(self) -> None:
        """Drop all references to stored rows."""
        with self._lock:
            self._held.clear()


@attrs.define(eq=False)
class _Placement:
    """The positions of one column's rows in the store."""

    chunks: list[StoredArray]
    chunk_N: np.ndarray
    """int64 [N], index of each row's chunk; −1 for a row that is not in the store."""
    start_N: np.ndarray
    """int64 [N], start of each row in its chunk."""
    claims: int = 0
    """Number of chunks that are in the store or about to be stored."""

    def claim(self, column: Ragged, row_K: np.ndarray) -> Ragged:
        """Return the rows with the indices `row_K` of the column, and record that they are its next chunk."""
        rows = RaggedRows.of(column).take(row_K)
        self.chunk_N[row_K] = self.claims
        self.start_N[row_K] = rows.offsets[:-1]
        self.claims += 1
        return rows


class BatchCodec:
    """Packs and unpacks batches among the arguments and results of calls.

    The controller has one codec for all worker groups, and each worker process has its own.

    The controller encodes a call (`encode`). Each rank's process decodes the call in the thread that runs it (`decode`), and encodes the
    result (`encode_result`). The controller decodes the results of all ranks (`decode_results`). None (a rank without a call) and
    `RankFailure` pass through unchanged. An error in `decode` or `encode_result` counts as that rank's failure.

    Ray pickles payloads by protocol 5, so that NumPy buffers are not copied and arrive read-only. References travel inside a container,
    never as a bare argument: an `ObjectRef` then reaches the worker as a reference, and Ray fetches nothing unasked.

    Batches are found among the arguments, as the result, and within tuples. Thread-safe.

    Args:
        store: the store of this process.
        along: number of bytes. If the ragged columns of a batch that this process made have fewer bytes in total, they are sent
            within the call, not through the store.
    """

    def __init__(self, store: Store, *, along: int = ALONG) -> None:
        self._store = store
        self._along = along
        self._chunks = Chunks(store)

    def encode(self, calls: Sequence[Call | None]) -> list[Any]:
        """Return one payload for each rank, None for ranks without a call; calls with the same arguments share a payload."""
        packed: dict[int, PackedBatch] = {}
        payloads: dict[tuple[Any, ...], Call] = {}

        def pack(batch: Batch) -> PackedBatch:
            if id(batch) not in packed:
                packed[id(batch)] = self._pack(batch)
            return packed[id(batch)]

        encoded: list[Any] = []
        for call in calls:
            if call is None:
                encoded.append(None)
                continue
            args, kwargs = call
            key = (*map(id, args), *((name, id(value)) for name, value in kwargs.items()))
            if key not in payloads:
                payloads[key] = _mapped(call, pack, Batch)
            encoded.append(payloads[key])
        return encoded

    def decode(self, payload: Any) -> Call:
        """Return this rank's arguments; their arrays may be read-only."""
        return _mapped(payload, self._unpack, PackedBatch)

    def encode_result(self, result: Any) -> Any:
        """Return the encoded result: large columns stay in the store, and only their references travel."""
        return _walked(result, self._pack, Batch)

    def decode_results(self, results: Sequence[Any]) -> list[Any]:
        """Return the ranks' results; columns in the store are not fetched."""
        return [_walked(result, self._unpack, PackedBatch) for result in results]

    def close(self) -> None:
        """Drop the references to stored columns; columns in use keep their references."""
        self._chunks.clear()

    def _pack(self, batch: Batch) -> PackedBatch:
        known: dict[bytes, np.ndarray] = {}

        def once(array: np.ndarray) -> np.ndarray:
            # Most columns have the same offsets, and pickle sends an object that occurs twice only once.
            return known.setdefault(array.tobytes(), array)

        columns = dict(batch.columns)
        ragged = {n: RaggedRows.of(v) for n, v in columns.items() if isinstance(v, Ragged)}
        here = {
            name: rows
            for name, rows in ragged.items()
            if not any(isinstance(source, StoredArray) for source in rows.sources)
        }
        if sum(rows.nbytes for rows in here.values()) >= self._along:
            here = {}
        referred = {
            name: _Parts.of(rows)
            for name, rows in ragged.items()
            if name not in here and rows.total
        }
        local = [one for parts in referred.values() for one in parts.local]
        placed = iter(self._chunks.place([(column, row_K) for column, row_K, _ in local]))
        for name, rows in ragged.items():
            if name in referred:
                columns[name] = referred[name].packed(placed, once)
            else:
                columns[name] = Ragged(rows.values, once(rows.offsets))
        return PackedBatch(columns, len(batch))

    def _unpack(self, packed: PackedBatch) -> Batch:
        columns = {
            name: self._unpack_column(values) if isinstance(values, PackedColumn) else values
            for name, values in packed.columns.items()
        }
        return Batch(columns, length=packed.length)

    def _unpack_column(self, packed: PackedColumn) -> RaggedRows:
        chunks = [
            StoredArray(self._store, reference, dtype=dtype, shape=shape, finite=finite)
            for reference, dtype, shape, finite in packed.chunks
        ]
        count = len(packed.offsets) - 1
        start_M = packed.start_M
        return RaggedRows(
            chunks,
            np.zeros(count, np.int64) if packed.chunk_M is None else packed.chunk_M,
            start_M + packed.offsets[:-1] if isinstance(start_M, int) else start_M,
            packed.offsets,
            dtype=chunks[0].dtype,
            inner=chunks[0].inner,
        )


@attrs.define(eq=False)
class _Parts:
    """The rows of one share, grouped by where they lie: in the store already, or in columns of this process."""

    rows: RaggedRows
    stored: list[tuple[StoredArray, np.ndarray]]
    """Stored arrays, each with the positions in the share of the rows that it holds, int64 [K]."""
    local: list[tuple[Ragged, np.ndarray, np.ndarray]]
    """Columns of this process, each with the K of its rows that are in the share: indices in the column, then positions in the share."""

    @classmethod
    def of(cls, rows: RaggedRows) -> _Parts:
        parts = cls(rows, [], [])
        filled_M = rows.lengths > 0
        for number, source in enumerate(rows.sources):
            at_K = np.flatnonzero((rows.source_N == number) & filled_M)
            if not at_K.size:
                continue
            if isinstance(source, StoredArray):
                parts.stored.append((source, at_K))
            else:
                # Non-empty rows have different starts, so a start identifies its row.
                row_K = np.searchsorted(source.offsets, rows.start_N[at_K], side="right") - 1
                parts.local.append((source, row_K, at_K))
        return parts

    def packed(
        self, placed: Iterator[_Placement], once: Callable[[np.ndarray], np.ndarray]
    ) -> PackedColumn:
        """Return the column by reference.

        Args:
            placed: the placements of the columns in `local`, in order.
            once: a function that returns the same object for equal arrays, so that pickle sends each only once.
        """
        chunks: list[StoredArray] = []
        # Empty rows have no values, so their chunk and start have no meaning.
        chunk_M, start_M = np.zeros(len(self.rows), np.int64), self.rows.start_N.copy()
        for source, at_K in self.stored:
            chunk_M[at_K] = len(chunks)
            chunks.append(source)
        for (_, row_K, at_K), placement in zip(self.local, placed, strict=False):
            used, which_K = np.unique(placement.chunk_N[row_K], return_inverse=True)
            chunk_M[at_K] = which_K + len(chunks)
            start_M[at_K] = placement.start_N[row_K]
            chunks += [placement.chunks[number] for number in used.tolist()]
        described = tuple((one.reference, one.dtype, one.shape, one.finite) for one in chunks)
        offsets = self.rows.offsets
        if len(chunks) > 1:
            return PackedColumn(described, once(chunk_M), once(start_M), once(offsets))
        filled = np.flatnonzero(self.rows.lengths)
        begin_F = start_M[filled] - offsets[filled]
        follows = bool(np.all(begin_F == begin_F[0]))
        where = int(begin_F[0]) if follows else once(start_M)
        return PackedColumn(described, None, where, once(offsets))


def _mapped(call: Call, convert: Callable[[Any], Any], kind: type) -> Call:
    args, kwargs = call
    return (
        tuple(_walked(value, convert, kind) for value in args),
        {name: _walked(value, convert, kind) for name, value in kwargs.items()},
    )


def _walked(value: object, convert: Callable[[Any], Any], kind: type) -> Any:
    """Return the value, converted if it is of this type, else with objects of this type within tuples converted."""
    if isinstance(value, kind):
        return convert(value)
    if type(value) is tuple:
        return tuple(_walked(element, convert, kind) for element in value)
    return value
