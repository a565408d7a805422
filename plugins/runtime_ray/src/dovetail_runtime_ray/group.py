"""A worker group whose workers are ranks of a pool's processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.dispatch import Future, Mesh
from dovetail.interfaces import Call
from dovetail.workers import WorkerGroup, resolve_mode
from dovetail_runtime_ray.columns import BatchCodec
from dovetail_runtime_ray.pool import PoolProcesses
from dovetail_runtime_ray.wire import WireFailure


class RayGroup(WorkerGroup):
    """Workers of one role, one in each process of a pool. Calls may come from any thread of the controller.

    Args:
        worker_class: the class of the workers.
        mesh: the mesh; its size is the number of processes.
        role: the role's name in the processes.
        processes: the processes of the pool.
        codec: encodes calls and results.
    """

    def __init__(
        self,
        worker_class: type,
        mesh: Mesh,
        role: str,
        processes: PoolProcesses,
        codec: BatchCodec,
    ) -> None:
        super().__init__(worker_class, mesh, role=role)
        self._processes, self._codec = processes, codec

    def _invoke(self, method: str, calls: Sequence[Call | None]) -> Future[list[Any]]:
        answering = None
        if method in self.modes:
            answering = resolve_mode(self.modes[method]).answering(self.mesh)
        pending = self._processes.call(self.role, method, self._codec.encode(calls), answering)

        def results(timeout: float | None) -> list[Any]:
            return self._codec.decode_results(
                [
                    answer.unpack() if isinstance(answer, WireFailure) else answer
                    for answer in pending.results(timeout)
                ]
            )

        return Future(results, done=pending.done)

    def close(self) -> None:
        """Close the workers of this role; the processes, which other roles may share, live on."""
        if self._processes.alive:
            self._invoke("close", [((), {})] * self.mesh.size).result()
