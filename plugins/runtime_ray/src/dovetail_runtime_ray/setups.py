"""The set-up that each process gets first: its rank, Python environment, environment variables, number of threads, and more."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from dovetail.interfaces import TaskSpec
from dovetail_runtime_ray.config import RayConfig
from dovetail_runtime_ray.reserve import Reserved
from dovetail_runtime_ray.wire import ProcessSetup, RoleEnvironment

_DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that the controller sets if kernels must be deterministic; workers need the same value."""


@attrs.frozen(kw_only=True)
class Setups:
    """Factory of the set-ups of a run's processes."""

    config: RayConfig
    reserved: Mapping[str, Reserved]
    """The reserved resources of every pool of the run, by the pool's name."""
    run_directory: str | None
    """Directory of `logs/`; None outside a run."""
    plugins: dict[str, Any] | None
    """The controller's plugins (from `plugins_here`), with which processes in its environment compare theirs; None outside a run."""
    local: bool
    """Whether the run started the cluster, on this machine's loopback interface."""

    def of_rank(
        self, label: str, rank: int, home: Reserved, place: RoleEnvironment
    ) -> ProcessSetup:
        """Return the set-up of a training rank or a rollout replica.

        Args:
            label: the prefix of the process's files in `logs/`.
            rank: the rank in the pool, or the replica's number.
            home: the reserved resources of the pool.
            place: the environment of the process.
        """
        return self._setup(
            label=label,
            rank=rank,
            accelerator=home.pool.accelerators,
            # There may be more replicas than ranks.
            threads=self._threads(home, rank % home.pool.ranks),
            deterministic=_deterministic(),
            place=place,
            spread=len({node.node_id for r in self.reserved.values() for node in r.nodes}) > 1,
            machine_rank=rank % home.pool.ranks_per_node,
        )

    def of_task(self, spec: TaskSpec, number: int) -> ProcessSetup:
        """Return the set-up of the task worker with this number."""
        return self._setup(
            label=spec.label,
            rank=number,
            accelerator=spec.accelerators > 0,
            threads=max(1, int(spec.cpus)),
            deterministic=False,
            visible=None if spec.accelerators else (),
        )

    def _setup(self, *, threads: int, deterministic: bool, **fields: Any) -> ProcessSetup:
        # Progress bars are turned off, since they would only fill the log files.
        environment = {"OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
        if self.local:
            environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if deterministic and _DETERMINISTIC in os.environ:
            environment[_DETERMINISTIC] = os.environ[_DETERMINISTIC]
        return ProcessSetup(
            working_directory=str(Path.cwd()),
            run_directory=self.run_directory,
            environment=environment | self.config.env_vars,
            threads=threads,
            deterministic=deterministic,
            plugins=self.plugins,
            **fields,
        )

    def _threads(self, home: Reserved, rank: int) -> int:
        """Return the number of CPU threads of a rank's process: `cpus_per_worker`, or else an equal share of its node's cores.

        The cores are divided by the ranks of all pools on the node. A rank counts once, since the roles in its process take turns.
        """
        if self.config.cpus_per_worker is not None:
            return int(self.config.cpus_per_worker)
        node = home.node(rank)
        ranks = sum(
            other.pool.ranks_per_node
            for other in self.reserved.values()
            for place in other.nodes
            if place.node_id == node.node_id
        )
        cores = node.total.get("CPU", 1.0)
        if self.local:
            cores = min(cores, float(os.cpu_count() or 1))
        return max(1, int(cores // ranks))


def _deterministic() -> bool:
    """Return whether the controller allows only deterministic kernels, as `trainer.deterministic` sets it."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.are_deterministic_algorithms_enabled())
