"""The Ray runtime: pools become placement groups, ranks become processes, and everything is released at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dovetail.dispatch import Mesh
from dovetail.errors import DispatchError, PlacementError, RolloutError
from dovetail.interfaces import (
    BaseRollout,
    PluginContext,
    Runtime,
    TaskSpec,
    TaskWorker,
    WorkerSpec,
)
from dovetail.plugins import load_plugin_class
from dovetail.sections import Pool
from dovetail.workers import WorkerGroup, plugins_here
from dovetail_runtime_ray.capacity import Node, Share, fit, shares
from dovetail_runtime_ray.cluster import Cluster
from dovetail_runtime_ray.columns import BatchCodec
from dovetail_runtime_ray.config import RayConfig
from dovetail_runtime_ray.environments import Environments
from dovetail_runtime_ray.executor import TaskWorkers
from dovetail_runtime_ray.health import CallTimeouts, Health
from dovetail_runtime_ray.launch import RunProcesses, start_actor
from dovetail_runtime_ray.logs import remove_empty
from dovetail_runtime_ray.pool import PoolProcesses, RayGroup
from dovetail_runtime_ray.process import HostProcess, node_address
from dovetail_runtime_ray.replica import RayReplica
from dovetail_runtime_ray.replicas import Replicas
from dovetail_runtime_ray.reserve import Reserved, release, reserve
from dovetail_runtime_ray.setups import Setups
from dovetail_runtime_ray.store import RayStore
from dovetail_runtime_ray.timeline import write_timeline

ROLLOUT = "rollout"
_SETTLE_SECONDS = 3.0
"""Seconds that released resources may take to become free."""


class RayRuntime(Runtime):
    """Runs every training rank and every rollout replica in a process of its own, on one machine or many."""

    name = "ray"
    api = ">=1.4,<2"
    capabilities = frozenset({"deterministic", "task_workers"})
    Config = RayConfig

    def __init__(self, config: RayConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._logger = context.logger
        place = context.run_directory
        self._run = RunProcesses(
            health=Health(),
            limits=CallTimeouts(
                start=config.start_timeout,
                default=config.time_limit,
                methods=config.time_limits,
                grace=config.failure_grace,
            ),
            logger=context.logger,
            run_directory=None if place is None else str(Path(place).resolve()),
        )
        self._cluster: Cluster | None = None
        self._codec: BatchCodec | None = None
        self._setups: Setups | None = None
        self._environments = Environments(config, None)
        self._reserved: dict[str, Reserved] = {}
        self._processes: dict[str, PoolProcesses] = {}
        self._replicas: dict[RayReplica, Replicas] = {}
        """The running replicas, each with the `Replicas` that started it."""

    def place(self, pools: Sequence[Pool]) -> None:
        """Connect to Ray, reserve the pools' resources, and start the processes of training ranks."""
        if self._cluster is not None:
            raise DispatchError("place() was called twice: the runtime has its pools already")
        plugins = None
        if self.context.run_directory is not None:
            plugins = plugins_here(self.context.run_directory)
            self._environments = Environments(self.config, plugins)
        wanted = shares(pools, self.config.cpus_per_worker)
        cpus = sum(share.needs["CPU"] for share in wanted)
        ending = self._run.ending
        ending.callback(remove_empty, self._run.run_directory)
        self._cluster = Cluster(self.config, int(cpus), self._logger)
        ending.callback(self._cluster.close)
        nodes = _fitted(wanted, self._cluster)
        self._reserved = reserve(wanted, nodes)
        ending.callback(
            release, [g for reserved in self._reserved.values() for g in reserved.groups]
        )
        self._setups = Setups(
            config=self.config,
            reserved=self._reserved,
            run_directory=self._run.run_directory,
            plugins=plugins,
            local=self._cluster.local,
        )
        self._environments.check(list(self._reserved.values()))
        self._codec = BatchCodec(RayStore())
        ending.callback(self._codec.close)
        ending.callback(self._run.health.close)
        for name, reserved in self._reserved.items():
            if any(role != ROLLOUT for role in reserved.pool.roles):
                self._start_ranks(name, reserved, self._setups)

    def worker_group(self, spec: WorkerSpec, mesh: Mesh) -> WorkerGroup:
        """Start a worker on every rank of the role's pool, and wait until all have started.

        Raises:
            DispatchError: no pool has this role, or the mesh has another size than the pool.
            WorkerError: a process died or did not join the others.
            DovetailError: an error that the first failing rank raised in its start.
        """
        reserved = self._home(spec.role)
        mesh.check_size(reserved.pool.ranks)
        processes = self._processes[reserved.pool.name]
        processes.start(spec, mesh)
        assert self._codec is not None
        return RayGroup(load_plugin_class(spec.plugin), mesh, spec.role, processes, self._codec)

    def rollout_replicas(self, spec: WorkerSpec, count: int) -> list[BaseRollout]:
        """Start replicas, each in a process of its own.

        Raises:
            DispatchError: count is below 1, or no pool has the role `rollout`.
            RolloutError: a replica did not start in time, or its process died.
        """
        if count < 1:
            raise DispatchError(f"a rollout needs at least 1 replica, not {count}")
        reserved = self._home(spec.role)
        place, setups = self._environments.of(spec.role), self._setups
        assert setups is not None
        launcher = Replicas(
            spec,
            count,
            reserved,
            self._processes.get(reserved.pool.name),
            self._run,
            lambda label, rank: setups.of_rank(label, rank, reserved, place),
            apart=bool(place.title),
        )
        replicas = launcher.start()
        self._replicas |= dict.fromkeys(replicas, launcher)
        return list(replicas)

    def restart_replica(self, replica: BaseRollout) -> BaseRollout:
        """End a replica's process, and start a new one on its accelerators. Thread-safe.

        Raises:
            RolloutError: the replica is not of this runtime, or did not start.
            WorkerError: the run's training processes have failed, so no replica is started.
            DovetailError: an error that the engine raised in its start.
        """
        launcher = self._replicas.pop(replica, None) if isinstance(replica, RayReplica) else None
        if launcher is None or not isinstance(replica, RayReplica):
            raise RolloutError("the replica can't be restarted: this runtime did not start it")
        try:
            self._run.health.check(f"starting {replica.title} again")
            again = launcher.restart(replica)
        except BaseException:
            self._replicas[replica] = launcher  # kept, so that a restart can be tried again
            raise
        self._replicas[again] = launcher
        return again

    def task_workers(self, spec: TaskSpec) -> list[TaskWorker]:
        """Start the task workers of a spec in processes outside the pools, spread over the machines. For errors see `Runtime.task_workers`."""
        if self._cluster is None or self._setups is None:
            raise DispatchError(f"{spec.label} workers can't be started: call place() first")
        setup = partial(self._setups.of_task, spec)
        workers = TaskWorkers(spec, self._run, setup, self._cluster.nodes)
        return workers.start(range(spec.count))

    def device(self) -> str:
        """Return the kind of device that ranks compute on: `cpu`, this machine's accelerator, or `accelerator` if this machine has none."""
        sizes = [self.config.gpus_per_node, *(s.gpus_per_node for s in self.config.pools.values())]
        if self.config.device == "cpu" or not any(sizes):
            return "cpu"
        import torch

        here = torch.accelerator.current_accelerator(check_available=True)
        return "accelerator" if here is None else here.type

    def address(self) -> str:
        """Return this machine's address in the cluster, or the loopback address if the cluster has a single machine."""
        nodes = [] if self._cluster is None or self._cluster.local else self._cluster.nodes()
        return node_address() if len({node.address for node in nodes}) > 1 else "127.0.0.1"

    def before_exit(self) -> None:
        """Write the timeline, if the config asks for one."""
        if self.config.timeline is None or self._cluster is None:
            return
        path = Path(self.config.timeline)
        names = {
            facts.worker: f"{processes.name} rank {rank}"
            for processes in self._processes.values()
            for rank, facts in enumerate(processes.facts)
        }
        try:
            write_timeline(path, names | {r.facts.worker: r.title for r in self._replicas})
        except Exception as error:  # noqa: BLE001 - it must not hide how the run ended
            self._logger.warning(f"runtime.timeline={str(path)!r} could not be written: {error}")
            return
        self._logger.info("timeline_written", path=str(path))

    def close(self) -> None:
        """End every process, release the reservations, and leave or stop the cluster; safe to call twice."""
        self._run.ending.close()

    def _home(self, role: str) -> Reserved:
        for reserved in self._reserved.values():
            if role in reserved.pool.roles:
                return reserved
        known = ", ".join(r for reserved in self._reserved.values() for r in reserved.pool.roles)
        raise DispatchError(
            f"no pool was placed for the role {role!r}; roles with a pool: {known or 'none'}",
            hint="call place() with a pool for every role first",
        )

    def _start_ranks(self, name: str, reserved: Reserved, setups: Setups) -> None:
        pool = reserved.pool
        training = [role for role in pool.roles if role != ROLLOUT]
        label, place = "-".join(training), self._environments.of(*training)
        parts = 2 if ROLLOUT in pool.roles else 1
        actors = [
            start_actor(
                HostProcess,
                setups.of_rank(label, rank, reserved, place),
                **reserved.options(rank, parts=parts),
            )
            for rank in range(pool.ranks)
        ]
        processes = PoolProcesses(pool, actors, self._run, label, apart=bool(place.title))
        self._processes[name] = processes
        self._run.ending.callback(processes.close)
        directory = self._cluster.directory if self._cluster is not None else None
        rendezvous = None if directory is None else f"file://{directory}/rendezvous-{name}"
        processes.begin(rendezvous)


def _fitted(wanted: Sequence[Share], cluster: Cluster) -> list[Node]:
    """Return a node for each share; retries for some seconds, since released resources become free with a delay."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        try:
            return fit(wanted, cluster.nodes())
        except PlacementError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
