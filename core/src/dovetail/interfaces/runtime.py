"""Runtime: starts workers, in this process or on many machines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from dovetail.errors import PlacementError, RolloutError
from dovetail.interfaces.plugin import Plugin, PluginConfig, PluginContext
from dovetail.interfaces.task_workers import TaskSpec, TaskWorker

if TYPE_CHECKING:
    from dovetail.dispatch.future import Future
    from dovetail.dispatch.mesh import Mesh
    from dovetail.interfaces.rollout import BaseRollout
    from dovetail.sections.placement import Pool


@attrs.frozen(kw_only=True)
class PluginRef:
    """An exact reference to a plugin, from which another process makes the same plugin."""

    kind: str
    name: str
    distribution: str | None = None
    """The distribution that provides the plugin; None for a file."""
    path: str | None = None
    """Path of the Python file that holds the plugin; None for a plugin of a distribution."""
    attribute: str | None = None
    config: PluginConfig = None
    """The resolved config of the plugin."""


@attrs.frozen(kw_only=True)
class WorkerSpec:
    """The description of a worker group: all workers construct the same plugin, each with its own rank."""

    role: str
    """Role of the workers: `actor`, `ref`, `critic`, `rollout`, …"""
    plugin: PluginRef
    context: PluginContext
    """Context of each worker's plugin; the runtime fills in `mesh`, `rank`, `device`, `reduction`, `transport` and, in other processes,
    `logger`."""
    transport: PluginRef | None = None
    """The weight transport of the group, if any; every process makes its own sender or receiver."""


class WorkerGroupHandle(Protocol):
    """The methods of a worker group that its callers use; runtimes extend `dovetail.workers.WorkerGroup`."""

    mesh: Mesh
    role: str

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a registered method in its dispatch mode, which selects the ranks, and return a future of the collected result."""
        ...

    def __getattr__(self, name: str) -> Callable[..., Future[Any]]:
        """Return a function that calls the registered method `name` of the workers' class, as `call` does."""
        ...

    def close(self) -> None:
        """Close every worker; safe to call twice."""
        ...


class Runtime(Plugin):
    """Starts groups of workers, in this process or on many machines. The trainer does not depend on the choice of runtime."""

    def place(self, pools: Sequence[Pool]) -> None:
        """Reserve the resources of these pools; called once, after `start` and before the first worker.

        Raises:
            PlacementError: the resources are not available; the error names the requested and the free resources.
        """

    @abstractmethod
    def worker_group(self, spec: WorkerSpec, mesh: Mesh) -> WorkerGroupHandle:
        """Start a worker for every rank of the mesh, and wait until all have started."""

    @abstractmethod
    def rollout_replicas(self, spec: WorkerSpec, count: int) -> list[BaseRollout]:
        """Start `count` rollout replicas, and return their handles, which have BaseRollout's methods."""

    def restart_replica(self, replica: BaseRollout) -> BaseRollout:
        """Close a rollout replica that has failed, and start a new one with the same index among the replicas and the same resources.

        The new replica has the weights on disk; the caller sends it the current weights before its first request.

        Raises:
            RolloutError: the replica can't be restarted.
        """
        raise RolloutError(
            f"runtime {self.name!r} can't restart a rollout replica that failed",
            hint="resume the run from its checkpoint",
        )

    def task_workers(self, spec: TaskSpec) -> list[TaskWorker]:
        """Start processes on the runtime's machines, beside those of training and rollout, and wait until all are ready.

        The processes end with the runtime. Only runtimes with the capability `task_workers` can start them.

        Raises:
            PlacementError: the resources are not free, or the runtime starts no processes.
            WorkerError: a worker did not start in time, or died.
            DovetailError: the target function raised this error.
        """
        raise PlacementError(
            f"runtime {self.name!r} can't start processes, but {spec.label} needs {spec.count} of them",
            hint="set runtime.name=ray",
        )

    def device(self) -> str:
        """Return the torch device of the workers; for workers in other processes, only the device type, such as `cpu`."""
        return "cpu"

    def address(self) -> str:
        """Return the address at which task workers reach this machine; the loopback address if all task workers run on this machine."""
        return "127.0.0.1"

    def before_exit(self) -> None:
        """Write data that is only available while workers live, such as a timeline. Called at the end of the run."""
