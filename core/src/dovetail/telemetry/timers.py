"""Timers: how long the phases of a step take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


class Timers:
    """Wall-clock seconds of named phases, added up until `reset`.

    Phases may nest: each counts all the time between its start and its end. A part of a phase has the phase as prefix (`rollout/scoring`),
    so that readers can stack phases without counting time twice.

    Args:
        clock: a function that returns seconds and never goes back.
    """

    def __init__(self, *, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._depth: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the block as `phase`, even if it raises an error."""
        self._depth[phase] += 1
        start = self._clock()
        try:
            yield
        finally:
            self._depth[phase] -= 1
            # Of a phase that is nested in itself, only the outermost block is timed.
            if self._depth[phase] == 0:
                elapsed = self._clock() - start
                self._seconds[phase] = self._seconds.get(phase, 0.0) + elapsed

    def seconds(self, phase: str) -> float:
        """Return the seconds spent in the ended blocks of a phase; 0 if there are none."""
        return self._seconds.get(phase, 0.0)

    def metrics(self) -> dict[str, float]:
        """Return `time/<phase>` in seconds, in the order in which the phases first ended."""
        return {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}

    def reset(self) -> None:
        """Reset all times at the start of a step."""
        self._seconds.clear()
