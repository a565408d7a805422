"""The decode thread: takes requests from asyncio, keeps the running batch full, and returns finished samples.

The thread runs only while there is work: an idle thread would keep its share of the cores (`dovetail.workers.compute`).

Requests submitted in one iteration of the event loop arrive together. The composition of batches, and thus every bit of the result,
does not depend on the scheduling of threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import torch

from dovetail.errors import RolloutError
from dovetail.interfaces import PauseMode
from dovetail_rollout_hf.admission import Admission
from dovetail_rollout_hf.counts import DecodeCounts
from dovetail_rollout_hf.decoder import Decoder
from dovetail_rollout_hf.rows import Finished
from dovetail_rollout_hf.running import RunningBatch
from dovetail_rollout_hf.tickets import Ticket, answer, do, nothing, post, rollout_error

T = TypeVar("T")


class Scheduler:
    """Runs the batch in a decode thread; all changes to the batch are made in this thread, between steps."""

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        *,
        max_batch_size: int,
        max_prefill_tokens: int,
    ) -> None:
        self._counts = DecodeCounts(max_rows=max_batch_size)
        self._batch = RunningBatch(decoder, device, max_prefill_tokens, self._counts)
        self._tickets: dict[str, Ticket] = {}
        self._waiting = Admission(
            decoder,
            device,
            max_rows=max_batch_size,
            max_prefill_tokens=max_prefill_tokens,
            counts=self._counts,
        )
        self._admitting = True
        self._stepping = True
        self._keeps_cache = False
        self._drained: list[Future[None]] = []
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._taken: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._lots: dict[asyncio.AbstractEventLoop, list[Ticket]] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def version(self) -> int:
        """The current weight version."""
        return self._batch.version

    # Called from any thread

    def hand_over(self, ticket: Ticket) -> None:
        """Submit a request to the decode thread. Call this method in the ticket's event loop.

        Raises:
            RolloutError: the rollout is closed.
        """
        if self._closed:
            raise RolloutError("the rollout is closed and takes no more requests")
        lot = self._lots.setdefault(ticket.loop, [])
        if not lot:
            ticket.loop.call_soon(self._flush, ticket.loop)
        lot.append(ticket)

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        """Submit all requests of one iteration of the event loop at once."""
        tickets = self._lots.pop(loop, [])

        def tell(entered: Future[None]) -> None:
            error = entered.exception()
            if error is None:
                return
            if not isinstance(error, RolloutError):
                error = rollout_error("the requests could not be accepted", error)
            post([(ticket, error) for ticket in tickets])

        self.call(lambda: self._enter(tickets)).add_done_callback(tell)

    def call(self, job: Callable[[], T]) -> Future[T]:
        """Run a job in the decode thread between two steps, and return a future for its result."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(RolloutError("the rollout is closed"))
                return future
            self._jobs.append((job, future))
            self._awake()
        return future

    def close(self) -> None:
        """Stop the thread; waiting requests fail with a RolloutError."""
        with self._lock:
            self._closed = True
            self._awake()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _awake(self) -> None:
        """Start the decode thread unless it runs; the caller holds the lock."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="dovetail-rollout-hf", daemon=True)
            thread.start()
            self._thread = thread

    # Jobs: run in the decode thread

    def abort(self, request_ids: Iterable[str]) -> None:
        """End running or waiting requests early, and deliver their samples with the tokens so far."""
        tickets = [self._tickets[name] for name in request_ids if name in self._tickets]
        chosen = [row for row in self._batch.rows if row.owner in tickets]
        finished = self._batch.abort(chosen)
        for ticket in tickets:
            finished += [(ticket, nothing(ticket.request, s)) for s in ticket.waiting]
            ticket.waiting.clear()
        self._waiting.forget_ended()
        self._deliver(finished)

    def pause(self, mode: PauseMode) -> Future[None]:
        """Pause generation; the returned future completes when running samples have reached the state that the mode requires."""
        done: Future[None] = Future()
        self._admitting = False
        self._keeps_cache = mode is PauseMode.KEEP_CACHE
        keeps = self._keeps_cache or mode is PauseMode.KEEP
        if keeps:
            self._stepping = False
        elif mode is PauseMode.ABORT:
            self.abort({row.request.request_id for row in self._batch.rows})
        self._drained.append(done)
        self._settle(keep=keeps)
        return done

    def resume(self) -> None:
        """Continue generation after a pause."""
        self._admitting = self._stepping = True
        self._keeps_cache = False
        self._settle(keep=True)

    def set_version(self, version: int) -> None:
        """Record the version of new weights, and continue running requests; they fail if their KV cache can't be recomputed."""
        self._batch.version = version
        if self._keeps_cache:
            self._batch.keep_over()
            return
        try:
            self._batch.take_over()
        except Exception as error:  # noqa: BLE001 - the weights have arrived, whatever becomes of the requests
            self._fail(
                rollout_error(
                    f"running samples could not continue with weights of version {version}", error
                )
            )

    def take_counts(self) -> DecodeCounts:
        """Return the counts since the last call, and reset them."""
        return self._counts.take()

    @property
    def idle(self) -> bool:
        """Whether no sample is running."""
        return self._batch.active == 0

    def release(self) -> int:
        """Free the KV cache's memory of an idle engine, and return the number of freed bytes."""
        return self._batch.release()

    def _settle(self, *, keep: bool = False) -> None:
        if keep or self.idle:
            drained, self._drained = self._drained, []
            answer(drained, None)

    def _enter(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            name = ticket.request.request_id
            if name in self._tickets:
                error = RolloutError(
                    f"a request with the id {name!r} is running already",
                    hint="give every running request an id of its own",
                )
                post([(ticket, error)])
                continue
            self._tickets[name] = ticket
            self._waiting.wait(ticket)

    # The thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as error:  # noqa: BLE001 - the thread ends here, and nobody may go on waiting for it
            self._break_off(error)

    def _break_off(self, error: BaseException) -> None:
        """End the broken decode thread: everything that waits for it gets the error, and a later call starts a new thread."""
        failure = rollout_error("the decode thread failed", error)
        waiting: list[Future[Any]] = []
        try:
            # On a broken device, clearing the batch may fail too.
            with suppress(Exception):
                self._fail(failure)
        finally:
            with self._lock:
                waiting += self._drained
                waiting += [future for _, future in (*self._taken, *self._jobs)]
                self._drained = []
                self._taken.clear()
                self._jobs.clear()
                self._thread = None
            answer(waiting, failure)

    def _turn(self) -> bool:
        """Do the waiting jobs, admit requests, take one step; return False if the scheduler is closed or has no work."""
        with self._lock:
            closed = self._closed
            if not (closed or self._jobs or self._has_work()):
                # Set under the lock, so that a job that `call` adds later starts a new thread.
                self._thread = None
                return False
            self._taken, self._jobs = self._jobs, deque()
        if closed:
            self._fail(RolloutError("the rollout was closed while requests were running"))
            waiting = [*self._drained, *(future for _, future in self._taken)]
            self._drained = []
            self._taken.clear()
            answer(waiting, RolloutError("the rollout is closed"))
            return False
        while self._taken:
            do(*self._taken.popleft())
        try:
            if self._admitting and (arrivals := self._waiting.enter(self._batch.active)):
                self._batch.admit(arrivals)
            if self._stepping and self._batch.active:
                self._deliver(self._batch.step())
        except Exception as error:  # noqa: BLE001 - whatever broke the step, every waiting request must hear of it
            self._fail(rollout_error("decoding failed", error))
        self._settle()
        return True

    def _has_work(self) -> bool:
        running = self._stepping and self._batch.active > 0
        return running or (self._admitting and bool(self._waiting))

    def _deliver(self, finished: Sequence[Finished]) -> None:
        """Deliver samples to the requests that wait for them."""
        for ticket, _ in finished:
            ticket.left -= 1
            if not ticket.left:
                self._tickets.pop(ticket.request.request_id, None)
        post(finished)

    def _fail(self, error: RolloutError) -> None:
        """End every running or waiting request with the error, and clear the batch."""
        tickets = list(self._tickets.values())
        self._tickets.clear()
        self._waiting.clear()
        post([(ticket, error) for ticket in tickets])
        self._batch.clear()
