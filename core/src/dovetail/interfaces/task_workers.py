"""TaskWorkers: processes on a runtime's machines for work besides training and generation, such as scoring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any, Protocol

import attrs


class Task(Protocol):
    """The code that answers calls in a process that `Runtime.task_workers` started. Calls run concurrently on one event loop."""

    async def call(self, payload: bytes) -> bytes:
        """Answer one call. `payload` and the answer are bytes in a format of the task's own; the runtime only transfers them."""
        ...

    def close(self) -> None:
        """Release all resources. Called once, when the process ends regularly."""
        ...


@attrs.frozen(kw_only=True)
class TaskSpec:
    """The description of the processes that `Runtime.task_workers` starts."""

    label: str
    """Name of the processes in messages and log files, such as `reward`."""
    target: str
    """`package.module:function`, called in each process with `setup` and a logger; returns the `Task` of the process."""
    setup: bytes
    """Data from which the target makes its task."""
    count: int
    cpus: float = 0.0
    """CPUs that each process reserves; 0 reserves none and shares them with other processes."""
    accelerators: int = 0
    """Accelerators that each process has for itself; with 0 the process sees none."""
    start_timeout: float = 300.0
    """Seconds within which all processes must be ready."""


class TaskWorker(ABC):
    """A handle of one process that `Runtime.task_workers` started. Any thread may call its methods."""

    where: str
    """Text that names the process and its machine."""

    @property
    @abstractmethod
    def lost(self) -> str | None:
        """Reason why the worker no longer answers; None while the worker lives."""

    @abstractmethod
    def call(self, payload: bytes) -> Future[bytes]:
        """Call `Task.call` in the process with this payload, and return a future of the bytes that it returns.

        If the call fails, the future raises a WorkerError. `lost` is then None if the task raised an error, and a text if the process died.
        """

    @abstractmethod
    def kill(self) -> None:
        """End the process at once, so that running calls fail. Safe to call twice."""

    @abstractmethod
    def close(self) -> None:
        """Close the task, and end the process; safe to call twice."""

    @abstractmethod
    def again(self) -> TaskWorker:
        """Replace the worker by a new one on the same machine, or on another if the machine is gone. Blocks until the new one is ready.

        Raises:
            PlacementError, WorkerError, DovetailError: see `Runtime.task_workers`.
        """


def load_target(target: str) -> Any:
    """Return the function that a spec names as `package.module:function`.

    Raises:
        ImportError, AttributeError: the function does not exist.
    """
    import importlib

    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
