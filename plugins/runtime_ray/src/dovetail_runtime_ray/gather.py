"""Waits for the ranks of one call, and turns failures, lost processes and time limits into one readable error."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray

from dovetail.errors import WorkerError
from dovetail_runtime_ray.config import METHODS_OF_ENGINES
from dovetail_runtime_ray.health import stopped
from dovetail_runtime_ray.wire import Reply, WireFailure

if TYPE_CHECKING:
    from dovetail_runtime_ray.pool import PoolProcesses

LOOK_SECONDS = 0.5
"""Seconds between checks of the other processes' health during a wait."""
_COLOUR = re.compile(r"\x1b\[\d+m")


class Gather:
    """The answers to one call on a pool's processes.

    Args:
        pool: the pool.
        what: the call as text, such as `actor.update()`.
        refs: by rank, Ray's reference to the answer; only of ranks that were called.
        limit: the time limit in seconds.
        method: the name of the called method; empty for calls during the start. It determines the file to which the stack traces of
            silent ranks are written, and the config key of the time limit that errors name.
    """

    def __init__(
        self,
        pool: PoolProcesses,
        what: str,
        refs: Mapping[int, Any],
        limit: float,
        *,
        method: str = "",
    ) -> None:
        self._pool, self._what, self._limit = pool, what, limit
        self._method = method
        self._began = time.monotonic()
        self._pending = {ref: rank for rank, ref in refs.items()}
        self._answers: dict[int, Any] = {}
        self._grace_ends: float | None = None

    def done(self) -> bool:
        """Return whether `results` would return or raise without waiting."""
        if not self._pending or self._pool.health.error is not None:
            return True
        refs = list(self._pending)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return len(ready) == len(refs)

    def results(self, timeout: float | None) -> list[Any]:
        """Return every rank's encoded result or `WireFailure`, in rank order; None for ranks that were not called.

        If a rank has failed and others stay silent beyond the grace period, all processes are ended. The results of
        silent ranks are then None as well.

        Raises:
            TimeoutError: some ranks have not answered within `timeout` seconds; the method may be called again.
            WorkerError: a process was lost, or the call's time limit has passed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self._pending:
            now = time.monotonic()
            ends = [now + LOOK_SECONDS, self._began + self._limit]
            ends += [end for end in (until, self._grace_ends) if end is not None]
            ready, _ = ray.wait(
                list(self._pending), num_returns=1, timeout=max(min(ends) - now, 0.0)
            )
            for ref in ready:
                self._take(ref)
            if not ready and self._pending:
                self._look(until)
        return [self._answers.get(rank) for rank in range(self._pool.size)]

    def _take(self, ref: Any) -> None:
        rank = self._pending.pop(ref)
        try:
            reply: Reply = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            # Not raised by the worker's own code: an argument or a result can't be pickled, for example.
            reply = Reply(result=_of_ray(error))
        except ray.exceptions.RayError as error:
            raise self._named(self._pool.lost(rank, self._what, error)) from None
        for warned in reply.warnings:
            self._pool.logger.warning(**{**warned, "where": self._what})
        self._answers[rank] = reply.result
        if isinstance(reply.result, WireFailure) and self._grace_ends is None:
            self._grace_ends = time.monotonic() + self._pool.limits.grace

    def _look(self, until: float | None) -> None:
        """End the wait if no further answers are to be expected.

        Raise an error if a process was lost or a time limit has passed. If the grace period after a rank's failure has passed, end all
        processes and stop waiting for the silent ranks, without an error.
        """
        now, error = time.monotonic(), self._pool.health.error
        if error is not None:
            raise self._named(error)
        if self._grace_ends is not None and now >= self._grace_ends:
            self._give_up_on_the_rest()
        elif now >= self._began + self._limit:
            raise self._too_late()
        elif until is not None and now >= until:
            raise TimeoutError(
                f"{self._what}: ranks {self._silent()} of {self._pool.size} have not answered yet"
            )

    def _give_up_on_the_rest(self) -> None:
        failures = [
            (answer.failed_at, rank, answer)
            for rank, answer in self._answers.items()
            if isinstance(answer, WireFailure)
        ]
        _, rank, failure = min(failures, key=lambda entry: entry[:2])
        silent = self._silent()
        words, _ = self._pool.stacks(silent, self._method)
        self._pool.logger.warning(
            f"{self._what} failed on rank {rank}; ranks {silent} continued for "
            f"{self._pool.limits.grace:g} seconds and were then ended{words}"
        )
        self._pool.fail(
            WorkerError(
                f"{self._what} failed on rank {rank} of {self._pool.size}: {failure.text}",
                rank=rank,
                call=self._what,
                worker_traceback=failure.traceback,
            )
        )
        self._pending.clear()

    def _too_late(self) -> WorkerError:
        silent = self._silent()
        words, stopped_ranks = self._pool.stacks(silent, self._method)
        own = f"s.{self._method}" if self._method in METHODS_OF_ENGINES else ""
        key = f"runtime.time_limit{own}" if self._method else "runtime.start_timeout"
        return self._pool.fail(
            WorkerError(
                f"{self._what}: ranks {silent} of {self._pool.size} gave no answer within "
                f"{self._limit:g} seconds, and were ended{words}",
                rank=(stopped_ranks or silent)[0],
                call=self._what,
                hint=f"raise {key} if the work takes that long",
                lost=True,
            )
        )

    def _silent(self) -> list[int]:
        return sorted(self._pending.values())

    def _named(self, error: WorkerError) -> WorkerError:
        """Return the error that this call raises because of the run's first error.

        That is the first error itself if this call caused it; else an error of this call that names the first error as its cause, or that
        reports the death of a process outside any call.
        """
        if error.call == self._what:
            return error
        if error.call:
            return stopped(self._what, error)
        # The process died outside of any call, while this call was running.
        return WorkerError(
            f"{self._what} was under way when {error.message}",
            rank=error.rank,
            call=self._what,
            hint=error.hint,
            lost=True,
        )


def _of_ray(error: ray.exceptions.RayTaskError) -> WireFailure:
    return WireFailure(
        pickled=None,
        text=f"{type(error.cause).__name__}: {error.cause}",
        traceback=_COLOUR.sub("", str(error)),
        failed_at=time.time(),
    )
