"""Gathers single samples into batches: a batch is scored once it is full or has waited long enough."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import attrs

from dovetail.interfaces import Failure, FailureKind, Outcome, RunningTime

Item = TypeVar("Item")
"""The type of batched items: samples, or values made of samples."""
Run = Callable[[Sequence[Item]], Awaitable[Sequence[Outcome]]]
"""A function that scores a batch. It returns one outcome per sample, in order, and does not raise for failing samples."""


class BatchQueue(Generic[Item]):
    """A queue of samples that are scored in batches. May be used from several event loops, one after another.

    With a budget, a batch consists of the sample that has waited longest and the samples closest to this sample in weight (see `weigh`).
    The number of samples times the largest weight stays within the budget; a sample over the budget forms a batch by itself.

    Args:
        run: a function that scores a batch.
        size: the maximum number of samples in a batch.
        wait: seconds that a sample waits for others.
        calls: the maximum number of concurrent batches.
        weigh: a function that returns a sample's weight, such as its number of tokens; None weighs all samples equally.
        budget: the maximum weight of a batch, padding included; None for no maximum.
    """

    def __init__(
        self,
        run: Run[Item],
        *,
        size: int,
        wait: float,
        calls: int,
        weigh: Callable[[Item], int] | None = None,
        budget: int | None = None,
    ) -> None:
        self._run = run
        self._size = size
        self._wait = wait
        self._calls = calls
        self._weigh = weigh or (lambda _: 1)
        self._budget = budget
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin()

    async def submit(self, sample: Item, time: RunningTime) -> Outcome:
        """Score a sample in a batch, and return its score or failure. The sample's running time counts from the batch's start.

        Cancelling this call removes the sample from the queue. A batch is cancelled when all calls that wait for it are cancelled.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # futures and tasks of an abandoned loop can't complete
            self._loop = loop
            self._begin()
        entry = _Entry(sample, self._weigh(sample), loop.create_future(), loop.create_future())
        self._waiting.append(entry)
        self._look()
        try:
            with time.waiting():
                await entry.begun
            return await entry.outcome
        finally:
            self._leave(entry)

    def _begin(self) -> None:
        self._waiting: list[_Entry[Item]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = False

    def _look(self) -> None:
        """Start every batch that is full or has waited long enough, as far as the limit of calls allows."""
        while len(self._running) < self._calls and self._waiting:
            batch = self._next()
            if len(batch) < self._size and len(batch) == len(self._waiting) and not self._due:
                break
            chosen = set(map(id, batch))
            self._waiting = [entry for entry in self._waiting if id(entry) not in chosen]
            self._due = False
            self._start(batch)
        if self._timer is not None and (self._due or not self._waiting):
            self._timer.cancel()
            self._timer = None
        if self._waiting and not self._due and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._wait, self._ring)

    def _next(self) -> list[_Entry[Item]]:
        """Return the next batch of waiting samples.

        With a budget, a limit on the padded size (the heaviest sample's weight times the number of samples), the batch consists of the
        oldest sample and as many of those nearest to its weight as fit.
        """
        if self._budget is None:
            return self._waiting[: self._size]
        first = self._waiting[0]
        nearest = sorted(self._waiting, key=lambda entry: abs(entry.weight - first.weight))
        count, heaviest = 1, first.weight
        for entry in nearest[1 : self._size]:
            heaviest = max(heaviest, entry.weight)
            if heaviest * (count + 1) > self._budget:
                break
            count += 1
        return nearest[:count]

    def _ring(self) -> None:
        self._timer = None
        self._due = True
        self._look()

    def _start(self, entries: list[_Entry[Item]]) -> None:
        task = asyncio.get_running_loop().create_task(self._work(entries))
        batch = _Batch(task, len(entries))
        self._running.add(task)
        task.add_done_callback(self._finished)
        for entry in entries:
            entry.batch = batch
            if not entry.begun.done():
                entry.begun.set_result(None)

    async def _work(self, entries: list[_Entry[Item]]) -> None:
        this = asyncio.current_task()
        try:
            outcomes = await self._run([entry.sample for entry in entries])
            if len(outcomes) != len(entries):
                raise ValueError(  # noqa: TRY301 - answered below
                    f"the scoring call returned {len(outcomes)} results for {len(entries)} samples; expected one for each"
                )
        except asyncio.CancelledError:
            if this is not None and this.cancelling():
                raise
            outcomes = [_broken("the call was cancelled")] * len(entries)
        except Exception as error:  # noqa: BLE001 - whatever breaks, every sample gets its failure
            outcomes = [_broken(f"{type(error).__name__}: {error}")] * len(entries)
        for entry, outcome in zip(entries, outcomes, strict=True):
            if not entry.outcome.done():
                entry.outcome.set_result(outcome)

    def _finished(self, task: asyncio.Task[None]) -> None:
        """Free the slot of a finished batch, even of one whose task was cancelled before it began, and start batches that wait."""
        self._running.discard(task)
        if not task.get_loop().is_closed() and task.get_loop() is self._loop:
            self._look()

    def _leave(self, entry: _Entry[Item]) -> None:
        """Remove a sample whose caller has stopped waiting; cancel its batch if no caller waits for the batch."""
        if entry in self._waiting:
            self._waiting.remove(entry)
        batch = entry.batch
        if batch is not None:
            batch.waiters -= 1
            if not batch.waiters and not batch.task.done():
                batch.task.cancel()


@attrs.define(eq=False)
class _Batch:
    """A batch that is being scored: its task, and the number of `submit` calls that wait for it."""

    task: asyncio.Task[None]
    waiters: int


@attrs.define(eq=False)
class _Entry(Generic[Item]):
    """A sample with its weight, and the futures of its start and its outcome."""

    sample: Item
    weight: int
    begun: asyncio.Future[None]
    outcome: asyncio.Future[Outcome]
    batch: _Batch | None = None


def _broken(why: str) -> Failure:
    return Failure(kind=FailureKind.CRASH, message=f"the sample's batch could not be scored: {why}")
