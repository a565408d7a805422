"""Stored arrays: packed values in a store that processes share, fetched on first read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import numpy as np


class Store(Protocol):
    """A store that shares arrays between processes.

    A reference can be pickled: another process reads the array from its own store of the same class. An array is kept as long as any
    process holds a reference to it.
    """

    def put(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        """Store copies of arrays of any shape, which a process will probably read together, and return a reference to each."""

    def get(self, references: Sequence[Any]) -> list[np.ndarray]:
        """Return the stored arrays in their original shapes, read-only and, if possible, without a copy.

        Raises:
            WorkerError: the process that kept an array has died.
        """


@attrs.define(eq=False)
class StoredArray:
    """An array in a store: dtype and shape are known at once; the values are fetched on first read.

    Attributes:
        reference: the store's reference to the array. The store keeps the array at least as long as this object exists.
        dtype: the dtype of the values.
        shape: the shape [T, …] of the array.
        finite: whether every value is known to be finite, as integers always are.
    """

    _store: Store
    reference: Any
    dtype: np.dtype[Any] = attrs.field(kw_only=True)
    shape: tuple[int, ...] = attrs.field(kw_only=True)
    finite: bool = attrs.field(kw_only=True)
    _array: np.ndarray | None = attrs.field(default=None, init=False)

    @classmethod
    def put(cls, store: Store, arrays: Sequence[np.ndarray]) -> list[StoredArray]:
        """Put arrays [T, …] into a store, as a set that will probably be read together."""
        return [
            cls(
                store,
                reference,
                dtype=array.dtype,
                shape=array.shape,
                finite=array.dtype.kind != "f" or bool(np.isfinite(array).all()),
            )
            for array, reference in zip(arrays, store.put(arrays), strict=True)
        ]

    def __repr__(self) -> str:
        where = "here" if self._array is not None else "not read yet"
        return f"StoredArray({self.dtype}{list(self.shape)}, {where})"

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of one value; () for numbers."""
        return self.shape[1:]

    @property
    def fetched(self) -> bool:
        """Whether the values are in this process."""
        return self._array is not None

    @property
    def values(self) -> np.ndarray:
        """The array [T, …], fetched the first time.

        Raises:
            WorkerError: the process that stored the array has died.
        """
        if self._array is None:
            (self._array,) = self._store.get([self.reference])
        return self._array


def fetch(stored: Sequence[StoredArray]) -> None:
    """Fetch the values of several arrays of one store together; already fetched arrays are skipped.

    Raises:
        WorkerError: the process that stored an array has died.
    """
    absent = [one for one in stored if not one.fetched]
    if absent:
        store = absent[0]._store  # noqa: SLF001 - of its own class
        arrays = store.get([one.reference for one in absent])
        for one, array in zip(absent, arrays, strict=True):
            one._array = array  # noqa: SLF001 - likewise
