"""The health of the run's processes. The first worker that is lost, or silent for too long, ends the calls of all others at once."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import ray

from dovetail.errors import WorkerError

_LOOK_SECONDS = 0.2

_DETAIL = re.compile(
    r"exit type: (\w+) Worker exit detail: (.*?)(?: Some common causes include| There are some potential|$)"
)
_NO_NOTICE = "connection error code 2"
"""Part of Ray's message if a worker's socket was closed without notice."""


class Health:
    """Watches the processes of a run, and stores the first error that stops the run.

    Once `error` is set, all waiting calls of training workers and replicas raise this error, or an error that names it as the cause. So do
    later calls of training workers. Each process runs one call that ends only with the process. A thread waits for these calls, so that
    it notices the death of a process at once, even of an idle one.

    Attributes:
        error: the first error that stops the run; None while there is none.
    """

    def __init__(self) -> None:
        self.error: WorkerError | None = None
        self._lock = threading.Lock()
        self._watched: dict[Any, Callable[[Exception], None]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, open_call: Any, lost: Callable[[Exception], None]) -> None:
        """Call `lost` with Ray's error when a process dies.

        Args:
            open_call: Ray's reference to a call that ends only with the process.
            lost: the function to call, in the watching thread.
        """
        with self._lock:
            self._watched[open_call] = lost
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._look, name="dovetail-ray-watch", daemon=True
                )
                self._thread.start()

    def fail(self, error: WorkerError) -> WorkerError:
        """Record an error unless there is an earlier error, and return the earliest."""
        with self._lock:
            if self.error is None:
                self.error = error
            return self.error

    def check(self, what: str) -> None:
        """Raise if one of the run's processes has failed.

        Raises:
            WorkerError: a process has failed; says that `what` can't be done, and why.
        """
        if self.error is not None:
            raise stopped(what, self.error)

    def close(self) -> None:
        """Stop watching the processes; safe to call twice."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        while not self._over.is_set():
            with self._lock:
                watched = dict(self._watched)
            try:
                ready, _ = ray.wait(
                    list(watched), num_returns=1, timeout=_LOOK_SECONDS, fetch_local=False
                )
            except Exception:  # noqa: BLE001 - Ray was shut down under us: there is nothing left to watch
                return
            for call in ready:
                with self._lock:
                    self._watched.pop(call, None)
                try:
                    ray.get(call)
                except Exception as error:  # noqa: BLE001 - whatever Ray says of the process that it lost
                    if not self._over.is_set():
                        # Called without the lock, since the callback may call `fail`, which takes the lock.
                        watched[call](error)


def stopped(what: str, cause: WorkerError) -> WorkerError:
    """Return the error for a call that could not start or finish because of an earlier failure."""
    error = WorkerError(
        f"{what} was abandoned, since a process of the run had failed before: {cause.message}",
        rank=cause.rank,
        call=what,
        worker_traceback=cause.worker_traceback,
    )
    error.__cause__ = cause
    return error


def why_lost(error: BaseException) -> str:
    """Return why Ray lost a process, as Ray reports it but without Ray's advice to operators of clusters."""
    text = " ".join(str(error).split())
    if "memory" in text and isinstance(error, ray.exceptions.OutOfMemoryError):
        return f"Ray ended it because the machine was nearly out of memory: {text[:400]}"
    found = _DETAIL.search(text)
    if found is None:
        return text[:400] or type(error).__name__
    kind, detail = found.group(1), found.group(2).strip()
    if _NO_NOTICE in detail:
        detail = "it ended without notice, as after the kernel's out-of-memory killer, SIGKILL or a crash"
    return f"{detail.rstrip('.')} (Ray: {kind})"


@attrs.frozen(kw_only=True)
class CallTimeouts:
    """Time limits of calls, in seconds."""

    start: float
    """Limit for the start of all processes together, including the loading of models."""
    default: float
    methods: Mapping[str, float]
    grace: float
    """Time that other ranks may continue after a rank has failed."""

    def of(self, method: str) -> float:
        """Return the limit of a method, in seconds."""
        return self.methods.get(method, self.default)

    @property
    def longest(self) -> float:
        """The longest limit of all methods, in seconds."""
        return max([self.default, *self.methods.values()])
