"""The keeper of the worker processes: one thread that starts them, hands out samples, and kills those that run too long."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from dovetail.interfaces import Failure, FailureKind, Outcome
from dovetail_rewards.managers.worker_process import Job, WorkerProcess

TICK = 0.5
"""Seconds after which busy workers are looked after, whatever happens."""
GRACE = 0.5
"""Seconds for a worker to end by itself."""
STARTS = 3
"""Starts that may fail in a row before the waiting samples are given up."""
CHUNK_SECONDS = 0.02
"""Work that a worker is sent ahead, as far as the chunk allows."""


class Keeper:
    """A pool of worker processes, and the queue before them.

    Each worker has a few samples at a time and works on the first of them. Whatever ends a worker fails that sample alone;
    the others go back to the front of the queue. Workers end with this process: they have its end of the connection,
    and on Linux the kernel kills them when the keeper's thread is gone.

    Args:
        workers: processes.
        chunk: most samples that one has at a time.
        setup: what each makes its functions from.
        start_timeout: seconds that one may take to be ready.
        log: told of every worker that ended before its time.
    """

    def __init__(
        self,
        *,
        workers: int,
        chunk: int,
        setup: bytes,
        start_timeout: float,
        log: Callable[[str], None],
    ) -> None:
        self._count = workers
        self._chunk = chunk
        self._setup = setup
        self._start_timeout = start_timeout
        self._log = log
        self._workers: list[WorkerProcess] = []
        self._queue: deque[Job] = deque()
        self._incoming: deque[Job] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._closed = False
        self._started = threading.Event()
        self._wanted = workers
        self._bad_starts = 0
        self._problem: str | None = None
        self._seconds = 0.0
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()
        for end in (self._bell, self._rope):
            end.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._run, name="dovetail-reward-keeper", daemon=True
        )

    def start(self) -> str | None:
        """Start every worker and wait until all are ready; what is wrong, where one can't be."""
        self._thread.start()
        self._started.wait()
        return self._problem

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live now."""
        return [worker.process.pid for worker in self._workers]

    def submit(self, job: Job) -> None:
        """Queue a sample; its `answer` is called in the keeper's thread, or at once where it is closed."""
        with self._lock:
            open_ = not self._closed
            if open_:
                self._incoming.append(job)
        if open_:
            self._ring()
        else:
            job.answer(_crash(job, "the manager was closed"))

    def cancel(self, job: Job) -> None:
        """Nobody waits for this sample any more; where a worker works on it, it is killed."""
        job.cancelled = True
        self._ring()

    def close(self) -> None:
        """End every worker and the thread; safe to call twice."""
        self._closing = True
        self._ring()
        if self._thread.is_alive():
            self._thread.join()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # rung already, or closed
            self._rope.send(b"!")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._mend()
                self._hand_out()
                self._listen()
                self._look_after()
        finally:
            for worker in self._workers:
                worker.connection.close()
            for worker in self._workers:
                worker.end(0.0 if worker.jobs or not worker.ready else GRACE)
            given = [job for worker in self._workers for job in worker.jobs.values()]
            self._workers.clear()
            with self._lock:
                self._closed = True
            self._give_up("the manager was closed", [*given, *self._queue, *self._incoming])
            self._selector.close()
            self._bell.close()
            self._rope.close()
            self._started.set()

    def _mend(self) -> None:
        """Start what is missing: all at first, later as many as there is work for."""
        while len(self._workers) < self._wanted:
            worker = WorkerProcess(self._setup)
            self._workers.append(worker)
            self._selector.register(worker.connection, selectors.EVENT_READ, worker)
            worker.write()
        if not self._started.is_set() and all(worker.ready for worker in self._workers):
            self._started.set()

    def _hand_out(self) -> None:
        with self._lock:
            self._queue.extend(self._incoming)
            self._incoming.clear()
        self._wanted = min(self._count, max(len(self._workers), len(self._queue)))
        ready = sorted((w for w in self._workers if w.ready), key=lambda w: len(w.jobs))
        if not self._queue or not ready:
            return
        ahead = self._ahead()
        for worker in ready:
            share = min(ahead, max(1, len(self._queue) // (2 * len(ready))))
            room = share - len(worker.jobs)
            # Half empty is soon enough, and makes for fewer and larger frames.
            if room > 0 and len(worker.jobs) <= share // 2:
                jobs = [self._queue.popleft() for _ in range(min(room, len(self._queue)))]
                jobs = [job for job in jobs if not job.cancelled]
                if jobs:
                    worker.give(jobs)

    def _ahead(self) -> int:
        """Samples that a worker may have at a time: as many as take `CHUNK_SECONDS`."""
        if not self._seconds:
            return 1
        return max(1, min(self._chunk, int(CHUNK_SECONDS / self._seconds)))

    def _listen(self) -> None:
        for worker in self._workers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE * worker.wants_to_write)
            if self._selector.get_key(worker.connection).events != events:
                self._selector.modify(worker.connection, events, worker)
        for key, events in self._selector.select(self._patience()):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    while self._bell.recv(4096):
                        pass
                continue
            if events & selectors.EVENT_WRITE:
                key.data.write()
            if events & selectors.EVENT_READ:
                self._hear(key.data)

    def _hear(self, worker: WorkerProcess) -> None:
        was_ready = worker.ready
        answered, ended = worker.read()
        if worker.ready and not was_ready:
            self._bad_starts = 0
        for job, outcome, seconds in answered:
            self._seconds = seconds if not self._seconds else 0.9 * self._seconds + 0.1 * seconds
            if not job.cancelled:
                job.answer(outcome)
        if ended is not None:
            self._lose(worker, ended)

    def _look_after(self) -> None:
        """End whatever has run too long, and notice workers that are gone."""
        now = time.monotonic()
        for worker in list(self._workers):
            job = worker.current
            if not worker.ready:
                if now - worker.since > self._start_timeout:
                    self._lose(worker, f"it was not ready within {self._start_timeout:g} s")
            elif job is None:
                continue
            elif job.cancelled:
                self._drop(worker, FailureKind.TIMEOUT, "given up")
            elif job.limit is not None and now - worker.since > job.limit:
                self._hear(worker)  # its answer may have come this moment
                if worker in self._workers and worker.current is job:
                    why = f"no score within {job.limit:g} s; its worker process was killed"
                    self._drop(worker, FailureKind.TIMEOUT, why)
            elif worker.process.poll() is not None:
                self._hear(worker)  # its last words, where it has any
                if worker in self._workers:
                    self._lose(worker, "it is gone")

    def _patience(self) -> float | None:
        """Seconds until something has to be looked after; None where nothing runs."""
        now = time.monotonic()
        waits = []
        for worker in self._workers:
            job = worker.current
            limit = self._start_timeout if not worker.ready else job.limit if job else None
            if limit is not None:
                waits.append(worker.since + limit - now)
            if job is not None or not worker.ready:
                waits.append(TICK)
        return max(min(waits), 0.0) if waits else None

    def _lose(self, worker: WorkerProcess, why: str) -> None:
        """A worker ended by itself, or talks nonsense."""
        if worker.ready:
            self._drop(worker, FailureKind.CRASH, why, GRACE)
            return
        how = self._remove(worker, GRACE)
        self._bad_starts += 1
        problem = f"a worker process could not start: {why} ({how})"
        if not self._started.is_set():
            self._problem, self._closing = problem, True
        elif self._bad_starts >= STARTS:
            self._bad_starts = 0
            self._give_up(problem, list(self._queue))
            self._queue.clear()
        self._log(problem)

    def _drop(
        self, worker: WorkerProcess, kind: FailureKind, why: str, patience: float = 0.0
    ) -> None:
        """End a worker that can't be used any more: what it worked on fails, the rest goes back."""
        how = self._remove(worker, patience)
        jobs = list(worker.jobs.values())
        self._queue.extendleft(reversed(jobs[1:]))
        text = (
            why if kind is FailureKind.TIMEOUT else f"its worker process {how} while it was scored"
        )
        if jobs and not jobs[0].cancelled:
            jobs[0].answer(Failure(kind=kind, message=f"{jobs[0].name}: {text}", retryable=True))
        if kind is not FailureKind.TIMEOUT:
            self._log(f"a reward worker process {how}: {why}")

    def _remove(self, worker: WorkerProcess, patience: float) -> str:
        self._selector.unregister(worker.connection)
        self._workers.remove(worker)
        return worker.end(patience)

    def _give_up(self, why: str, jobs: list[Job]) -> None:
        for job in jobs:
            if not job.cancelled:
                job.answer(_crash(job, why))


def _crash(job: Job, why: str) -> Outcome:
    return Failure(kind=FailureKind.CRASH, message=f"{job.name} was not called: {why}")
