"""Ranks in threads, with a reduction that waits for all ranks, for tests of batch statistics without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

Result = TypeVar("Result")


class ThreadReduction:
    """Sums arrays over ranks that are threads of one process; every rank must call `sum` the same number of times."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._lock = threading.Lock()
        self._parts: list[np.ndarray] = []

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum element by element over ranks, same shape and dtype on every rank."""
        with self._lock:
            self._parts.append(np.asarray(values))
        self._barrier.wait(timeout=120)
        total = np.sum(np.stack(self._parts), axis=0, dtype=np.asarray(values).dtype)
        if self._barrier.wait(timeout=120) == 0:
            self._parts.clear()
        self._barrier.wait(timeout=120)
        return np.asarray(total)


def on_ranks(ranks: int, call: Callable[[int, ThreadReduction], Result]) -> list[Result]:
    """Call `call(rank, reduction)` in one thread per rank, and return the results in rank order."""
    reduction = ThreadReduction(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: call(rank, reduction), range(ranks)))
