"""The clocks of a rollout: times of generation and scoring since the previous step, and the idle time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import attrs


class BusyTime:
    """Measures the time in which at least one context (`with` block) of this object is open, on one event loop.

    Args:
        clock: a function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entered, self._since, self._seconds, self._total = 0, 0.0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """The seconds in which at least one context was open, up to now."""
        self.add(0)
        return self._seconds

    @property
    def total(self) -> float:
        """The sum of the open times of all contexts in seconds; concurrent contexts count separately."""
        self.add(0)
        return self._total

    def add(self, count: int) -> None:
        """Open `count` contexts; close contexts if `count` is negative."""
        now = self._clock()
        self._seconds += (now - self._since) * (self._entered > 0)
        self._total += (now - self._since) * self._entered
        self._since = now
        self._entered += count

    @contextmanager
    def left(self) -> Iterator[None]:
        """Close one of the open contexts during a `with` block, such as while a request is held back."""
        self.add(-1)
        try:
            yield
        finally:
            self.add(1)

    def __enter__(self) -> Self:
        self.add(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.add(-1)


@attrs.frozen(kw_only=True)
class ClockReading:
    """Readings of a rollout's clocks at one time, in seconds.

    Attributes:
        clock: the time of `time.monotonic`.
        generation: the time in which an engine generated at least one response.
        scoring: the time in which at least one sample or group was scored.
        working: the time in which a response, an episode or a score was pending.
        responses: the time of generation, summed over concurrent responses.
    """

    clock: float
    generation: float
    scoring: float
    working: float
    responses: float


class RolloutSeconds:
    """The clocks of a rollout, read on its event loop.

    Args:
        asking: the clock of generation, with one open context for each response that an engine is generating.
        working: the clock of all work, with an open context while a response, an episode or a score is pending.
        scoring: the clock of scoring, with an open context for each sample or group that is being scored.
    """

    def __init__(self, asking: BusyTime, working: BusyTime, scoring: BusyTime) -> None:
        self._asking, self._working, self._scoring = asking, working, scoring
        self._before: ClockReading | None = None

    def begin(self) -> None:
        """Start measuring at the first group; earlier time does not count."""
        if self._before is None:
            self._before = self._now()

    async def read(self) -> ClockReading:
        """Return the readings of all clocks."""
        return self._now()

    def skip(self, start: ClockReading, end: ClockReading) -> None:
        """Exclude the time between two readings from the next metrics."""
        if self._before is not None:
            before, first, last = map(attrs.astuple, (self._before, start, end))
            moved = (b + z - a for b, a, z in zip(before, first, last, strict=True))
            self._before = ClockReading(**dict(zip(attrs.asdict(end), moved, strict=True)))

    def metrics(self, now: ClockReading) -> dict[str, float]:
        """Return the seconds since the last call as metrics, and the mean number of responses that were generated concurrently.

        The first call counts from the start of the first group.
        """
        before = now if self._before is None else self._before
        self._before = now
        generation = now.generation - before.generation
        working = now.working - before.working
        return {
            "time/rollout/generation": generation,
            "time/rollout/scoring": now.scoring - before.scoring,
            "time/rollout/scoring_left": max(working - generation, 0.0),
            "rollout/idle_seconds": max(now.clock - before.clock - working, 0.0),
            "perf/rollout_concurrency": (now.responses - before.responses) / generation
            if generation > 0
            else 0.0,
        }

    def _now(self) -> ClockReading:
        return ClockReading(
            clock=time.monotonic(),
            generation=self._asking.seconds,
            scoring=self._scoring.seconds,
            working=self._working.seconds,
            responses=self._asking.total,
        )
