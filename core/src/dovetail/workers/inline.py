"""The inline runtime: groups of one worker in this process, without Ray and easy to debug."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from typing import Any, cast

from structlog.contextvars import bound_contextvars

from dovetail.config.builtin import InlineConfig
from dovetail.dispatch.future import Future
from dovetail.dispatch.mesh import Mesh
from dovetail.errors import ConfigError, DispatchError, RolloutError
from dovetail.interfaces.dispatch_mode import Call
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.rollout import BaseRollout
from dovetail.interfaces.runtime import Runtime, WorkerSpec
from dovetail.workers.compute import turn
from dovetail.workers.group import WorkerGroup, run_on_worker
from dovetail.workers.host import WorkerHost


class InlineGroup(WorkerGroup):
    """Workers in this process, called one after another in rank order. Futures are finished at once.

    Attributes:
        workers: the workers themselves, by rank.
    """

    def __init__(self, workers: Sequence[Any], mesh: Mesh, *, role: str = "") -> None:
        mesh.check_size(len(workers))
        self.workers = list(workers)
        super().__init__(type(self.workers[0]), mesh, role=role)

    def _invoke(self, method: str, calls: Sequence[Call | None]) -> Future[list[Any]]:
        results: list[Any] = []
        with turn():
            for rank, (worker, call) in enumerate(zip(self.workers, calls, strict=True)):
                with bound_contextvars(role=self.role, rank=rank):
                    results.append(None if call is None else run_on_worker(worker, method, call))
        return Future.completed(results)

    def close(self) -> None:
        with ExitStack() as stack:  # every worker is closed, even if one fails
            for worker in self.workers:
                stack.callback(worker.close)


class InlineRuntime(Runtime):
    """Runs every role in this process: one training worker a role, and any number of rollout replicas."""

    name = "inline"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = InlineConfig

    def __init__(self, config: InlineConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._held: WorkerHost | None = None
        self._replicas: dict[int, tuple[WorkerSpec, BaseRollout]] = {}
        self._loading = threading.Lock()
        self._making = threading.Lock()

    def worker_group(self, spec: WorkerSpec, mesh: Mesh) -> WorkerGroup:
        """Start a group of one worker.

        Raises:
            DispatchError: the mesh has more than one rank, or the plugin is not a Worker.
        """
        if mesh.size != 1:
            raise DispatchError(
                f"the inline runtime runs one worker a group, but {spec.role or 'the group'} "
                f"asks for {mesh.described()} = {mesh.size}",
                hint="set every parallel size to 1, or select a runtime of several processes, such as runtime=ray",
            )
        worker = self._host().start_worker(spec, mesh, 0)
        return InlineGroup([worker], mesh, role=spec.role)

    def rollout_replicas(self, spec: WorkerSpec, count: int) -> list[BaseRollout]:
        """Start `count` rollout engines, each with the index of the replica as its rank.

        Engines that compute in separate processes start at the same time.

        Raises:
            DispatchError: count is below 1, or the plugin is not a BaseRollout.
            DovetailError: an engine failed to start; the first error is raised.
        """
        if count < 1:
            raise DispatchError(f"a rollout needs at least 1 replica, not {count}")
        if _computes_here(spec) or count == 1:
            return [self._started(spec, rank) for rank in range(count)]
        with ThreadPoolExecutor(count) as threads:
            starting = [threads.submit(self._started, spec, rank) for rank in range(count)]
        return [started.result() for started in starting]

    def restart_replica(self, replica: BaseRollout) -> BaseRollout:
        """Close a replica, and start a new one with the same index. Several threads may call this at once.

        Raises:
            RolloutError: this runtime did not start the replica.
            DovetailError: the engine failed to start.
        """
        rank = next((n for n, (_, known) in self._replicas.items() if known is replica), None)
        if rank is None:
            raise RolloutError(
                "the rollout replica can't be restarted: this runtime did not start it; pass a replica that it started"
            )
        spec, _ = self._replicas[rank]
        try:
            replica.close()
        except Exception as error:  # noqa: BLE001 - it has failed, and may fail in anything
            self.context.logger.warning(f"rollout replica {rank} did not close cleanly: {error!r}")
        return self._started(spec, rank)

    def device(self) -> str:
        """Return the torch device of the config; for `auto`, the first accelerator if there is one, else `cpu`.

        Raises:
            ConfigError: the config names a device that this process does not have.
        """
        if self.config.device in ("auto", "cpu") and find_spec("torch") is None:
            return "cpu"
        import torch

        here = torch.accelerator.current_accelerator(check_available=True)
        if self.config.device == "auto":
            return (
                "cpu" if here is None else f"{here.type}:{torch.accelerator.current_device_index()}"
            )
        _check_device(self.config.device, [] if here is None else [here.type])
        return str(self.config.device)

    def close(self) -> None:
        """Close all that was started, the latest first."""
        if self._held is not None:
            self._held.close()

    def _started(self, spec: WorkerSpec, rank: int) -> BaseRollout:
        with self._loading if _computes_here(spec) else nullcontext():
            engine = self._host().start(spec, BaseRollout, mesh=None, rank=rank)
        replica = cast("BaseRollout", engine)
        self._replicas[rank] = (spec, replica)
        return replica

    def _host(self) -> WorkerHost:
        with self._making:  # training models and rollout may start at the same time
            if self._held is None:
                self._held = WorkerHost(self.device())
            return self._held


def _computes_here(spec: WorkerSpec) -> bool:
    """Return whether the engine loads its model in this process; such engines are started one after another."""
    return bool(getattr(spec.plugin.config, "in_process", True))


def _check_device(device: str, accelerators: Sequence[str]) -> None:
    import torch

    known = ["cpu", *accelerators]
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(
            f"runtime.device={device!r} is not a torch device of this machine; expected one of auto, {', '.join(known)}"
        ) from error
    if kind not in known:
        raise ConfigError(
            f"runtime.device={device!r} is not available: torch {torch.__version__} sees only {', '.join(known)}",
            hint="install the build of torch for your accelerator, or set runtime.device=auto",
        )
