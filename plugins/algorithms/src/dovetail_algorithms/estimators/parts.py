"""Parts of a batch on several threads. Where the cuts are does not depend on the number of threads: neither do results."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Int64

MOST_THREADS = 8
"""Memory bandwidth has no use for more."""


def in_parts(
    offsets_M1: Int64[np.ndarray, "M1"], size: int, work: Callable[[int, int], None]
) -> None:
    """Call `work(low, high)` for runs of units, each of at most `size` tokens or one unit, on several threads.

    Args:
        offsets_M1: int64 [M + 1], where each unit begins, and the last ends; rising.
        size: tokens of a part.
        work: gets the first unit of the part and the one after its last. It should leave the interpreter's lock to
            others most of the time, as NumPy and compiled kernels do.
    """
    cuts, units = [0], len(offsets_M1) - 1
    while cuts[-1] < units:
        low = cuts[-1]
        beyond = int(np.searchsorted(offsets_M1, offsets_M1[low] + size, side="right")) - 1
        cuts.append(max(beyond, low + 1))
    in_threads(len(cuts) - 1, lambda part: work(cuts[part], cuts[part + 1]))


def in_threads(parts: int, work: Callable[[int], None]) -> None:
    """Call `work(part)` for every part, in threads where there are several parts and processors."""
    threads = min(parts, _processors(), MOST_THREADS)
    if threads < 2:
        for part in range(parts):
            work(part)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, range(parts)):
            pass


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
