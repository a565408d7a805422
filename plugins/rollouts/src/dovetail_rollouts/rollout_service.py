"""RolloutService: generates and scores groups during a whole run, while the trainer does other work."""

from __future__ import annotations

import asyncio
import math
import queue
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dovetail.errors import RolloutError
from dovetail.interfaces import Logger, RewardManager, Tokenizer
from dovetail.workers import LoopThread
from dovetail_rollouts.early_release import EarlyRelease
from dovetail_rollouts.episodes import Episodes
from dovetail_rollouts.generation import Generation
from dovetail_rollouts.group import Group
from dovetail_rollouts.replica_states import Replica, ReplicaFault
from dovetail_rollouts.rollout_pool import RolloutPool
from dovetail_rollouts.rollout_seconds import RolloutSeconds
from dovetail_rollouts.scoring.scorer import Scorer
from dovetail_rollouts.stall_watch import StallWatch

T = TypeVar("T")
Phase = Callable[[str], AbstractContextManager[None]]

_LOOK = 0.5
"""Seconds after which a waiting trainer checks again whether the event loop has ended or a stop was requested."""
_CUT_SECONDS = 30.0
"""Seconds that a checkpoint or a stop waits for running responses to be interrupted."""


class RolloutService:
    """Generates groups on an event loop in its own thread, and returns them in the order of their start or of their completion.

    All methods are called from the trainer's thread, which alone sends weights. If all replicas are lost, this thread
    restarts them while it waits in a method.

    Args:
        pool: the replicas.
        scorer: the scorer of every sample.
        manager: the scorer's reward manager; it sleeps while nothing is generated.
        tokenizer: the tokenizer of the run.
        seed: the seed of the run.
        episodes: the object that runs multi-turn episodes; None if a sample is one response to the prompt.
        partial: whether running responses are interrupted before weights are sent or replicas sleep, and continue
            afterwards; False if they finish first.
        keeps_cache: with `partial`, whether interrupted responses stay in their engines with their KV cache while weights
            are sent.
        continues: whether checkpoints and stops keep the tokens of running responses. The responses then continue from
            these tokens; their log-probabilities may differ in the last bits from an uninterrupted run.
        check_stop: a function that raises if a stop was requested.
        stall_seconds: seconds without a response or a score after which a wait is logged.
        logger: a logger with the standard methods; None for no log.

    Attributes:
        passed: groups that were skipped while later ones were taken, since the attribute was last cleared.
    """

    def __init__(
        self,
        *,
        pool: RolloutPool,
        scorer: Scorer,
        manager: RewardManager,
        tokenizer: Tokenizer,
        seed: int,
        episodes: Episodes | None = None,
        partial: bool = False,
        keeps_cache: bool = False,
        continues: bool = False,
        check_stop: Callable[[], None],
        stall_seconds: float = math.inf,
        logger: Logger | None = None,
    ) -> None:
        self._pool, self._scorer, self._manager = pool, scorer, manager
        self._partial, self._check_stop = partial, check_stop
        self.continues = continues
        self._keeps_cache = partial and keeps_cache
        self._loop = LoopThread("dovetail-rollout")
        self._admitted: list[Group] = []
        self.passed: set[Group] = set()
        self._running: dict[Group, asyncio.Task[None]] = {}
        self._rescues: list[Future[None]] = []
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._generation = Generation(
            pool=pool, scorer=scorer, tokenizer=tokenizer, seed=seed, episodes=episodes
        )
        self._stall_watch = StallWatch(self._generation, pool, stall_seconds, logger)
        self._suspended = False
        self._seconds = RolloutSeconds(
            self._generation.asking, self._generation.working, scorer.busy
        )
        self._bring_back: Callable[[Sequence[ReplicaFault]], None] | None = None

    def bring_back_with(self, rescue: Callable[[Sequence[ReplicaFault]], None]) -> None:
        """Set the function that the trainer's thread calls to restart replicas after all were lost."""
        self._bring_back = rescue
        self._pool.rescue = self._rescue

    @property
    def outstanding(self) -> int:
        """The number of groups that `admit` started and that `take` has not returned."""
        return len(self._admitted)

    @property
    def ready(self) -> int:
        """The number of finished groups that no step has taken."""
        return sum(group.finished for group in self._admitted)

    @property
    def running(self) -> bool:
        """Whether anything is generated or scored."""
        return bool(self._running)

    def kept(self, pack: Callable[[list[Group]], T]) -> T:
        """Pack the groups that no step has taken for a checkpoint: call `pack` on them, in their order, and return its result.

        The call runs on the service's event loop. With `continues`, running responses are interrupted before the call and continue after
        it. Without, `pack` gets all groups if every group is finished, and otherwise an empty list.
        """
        if not self._loop.alive:
            return pack(self._kept())
        return self._wait(self._packed(pack), brings_back=False)

    def admit(self, groups: Sequence[Group]) -> None:
        """Start generating groups, all in the same iteration of the event loop, without waiting for them."""
        self._admitted.extend(groups)
        self._wait(self._begin(self._admitted))

    def take(self, count: int, early: EarlyRelease | None = None) -> list[Group]:
        """Wait for the next groups that `admit` started, and return them in the order of their start unless `early` is given.

        Args:
            count: the number of groups.
            early: the rule to take finished groups before earlier groups that still run, in the order of `EarlyRelease.choose`; these
                earlier groups are then in `passed`. None takes groups in the order of their start.

        Raises:
            RolloutError: fewer than `count` groups are outstanding, or a request failed on every replica. Running requests
                are aborted; the next call requests the missing responses.
            StopRequested: a stop was requested; running requests are aborted.
        """
        if len(first := self._admitted[:count]) < count:
            message = f"`take` can't return {count} groups: only {len(first)} are admitted"
            raise RolloutError(message, hint="pass more groups to `admit` first")
        work = self._all(first, self._admitted) if early is None else self._chosen(count, early)
        taken = self._finish(first, work)
        last = max(map(self._admitted.index, taken), default=-1)
        self.passed = {*self.passed, *self._admitted[: last + 1]} - {*taken}
        for group in taken:
            self._admitted.remove(group)
        return taken

    def give_back(self, groups: Sequence[Group]) -> None:
        """Put taken groups back at the front of the queue, unchanged; the next `take` returns them."""
        self._admitted[:0] = groups

    def generate(self, groups: Sequence[Group]) -> None:
        """Generate the missing samples of these groups, while the groups of `admit` continue, and wait for them. See `take` for errors."""
        self._finish(groups, self._all(list(groups), groups))

    def seconds(self) -> dict[str, float]:
        """Return the metrics of `RolloutSeconds` since the last call, with the number of reported stalls, if any."""
        seconds = self._seconds.metrics(self._wait(self._seconds.read()))
        stalls, self._stall_watch.stalls = self._stall_watch.stalls, 0
        return {**seconds, **({"rollout/stalls": float(stalls)} if stalls else {})}

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude the time within the block from `seconds`."""
        start = self._wait(self._seconds.read())
        yield
        self._seconds.skip(start, self._wait(self._seconds.read()))

    @contextmanager
    def held(self, phase: Phase) -> Iterator[None]:
        """Hold generation within the block: running responses finish before it or continue after it, new ones start after it.

        Args:
            phase: a function from a phase's name to its timer; the wait for running responses is the phase `drain`.

        Replicas that are lost within the block are not restarted in it, since a restart sends weights: call `settle` afterwards.
        """
        if self._suspended or not self._running:
            yield
            return
        generation = self._generation
        if self._keeps_cache:
            with phase("drain"):
                self._wait(generation.freeze(), brings_back=False)
        else:
            self._quiet(phase)
        try:
            yield
        finally:
            self._wait(generation.thaw() if self._keeps_cache else self._go_on(), brings_back=False)

    def suspend(self, phase: Phase) -> None:
        """Stop generating and scoring until `resume`, so that replicas and reward models can sleep. See `held` for `phase`."""
        if self._suspended:
            return
        self._suspended = True
        if self._running:
            self._quiet(phase)
            self._wait(self._scored(), brings_back=False)
        else:
            self._generation.hold()

    def score(self, sequences: Sequence[np.ndarray]) -> dict[int, list[np.ndarray] | Exception]:
        """Return each replica's log-probabilities, float32 [L − 1], of token sequences, int64 [L] each; see `RolloutPool.score`."""
        return self._wait(self._pool.score(sequences), brings_back=False)

    def resume(self) -> None:
        """Start generating and scoring again after `suspend`."""
        if self._suspended:
            self._suspended = False
            self._wait(self._go_on(), brings_back=False)

    async def drain(self, member: Replica) -> None:
        """Send a replica no more requests, and wait until it has no request left; it leaves the pool at the next weight update.

        With `partial`, the replica's running responses continue on another replica, from their tokens so far. Without, they finish
        first. Runs on the service's loop.
        """
        member.draining = True
        if self._partial:
            await self._generation.move_from(member)
        elif member.requests:
            await member.idle.wait()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the service's event loop, which the pool uses; may be called from any thread."""
        return self._loop.start(work)

    def settle(self) -> None:
        """Restart the lost replicas that requests wait for, which `held` put off. Called after weights were sent."""
        while not self._calls.empty():
            if (call := self._calls.get()) is not None:
                call()

    def close(self) -> None:
        """Cancel all generation and scoring, and end the thread; safe to call twice."""
        self._pool.rescue = None
        for waiting in self._rescues:
            waiting.cancel()
        self._loop.close()

    async def _begin(self, groups: Iterable[Group]) -> None:
        """Start groups that are neither finished nor running."""
        waiting = [g for g in groups if g not in self._running and not g.finished]
        if waiting:
            self._seconds.begin()
        for group, task in zip(waiting, self._generation.begin(waiting), strict=True):
            self._running[group] = task
            task.add_done_callback(partial(self._over, group))

    def _over(self, group: Group, task: asyncio.Task[None]) -> None:
        del self._running[group]
        if not self._running:
            self._manager.sleep()
        if not task.cancelled():
            # Marked as retrieved. A call that waits for the group raises the error; else the next call generates what is missing.
            task.exception()

    def _finish(self, groups: Sequence[Group], work: Coroutine[Any, Any, T]) -> T:
        """Wait for the work that finishes groups; if the work fails, interrupt all running groups."""
        self._stall_watch.groups = groups
        try:
            return self._wait(work, stoppable=True)
        except Exception:
            if self._loop.alive:
                self._wait(self._interrupt(), brings_back=False)
            raise
        finally:
            self._stall_watch.groups = ()

    async def _all(self, groups: list[Group], begin: Iterable[Group]) -> list[Group]:
        """Start the groups of `begin`, then wait for `groups`."""
        # Both in one turn of the event loop: the error of a group that failed in between would be lost.
        await self._begin(begin)
        await asyncio.gather(*(self._running[group] for group in groups if group in self._running))
        return groups

    async def _chosen(self, count: int, early: EarlyRelease) -> list[Group]:
        await self._begin(self._admitted)
        while (chosen := early.choose(self._admitted, count)) is None:
            first = asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
            for task in (await first)[0]:
                task.result()
        return chosen

    def _quiet(self, phase: Phase) -> None:
        with phase("drain"):
            generation = self._generation
            quiet = generation.cut_short() if self._partial else generation.drain()
            self._wait(quiet, brings_back=False)

    async def _cut_short(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CUT_SECONDS):
                await self._generation.cut_short()

    async def _go_on(self) -> None:
        self._generation.go_on()

    async def _packed(self, pack: Callable[[list[Group]], T]) -> T:
        if self.continues and self._running:
            await self._cut_short()
        try:
            return pack(self._kept())
        finally:
            if not self._suspended:
                self._generation.go_on()

    def _kept(self) -> list[Group]:
        kept = self.continues or all(group.finished for group in self._admitted)
        return list(self._admitted) if kept else []

    async def _scored(self) -> None:
        await self._scorer.idle()
        self._manager.sleep()

    async def _interrupt(self) -> None:
        if self.continues:
            await self._cut_short()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._suspended:
            self._generation.go_on()

    def _wait(
        self, work: Coroutine[Any, Any, T], *, stoppable: bool = False, brings_back: bool = True
    ) -> T:
        """Run a coroutine on the event loop, and wait for its result.

        `stoppable` lets a requested stop end the wait. With `brings_back`, this thread restarts replicas if all are lost meanwhile.
        """
        if not self._loop.alive:
            work.close()
            raise self._ended()
        future = self._loop.start(work)
        # Rescues are queued as calls for this thread, the only thread that sends weights. None wakes this thread when the work is done.
        future.add_done_callback(lambda _: self._calls.put(None))
        self._stall_watch.begin()
        while not future.done():
            call = None
            if brings_back:
                with suppress(queue.Empty):
                    call = self._calls.get(timeout=_LOOK)
            else:
                wait([future], _LOOK)
            if call is not None:
                call()
            elif not self._loop.alive:
                raise self._ended()
            elif stoppable:
                self._check_stop()
            self._stall_watch.look(self._admitted, self._running)
        if future.cancelled() and not self._loop.alive:
            raise self._ended()
        return future.result()

    def _ended(self) -> RolloutError:
        error = RolloutError(f"the rollout's event loop has ended: {self._loop.failure!r}")
        error.__cause__ = self._loop.failure
        return error

    def _rescue(self, lost: Sequence[ReplicaFault]) -> None:
        """Block the calling thread, which is the rollout pool's, until the trainer's thread has restarted the lost replicas."""
        done: Future[None] = Future()

        def call() -> None:
            self._rescues.remove(done)
            try:
                if (
                    self._bring_back
                    and len(self._pool.replicas.lost()) == self._pool.replicas.staying
                ):
                    self._bring_back(lost)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        self._rescues.append(done)
        self._calls.put(call)
        # `close` clears `rescue`, then cancels the listed futures. This method lists the future, then
        # reads `rescue`, so that one of the two cancels the future.
        if self._pool.rescue is None:  # closed meanwhile
            done.cancel()
        done.result()
