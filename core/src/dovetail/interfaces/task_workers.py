"""TaskWorkers: processes on a runtime's machines for whatever is neither training nor generation, such as scoring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any, Protocol

import attrs


class Task(Protocol):
    """The work of a process. Its calls share one event loop; many run concurrently."""

    async def call(self, payload: bytes) -> bytes:
        """Return the answer to a payload."""
        ...

    def close(self) -> None:
        """Release everything; called once, at a regular end of the process."""
        ...


@attrs.frozen(kw_only=True)
class TaskSpec:
    """Processes to start."""

    label: str
    """Name of the processes in messages and log files, such as `reward`."""
    target: str
    """`package.module:function`, called in each process with `setup` and a logger; returns its `Task`."""
    setup: bytes
    """Data from which the target makes its task."""
    count: int
    cpus: float = 0.0
    """CPUs that each process reserves; 0 reserves none and shares them with other processes."""
    accelerators: int = 0
    """Accelerators that each process has for itself; with 0 it sees none."""
    start_timeout: float = 300.0
    """Seconds for all of them to be ready."""


class TaskWorker(ABC):
    """One of the processes. Its methods work from any thread."""

    where: str
    """Text that names the process and its machine."""

    @property
    @abstractmethod
    def lost(self) -> str | None:
        """Why the worker no longer answers; None while it lives."""

    @abstractmethod
    def call(self, payload: bytes) -> Future[bytes]:
        """Call the task and return its answer.

        The future's exception is a WorkerError: `lost` then says whether the process is gone, or its task has raised.
        """

    @abstractmethod
    def kill(self) -> None:
        """End the process at once, whatever it does; calls under way fail. Safe to call twice."""

    @abstractmethod
    def close(self) -> None:
        """Close its task and end the process; safe to call twice."""

    @abstractmethod
    def again(self) -> TaskWorker:
        """End the worker, and start another in its place: on its machine, or on another where that is gone. Blocks until it is ready.

        Raises:
            PlacementError, WorkerError, DovetailError: as `Runtime.task_workers`.
        """


def load_target(target: str) -> Any:
    """Return the function that a spec names.

    Raises:
        ImportError, AttributeError: it is not there.
    """
    import importlib

    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
