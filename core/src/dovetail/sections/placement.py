"""Where roles live: pools of ranks, and what a runtime's config says of them. Nothing here imports a runtime."""

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

    Training roles of one pool run in the same processes, one a rank; rollout replicas have processes of their own,
    on the same accelerators where they are in the same pool.
    """

    name: str
    """Name of the pool in the config."""
    roles: tuple[str, ...]
    """Roles that live here: `actor`, `critic`, `ref`, `rollout`, …"""
    nodes: int = 1
    """Number of machines."""
    ranks_per_node: int = 1
    """Training processes on each machine: one an accelerator, or as many as the config gives to CPUs."""
    accelerators: bool = False
    """Whether every rank has an accelerator of its own; otherwise it computes on CPUs."""

    @property
    def ranks(self) -> int:
        """Number of ranks of a training group that lives here."""
        return self.nodes * self.ranks_per_node

    def described(self) -> str:
        """Return its size in words, such as `2 nodes × 8 accelerators`."""
        unit = "accelerator" if self.accelerators else "CPU process"
        plural = "accelerators" if self.accelerators else "CPU processes"
        each = f"{self.ranks_per_node} {unit if self.ranks_per_node == 1 else plural}"
        return each if self.nodes == 1 else f"{self.nodes} nodes × {each}"


@attrs.frozen(kw_only=True)
class RuntimeSection(PluginSection):
    """Base of every runtime's config."""

    environments: dict[str, str] = attrs.field(factory=dict)
    """Roles whose processes run in a Python environment of their own, such as `{rollout: /opt/vllm}`: the path of a
    virtual environment or of its interpreter. Needs a runtime that starts processes, such as `ray`."""

    @property
    def in_process(self) -> bool:
        """Whether every worker lives in the controller's own process."""
        return True

    @property
    def roles_apart(self) -> frozenset[str]:
        """Roles whose processes run in another Python environment, where their needs are checked."""
        return frozenset(self.environments)

    @classmethod
    def describe_environment(
        cls, role: str, path: str, plugins: Iterable[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return a lock's entry for the environment of a role: its `path`; where it is on this machine, its `python` and `packages` too.

        Args:
            role: the role whose processes run there.
            path: the path as written in the config.
            plugins: the plugin entries of the run's lock.
        """
        return {"path": path}

    def unfit_environments(
        self, plugins: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> Iterator[DovetailError]:
        """Yield the differences that keep roles' environments from working with this one.

        Args:
            plugins: kind, name and distribution of what the processes of each role load, by role.
        """
        yield from ()

    def pools_for(self, roles: Sequence[str]) -> tuple[Pool, ...]:
        """Return the pools of these roles: every role is in exactly one pool, and no pool is without a role.

        Raises:
            PlanError: the sizes make no sense, a pool or an environment names a role that is not there, or the runtime
                has no processes to run in another environment.
        """
        check_environments(self.environments, roles)
        for role, path in self.environments.items():
            raise PlanError(
                f"runtime.environments.{role}={path!r} asks for processes with another interpreter, and runtime "
                f"{self.name!r} runs every role in this one",
                hint="set runtime.name=ray, or leave runtime.environments out",
            )
        return (Pool(name="this process", roles=tuple(roles)),)

    def shortage(self, pools: Sequence[Pool]) -> DovetailError | None:
        """Return why a run with these pools can't start on this machine; None where it can, or would run on other machines."""
        return None

    def default_transport(self, *, joined: bool = False) -> str:
        """Return the default weight transport, for configs that name none.

        It is asked where `in_process` is False, or the engine loads weights in the replicas' own processes.

        Args:
            joined: whether the replicas join engines that run already, elsewhere.
        """
        return TRANSPORT_WITHIN_A_PROCESS


def check_environments(
    environments: Mapping[str, object], roles: Sequence[str], *, key: str = "environments"
) -> None:
    """Check that every environment belongs to a role of the run; `key` is the config key for messages.

    Raises:
        PlanError: an environment's role does not exist; names it and the nearest one.
    """
    for role in environments:
        if role not in roles:
            near = nearest(role, roles)
            raise PlanError(
                f"runtime.{key}.{role} is for a role that this run does not have; its roles are {', '.join(roles)}",
                hint=f"did you mean {near!r}?" if near else f"leave runtime.{key}.{role} out",
            )
