"""SimulatedGroup: a worker group over any mesh in one process, for tests of dispatch without a cluster."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from dovetail.dispatch import Future, Mesh
from dovetail.interfaces import Call, PluginConfig, PluginContext
from dovetail.workers import InlineGroup


class SimulatedGroup(InlineGroup):
    """A worker group in this process: one worker per rank of the mesh, called one after another.

    Workers can't wait for each other: a method with collectives needs real processes.

    Attributes:
        workers: the workers, by rank.
        calls: every call so far: its method, and the arguments by rank (None for a rank that was not called).
    """

    def __init__(
        self,
        worker_class: Callable[[Any, PluginContext], Any],
        mesh: Mesh,
        config: PluginConfig = None,
        *,
        role: str = "",
        through_pickle: bool = False,
        **context: Any,
    ) -> None:
        """Make and start the workers.

        Args:
            worker_class: a Worker class with a plugin's constructor, `(config, context)`.
            mesh: a mesh of any size.
            config: the config of every worker.
            role: the role, for error messages.
            through_pickle: whether to pickle arguments and results, as between processes.
            context: further fields of the workers' PluginContext.
        """
        self.calls: list[tuple[str, list[Call | None]]] = []
        self._through_pickle = through_pickle
        workers = [
            worker_class(config, PluginContext(mesh=mesh, rank=rank, role=role, **context))
            for rank in range(mesh.size)
        ]
        for worker in workers:
            if hasattr(worker, "start"):
                worker.start()
        super().__init__(workers, mesh, role=role)

    def _invoke(self, method: str, calls: Sequence[Call | None]) -> Future[list[Any]]:
        self.calls.append((method, list(calls)))
        if not self._through_pickle:
            return super()._invoke(method, calls)
        results = super()._invoke(method, [_sent(call) for call in calls]).result()
        return Future.completed([_sent(result) for result in results])

    def close(self) -> None:
        """Close every worker that can be closed."""
        self.workers = [worker for worker in self.workers if hasattr(worker, "close")]
        super().close()


def _sent(value: object) -> Any:
    """Return the value as another process would receive it."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - made on the line above
