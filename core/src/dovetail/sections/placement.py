"""Placement of roles: pools of ranks, and the base of every runtime's config. This module does not import a runtime."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from dovetail.errors import DovetailError, PlanError, nearest
from dovetail.sections.fields import PluginSection

TRANSPORT_WITHIN_A_PROCESS = "in_process"


@attrs.frozen(kw_only=True)
class Pool:
    """Some ranks, and the roles that share them.

    Training roles of one pool run in the same processes, one for each rank; rollout replicas have separate processes, on the same
    accelerators if they share the pool.
    """

    name: str
    """Name of the pool in the config."""
    roles: tuple[str, ...]
    """Roles in the pool: `actor`, `critic`, `ref`, `rollout`, …"""
    nodes: int = 1
    """Number of machines."""
    ranks_per_node: int = 1
    """Training processes on each machine: one for each accelerator, or the configured number on CPUs."""
    accelerators: bool = False
    """Whether every rank has its own accelerator; otherwise ranks compute on CPUs."""

    @property
    def ranks(self) -> int:
        """Number of ranks that a training worker group has in the pool."""
        return self.nodes * self.ranks_per_node

    def described(self) -> str:
        """Return the size of the pool as text, such as `2 nodes × 8 accelerators`."""
        unit = "accelerator" if self.accelerators else "CPU process"
        plural = "accelerators" if self.accelerators else "CPU processes"
        each = f"{self.ranks_per_node} {unit if self.ranks_per_node == 1 else plural}"
        return each if self.nodes == 1 else f"{self.nodes} nodes × {each}"


@attrs.frozen(kw_only=True)
class RuntimeSection(PluginSection):
    """Base of every runtime's config."""

    environments: dict[str, str] = attrs.field(factory=dict)
    """Separate Python environments by role, such as `{rollout: /opt/vllm}`: the path of a virtual environment or of its interpreter. Needs
    a runtime that starts processes, such as `ray`."""

    @property
    def in_process(self) -> bool:
        """Whether every worker lives in the controller's own process."""
        return True

    @property
    def roles_apart(self) -> frozenset[str]:
        """Roles whose processes run in another Python environment, in which the required packages are checked."""
        return frozenset(self.environments)

    @classmethod
    def describe_environment(
        cls, role: str, path: str, plugins: Iterable[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the entry for a role's environment in the record of a run's plugins, `plugins.lock.json`.

        The entry has `path`; also `python` and `packages` if the environment is on this machine.

        Args:
            role: the role whose processes run in the environment.
            path: the path as written in the config.
            plugins: the entries of the run's plugins in `plugins.lock.json`.
        """
        return {"path": path}

    def unfit_environments(
        self, plugins: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> Iterator[DovetailError]:
        """Yield an error for each difference that keeps a role's Python environment from working with this process's.

        Args:
            plugins: kind, name and distribution of the plugins that the processes of a role load, by role.
        """
        yield from ()

    def pools_for(self, roles: Sequence[str]) -> tuple[Pool, ...]:
        """Return the pools of these roles. Every role is in exactly one pool, and every pool has a role.

        Raises:
            PlanError: the pool sizes are invalid, a pool or environment names an unknown role, or the runtime can't run roles in
                other Python environments.
        """
        check_environments(self.environments, roles)
        for role, path in self.environments.items():
            raise PlanError(
                f"runtime.environments.{role}={path!r} asks for processes with another interpreter, but runtime "
                f"{self.name!r} runs every role in this process",
                hint="set runtime.name=ray, or leave runtime.environments out",
            )
        return (Pool(name="this process", roles=tuple(roles)),)

    def shortage(self, pools: Sequence[Pool]) -> DovetailError | None:
        """Return an error if a run with these pools can't start on this machine; None if the run can, or would use other machines."""
        return None

    def default_transport(self, *, joined: bool = False) -> str:
        """Return the name of the weight transport for configs that name none.

        Called if `in_process` is False, or if the engine loads weights in the replicas' own processes.

        Args:
            joined: whether the replicas connect to engines that already run elsewhere.
        """
        return TRANSPORT_WITHIN_A_PROCESS


def check_environments(
    environments: Mapping[str, object], roles: Sequence[str], *, key: str = "environments"
) -> None:
    """Check that each process environment (`environments`: role → settings) is for a role that the run has.

    `key` is the key below `runtime` that the error names.

    Raises:
        PlanError: an environment's role does not exist; the error names it and the nearest role.
    """
    for role in environments:
        if role not in roles:
            near = nearest(role, roles)
            raise PlanError(
                f"runtime.{key}.{role} is for a role that this run does not have; the run's roles are {', '.join(roles)}",
                hint=f"did you mean {near!r}?" if near else f"leave runtime.{key}.{role} out",
            )
