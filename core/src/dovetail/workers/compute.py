"""Release of CPU cores between threads of one process that do tensor work.

OpenMP keeps a team of threads for every thread that ever ran a parallel loop. GNU's runtime, which torch's CPU builds use, puts idle threads
to sleep at once if all teams together have more threads than the machine has cores. Small operations then take several times as long. So a
thread that has computed ends its team (`omp_pause_resource_all`, OpenMP 5.0); the next parallel loop makes a new team within a fraction of
a millisecond.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_SOFT_PAUSE = 1
_MAPS = Path("/proc/self/maps")


@contextmanager
def turn() -> Iterator[None]:
    """Let the block use OpenMP; afterwards, end this thread's team of OpenMP threads, so that other threads can use the cores."""
    try:
        yield
    finally:
        # Before torch is loaded there is no team, and torch's OpenMP library can't be found.
        if "torch" in sys.modules and (pause := _pause()) is not None:
            pause(_SOFT_PAUSE)


@cache
def _pause() -> Callable[[int], int] | None:
    """Return `omp_pause_resource_all` of GNU's OpenMP; None if this process has not loaded that library."""
    if not _MAPS.exists():
        return None
    libraries = sorted(
        {line.split()[-1] for line in _MAPS.read_text().splitlines() if "libgomp" in line}
    )
    if len(libraries) != 1:
        return None
    return getattr(ctypes.CDLL(libraries[0]), "omp_pause_resource_all", None)
