"""StallWatch: reports waits for the rollout that make no progress."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from dovetail.interfaces import Logger
from dovetail_rollouts.generation import Generation
from dovetail_rollouts.group import Group
from dovetail_rollouts.rollout_pool import RolloutPool


class StallWatch:
    """Warns when the trainer's thread waits long without progress, and counts the warnings; the wait itself continues.

    Args:
        generation: the `Generation`, which records when a response or a score last arrived.
        pool: the pool of replicas.
        seconds: seconds without a response or a score after which to warn.
        logger: the logger of the warning `rollout_stalled`; None for no warning.

    Attributes:
        stalls: number of warnings since the attribute was last set to 0.
        groups: the groups that the trainer waits for.
    """

    def __init__(
        self, generation: Generation, pool: RolloutPool, seconds: float, logger: Logger | None
    ) -> None:
        self._generation, self._pool = generation, pool
        self._seconds, self._logger = seconds, logger
        self._silent_since = 0.0
        self.stalls = 0
        self.groups: Sequence[Group] = ()

    def begin(self) -> None:
        """Record the start of a wait."""
        self._silent_since = time.monotonic()

    def look(self, admitted: Collection[Group], running: Collection[Group]) -> None:
        """Warn if no response and no score has arrived for `seconds`, and again after each further `seconds`.

        Args:
            admitted: the groups that no step has taken.
            running: the admitted groups that are being generated or scored.
        """
        now = time.monotonic()
        self._silent_since = max(self._silent_since, self._generation.progress)
        if now - self._silent_since < self._seconds:
            return
        self._silent_since = now
        self.stalls += 1
        if self._logger is None:
            return
        missing = sum(not group.finished for group in self.groups)
        asked = {m.number: len(m.requests) for m in self._pool.replicas.members if m.requests}
        self._logger.warning(
            "rollout_stalled",
            trainer_waits_for=f"{missing} group(s)" if missing else "the running requests",
            rollout_waits_for=self._rollout_waits_for(asked, running),
            requests_by_replica=asked,
            groups_running=len(running),
            groups_admitted=len(admitted),
            groups_ready=sum(group.finished for group in admitted),
            seconds_without_response=round(now - self._generation.progress, 1),
        )

    def _rollout_waits_for(self, asked: Collection[int], running: Collection[Group]) -> str:
        if asked:
            return f"replicas {', '.join(map(str, sorted(asked)))}"
        if not self._pool.replicas.usable:
            return "a replica: none takes requests"
        if self._generation.held:
            return "the trainer: no request is sent until weights were sent or replicas are awake"
        return "scores, tools or agent loops" if running else "nothing: no group is running"
