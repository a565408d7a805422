"""RolloutSeconds: how long groups were generated and scored since the step before, and how long nothing was."""

from __future__ import annotations

import time

import attrs

from dovetail_rollouts.generation import Generation
from dovetail_rollouts.scoring.scorer import Scorer


@attrs.frozen(kw_only=True)
class ClockReading:
    """Seconds since some moment; those of responses are summed over responses that are generated at once."""

    clock: float
    generation: float
    scoring: float
    working: float
    responses: float


class RolloutSeconds:
    """The clocks of a rollout, read on its event loop.

    Args:
        generation: has the seconds in which responses were asked, and in which something was waited for.
        scorer: has the seconds in which samples were scored.
    """

    def __init__(self, generation: Generation, scorer: Scorer) -> None:
        self._generation, self._scorer = generation, scorer
        self._before: ClockReading | None = None

    def begin(self) -> None:
        """Start with the first group: what was before does not count."""
        if self._before is None:
            self._before = self._now()

    async def read(self) -> ClockReading:
        """Return what all clocks say."""
        return self._now()

    def skip(self, start: ClockReading, end: ClockReading) -> None:
        """Let the next metrics leave out what was between two readings."""
        if self._before is not None:
            before, first, last = map(attrs.astuple, (self._before, start, end))
            moved = (b + z - a for b, a, z in zip(before, first, last, strict=True))
            self._before = ClockReading(**dict(zip(attrs.asdict(end), moved, strict=True)))

    def metrics(self, now: ClockReading) -> dict[str, float]:
        """Return the seconds since the last call as metrics, and how many responses were generated at once.

        The first call counts from when the first group began.
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
        asking = self._generation.asking
        return ClockReading(
            clock=time.monotonic(),
            generation=asking.seconds,
            scoring=self._scorer.busy.seconds,
            working=self._generation.working.seconds,
            responses=asking.total,
        )
