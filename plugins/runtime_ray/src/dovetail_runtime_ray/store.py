"""Ray's object store as the store of columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from dovetail.errors import WorkerError

TOGETHER = 4 << 20
"""Bytes below which an array shares a store object with others, since each object costs a millisecond or two."""


class Bundle:
    """One object in the store: a list of arrays. Once this process has read the object, `arrays` holds the list."""

    __slots__ = ("arrays", "reference")

    def __init__(self, reference: Any) -> None:
        self.reference = reference
        self.arrays: list[np.ndarray] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Bundle, (self.reference,)


Place = tuple[Bundle, int]
"""A reference to one array: its store object, and its index in the object."""


class RayStore:
    """Arrays in Ray's object store. On the machine that holds an array, a read returns a view of shared memory.

    The process that puts an array owns it: the array is lost when that process ends, even if others hold references.
    """

    def put(self, arrays: Sequence[np.ndarray]) -> list[Place]:
        """Copy arrays of any shape into the store: small arrays together as one object, large arrays each alone."""
        places: list[Place | None] = [None] * len(arrays)
        small = [number for number, array in enumerate(arrays) if array.nbytes < TOGETHER]
        large = [number for number, array in enumerate(arrays) if array.nbytes >= TOGETHER]
        for numbers in [small, *([number] for number in large)]:
            if not numbers:
                continue
            bundle = Bundle(ray.put([np.ascontiguousarray(arrays[number]) for number in numbers]))
            for place, number in enumerate(numbers):
                places[number] = (bundle, place)
        return [place for place in places if place is not None]

    def get(self, references: Sequence[Place]) -> list[np.ndarray]:
        """Return read-only views with the shapes of the stored arrays; objects on other machines are first copied to this machine.

        Raises:
            WorkerError: an object is lost, because its owner has ended or the store had no room.
        """
        absent = list(
            {id(bundle): bundle for bundle, _ in references if bundle.arrays is None}.values()
        )
        try:
            found = ray.get([bundle.reference for bundle in absent])
        except ray.exceptions.RayError as error:
            raise WorkerError(
                f"values of a batch column are lost in Ray's object store: {type(error).__name__}: {error}",
                hint="the worker that made them has ended: its log in the run directory's logs/ says why",
                lost=True,
            ) from error
        for bundle, arrays in zip(absent, found, strict=True):
            bundle.arrays = arrays
        return [_of(bundle)[number] for bundle, number in references]


def _of(bundle: Bundle) -> list[np.ndarray]:
    assert bundle.arrays is not None
    return bundle.arrays
