"""Stored values: a packed array that lies in a store between processes, and comes here when it is first read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Store(Protocol):
    """Shares arrays between the process that made them and those that read them.

    A reference can be pickled into another process, which reads it from a store of the same kind. An array
    stays as long as any process holds a reference to it.
    """

    def put(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        """Store copies of arrays, of any shape, that one process is likely to read together, and return their references."""

    def get(self, references: Sequence[Any]) -> list[np.ndarray]:
        """Return the arrays themselves, in the shapes in which they were put, read-only and where possible not copied.

        Raises:
            WorkerError: an array is lost, since the process that kept it has died.
        """


class StoredArray:
    """An array in a store: dtype and shape are known at once, the values are fetched on first read.

    Attributes:
        reference: identifies the array in the store. The array is kept at least as long as this object.
        dtype: the dtype of the values.
        shape: [T, …].
        finite: whether every value is known to be finite, as integers always are.
    """

    __slots__ = ("__weakref__", "_array", "_store", "dtype", "finite", "reference", "shape")

    def __init__(
        self,
        store: Store,
        reference: Any,
        *,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        finite: bool,
    ) -> None:
        """Describe what a store holds; nothing is fetched."""
        self._store = store
        self._array: np.ndarray | None = None
        self.reference = reference
        self.dtype = dtype
        self.shape = shape
        self.finite = finite

    @classmethod
    def put(cls, store: Store, arrays: Sequence[np.ndarray]) -> list[StoredArray]:
        """Put arrays [T, …] into a store that are likely to be read together."""
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
    """Fetch the values of several arrays of one store together; arrays that are fetched already are skipped.

    Raises:
        WorkerError: the process that stored an array has died.
    """
    absent = [one for one in stored if not one.fetched]
    if absent:
        store = absent[0]._store  # noqa: SLF001 - of its own class
        arrays = store.get([one.reference for one in absent])
        for one, array in zip(absent, arrays, strict=True):
            one._array = array  # noqa: SLF001 - likewise
