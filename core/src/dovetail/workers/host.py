"""WorkerHost: the workers of several roles in one process, for all runtimes and tests."""

from __future__ import annotations

import sys
import threading
import traceback
from contextlib import ExitStack
from typing import Any

import attrs
from structlog.contextvars import bound_contextvars

from dovetail.dispatch.mesh import Mesh
from dovetail.dispatch.worker import Worker
from dovetail.errors import DispatchError
from dovetail.interfaces.dispatch_mode import Call
from dovetail.interfaces.plugin import LocalReduction, Plugin, PluginContext, Reduction
from dovetail.interfaces.runtime import PluginRef, WorkerSpec
from dovetail.workers.compute import turn
from dovetail.workers.group import run_on_worker


class WorkerHost:
    """Makes, runs and closes workers in this process.

    Args:
        device: the torch device of every worker in this process.
        base: a context whose `logger` replaces the logger of the spec's context; None keeps the spec's logger.
    """

    def __init__(self, device: str, base: PluginContext | None = None) -> None:
        self.device = device
        self._base = base
        self._workers: dict[str, Plugin] = {}
        self._transports: list[tuple[PluginRef, Any]] = []
        self._started = ExitStack()
        self._making = threading.Lock()

    def start(
        self,
        spec: WorkerSpec,
        interface: type,
        *,
        mesh: Mesh | None,
        rank: int,
        reduction: Reduction | None = None,
    ) -> Plugin:
        """Make and start a worker or a rollout engine, and return its plugin, which `worker` finds by role from then on.

        Args:
            spec: the role, the plugin and its context.
            interface: the class that the plugin must extend.
            mesh: the ranks of the worker group; None for a rollout engine.
            rank: the rank of the worker, or the index of the replica.
            reduction: computes sums over the ranks that share a batch; None for a single rank.

        Raises:
            DispatchError: the plugin does not implement the interface.
            DovetailError: the plugin failed to start.
        """
        from dovetail.plugins.load import make_plugin

        context = attrs.evolve(
            spec.context,
            role=spec.context.role or spec.role,
            mesh=mesh,
            rank=rank,
            device=self.device,
            reduction=reduction if reduction is not None else LocalReduction(),
        )
        if self._base is not None:
            context = attrs.evolve(context, logger=self._base.logger)
        if spec.transport is not None:
            context = attrs.evolve(context, transport=self._transport(spec.transport, context))
        plugin = make_plugin(spec.plugin, context)
        if not isinstance(plugin, interface):
            raise DispatchError(
                f"the plugin {spec.plugin.name!r} can't be {spec.role or 'a worker'}: "
                f"its class {type(plugin).__qualname__} is not a {interface.__name__}"
            )
        # Registered before `start`, so that a failed start is cleaned up, too.
        self._started.callback(plugin.close)
        with turn(), bound_contextvars(role=spec.role, rank=rank):
            plugin.start()
        self._workers[spec.role] = plugin
        return plugin

    def start_worker(
        self, spec: WorkerSpec, mesh: Mesh, rank: int, reduction: Reduction | None = None
    ) -> Plugin:
        """Start a rank of a worker group, and return its plugin; for errors see `start`."""
        return self.start(spec, Worker, mesh=mesh, rank=rank, reduction=reduction)

    def worker(self, role: str) -> Plugin:
        """Return the worker of a role.

        Raises:
            DispatchError: this process has no worker of the role.
        """
        if role not in self._workers:
            raise DispatchError(
                f"this process has no worker {role!r}; it has: {', '.join(self._workers)}"
            )
        return self._workers[role]

    def run(self, role: str, method: str, call: Call) -> Any:
        """Run one rank's call on the worker of a role, and return the result or a `RankFailure`."""
        worker = self.worker(role)
        with turn(), bound_contextvars(role=role, rank=worker.context.rank):
            return run_on_worker(worker, method, call)

    def close(self) -> None:
        """Close every worker, the latest first; safe to call twice."""
        self._workers.clear()
        self._transports.clear()
        self._started.pop_all().close()

    def _transport(self, ref: PluginRef, context: PluginContext) -> Any:
        """Return the weight transport that a reference names; equal references give one object, for sender and receiver in one process."""
        from dovetail.plugins.load import make_plugin

        with self._making:
            for known, transport in self._transports:
                if known == ref:
                    return transport
            transport = make_plugin(ref, context)
            self._transports.append((ref, transport))
            return transport


def stacks() -> str:
    """Return the stack of every thread of this process, formatted."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - the documented way
        lines = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return "\n".join(parts)
