"""Gate: counts running samples, and makes further ones wait while the engine is paused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import Future

import attrs


@attrs.define(eq=False)
class RunningSample:
    """One sample between its request and its completion."""

    call_id: str
    request_id: str
    aborted: bool = False
    """Whether the sample must end with the tokens generated so far."""


class Gate:
    """Counts running samples, and makes further samples wait while the gate is closed. Samples may wait under any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._running: dict[str, RunningSample] = {}
        self._waiting: dict[str, Future[None]] = {}
        self._samples: dict[str, RunningSample] = {}
        self._emptied: list[Future[None]] = []

    @property
    def closed(self) -> bool:
        """Whether further samples must wait."""
        return self._closed

    @property
    def running(self) -> int:
        """The number of running samples."""
        return len(self._running)

    async def enter(self, sample: RunningSample) -> bool:
        """Wait until the gate is open.

        Returns:
            True if the sample may run; the caller must then call `leave` after the sample. False if it was aborted while it waited.
        """
        while True:
            with self._lock:
                if sample.aborted:
                    return False
                if not self._closed:
                    self._running[sample.call_id] = sample
                    return True
                opened = self._waiting[sample.call_id] = Future()
                self._samples[sample.call_id] = sample
            try:
                # Without the shield, a cancelled caller would cancel the future, and `set_result` in `open` would raise.
                await asyncio.shield(asyncio.wrap_future(opened))
            finally:
                with self._lock:
                    self._waiting.pop(sample.call_id, None)
                    self._samples.pop(sample.call_id, None)

    def leave(self, sample: RunningSample) -> None:
        """Record that a sample no longer runs."""
        with self._lock:
            self._running.pop(sample.call_id, None)
            emptied = [] if self._running else self._emptied
            self._emptied = self._emptied if self._running else []
        for future in emptied:
            future.set_result(None)

    def close(self, *, abort: bool = False) -> list[str]:
        """Make further samples wait until `open`.

        Args:
            abort: True marks the running samples as aborted, so that they end with their tokens so far. False does not: running
                samples that the caller interrupts continue after `open`.

        Returns:
            The ids of the running calls.
        """
        with self._lock:
            self._closed = True
            for sample in self._running.values():
                sample.aborted = sample.aborted or abort
            return list(self._running)

    def kept_out(self) -> list[str]:
        """Return the ids of calls that still run although the gate is closed, for another abort; empty if the gate is open."""
        with self._lock:
            return list(self._running) if self._closed else []

    def open(self) -> None:
        """Open the gate and release the waiting samples."""
        with self._lock:
            self._closed = False
            waiting = list(self._waiting.values())
        _release(waiting)

    def empty(self) -> Future[None]:
        """Return a future that completes when no sample runs. If the gate is closed, none starts afterwards until it is opened."""
        future: Future[None] = Future()
        with self._lock:
            if self._running:
                self._emptied.append(future)
                return future
        future.set_result(None)
        return future

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Mark the samples of these requests as aborted.

        Returns:
            The ids of the running calls of these requests; waiting samples end at once.
        """
        names = set(request_ids)
        with self._lock:
            for sample in [*self._running.values(), *self._samples.values()]:
                sample.aborted = sample.aborted or sample.request_id in names
            waiting = [self._waiting[c] for c, s in self._samples.items() if s.request_id in names]
            running = [c for c, s in self._running.items() if s.request_id in names]
        _release(waiting)
        return running


def _release(waiting: Iterable[Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
