"""The config of the Ray runtime, and the pools that follow from it. This module does not import Ray."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from socket import gethostname
from typing import Any, Literal

import attrs

from dovetail.errors import DovetailError, PlacementError, PlanError, nearest
from dovetail.sections import (
    AT_LEAST_ONE,
    ONE_OR_MANY,
    VERBATIM,
    Pool,
    RuntimeSection,
    Validator,
    check_environments,
)
from dovetail_runtime_ray.capacity import Node, fit, shares

METHODS_OF_ENGINES = (
    "forward",
    "update",
    "weight_manifest",
    "send_weights",
    "offload",
    "onload",
    "free_cache",
    "save",
    "begin_save",
    "finish_save",
    "load",
    "export",
    "write_weights",
    "average_weights",
)
METHODS_OF_REPLICAS = (
    "submit",
    "check_manifest",
    "receive_weights",
    "score",
    "metrics",
    "sleep",
    "wake",
    "abort",
    "pause",
    "resume",
    "reset_cache",
)
"""The methods that a run calls on rollout replicas, for which time limits can be set."""

_COUNT = attrs.validators.optional(attrs.validators.ge(0))
_EACH_ABOVE_ZERO: Validator = attrs.validators.deep_mapping(
    attrs.validators.instance_of(str), attrs.validators.gt(0)
)


def _each_a_method(_: object, field: attrs.Attribute[Any], limits: dict[str, float]) -> None:
    known = METHODS_OF_ENGINES + METHODS_OF_REPLICAS
    for name in limits:
        if name not in known:
            near = nearest(name, known)
            raise ValueError(
                f"{field.name}.{name} limits a method that no run calls; "
                + (f"did you mean {near!r}?" if near else f"expected some of {', '.join(known)}")
            )


@attrs.frozen(kw_only=True)
class PoolSection:
    """Ranks of a pool and the roles that share them; settings left out are taken from the runtime."""

    roles: tuple[str, ...] = attrs.field(default=(), metadata={ONE_OR_MANY: True})
    """Roles of the pool: `actor`, `critic`, `ref`, `rollout`, or a name of `roles`; each role in one pool only."""
    nodes: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Number of machines; absent: `runtime.nodes`."""
    gpus_per_node: int | None = attrs.field(default=None, validator=_COUNT)
    """Accelerators on each machine, one process each; 0 computes on CPUs; absent: `runtime.gpus_per_node`."""
    workers_per_node: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Processes on each machine of a pool that computes on CPUs; absent: `runtime.workers_per_node`."""


@attrs.frozen(kw_only=True)
class RayConfig(RuntimeSection):
    """Config of the Ray runtime: workers are Ray actors, in processes on one or several machines."""

    nodes: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of machines."""
    gpus_per_node: int | None = attrs.field(default=None, validator=_COUNT)
    """Accelerators on each machine, one training process each; absent or 0 computes on CPUs."""
    workers_per_node: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Training processes on each machine without accelerators; absent: 1."""
    cpus_per_worker: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """CPU cores that each training process reserves and computes with; absent: each reserves 1, and the machine's cores
    are divided evenly."""
    pools: dict[str, PoolSection] = attrs.field(factory=dict)
    """Separate pools by name, such as `{train: {roles: [actor, ref], gpus_per_node: 6}, generate: {roles: rollout,
    gpus_per_node: 2}}`. Roles that no pool names share one further pool, with the sizes that `runtime` itself sets."""
    address: str | None = None
    """Address of an existing cluster: `host:port`, or `auto` for a cluster on this machine. Absent: the environment
    variable RAY_ADDRESS, or else a local cluster that the run starts and stops."""
    ray_init: dict[str, Any] = attrs.field(factory=dict, metadata={VERBATIM: True})
    """Further keywords of `ray.init`, such as `object_store_memory`; keywords that the runtime sets itself take precedence, with a
    warning."""
    timeline: str | None = None
    """File for a timeline of the run's calls, to open in Perfetto (ui.perfetto.dev); absent: none."""
    start_timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Seconds that processes may take to start, including loading models."""
    time_limit: float = attrs.field(default=7200.0, validator=attrs.validators.gt(0))
    """Seconds that one call on a group of workers may take, and that a rollout replica may be silent. After that the
    run ends, and shows the stacks of the silent processes."""
    time_limits: dict[str, float] = attrs.field(
        factory=dict, validator=[_EACH_ABOVE_ZERO, _each_a_method]
    )
    """Time limits of single methods in seconds, such as `{update: 600, save: 1800}`."""
    failure_grace: float = attrs.field(default=10.0, validator=attrs.validators.ge(0))
    """Seconds that the other ranks may continue after a rank has failed; then all processes are ended."""
    env_vars: dict[str, str] = attrs.field(factory=dict)
    """Environment variables of every worker process."""
    runtime_envs: dict[str, dict[str, Any]] = attrs.field(factory=dict, metadata={VERBATIM: True})
    """Ray's `runtime_env` for each role whose processes run in an environment made by Ray, such as
    `{rollout: {pip: [vllm==0.24.0]}}` or `{rollout: {conda: vllm}}`. If an environment exists already, name it in
    `environments`."""
    device: Literal["auto", "cpu"] = "auto"
    """Device to compute on: `auto` uses accelerators if `gpus_per_node` asks for them, `cpu` never does."""

    @property
    def in_process(self) -> bool:
        """Whether workers run in the controller's process; always False."""
        return False

    @property
    def roles_apart(self) -> frozenset[str]:
        """The roles with a Python environment of their own: those named in `environments` or `runtime_envs`."""
        return frozenset(self.environments) | frozenset(self.runtime_envs)

    @property
    def own_cluster(self) -> bool:
        """Whether the run starts and stops a cluster of its own."""
        return self.wanted_address is None

    @property
    def wanted_address(self) -> str | None:
        """Address of the existing cluster to join, from the config or RAY_ADDRESS; None for a cluster of the run's own."""
        return self.address or os.environ.get("RAY_ADDRESS") or None

    @classmethod
    def describe_environment(
        cls, role: str, path: str, plugins: Iterable[Mapping[str, Any]]
    ) -> dict[str, Any]:
        from dovetail_runtime_ray.isolation import describe_environment

        return describe_environment(role, path, plugins)

    def unfit_environments(
        self, plugins: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> Iterator[DovetailError]:
        from dovetail_runtime_ray.isolation import unfit_environment

        for role, path in self.environments.items():
            yield from unfit_environment(role, path, plugins[role])

    def pools_for(self, roles: Sequence[str]) -> tuple[Pool, ...]:
        """Return the configured pools, and one pool for the remaining roles. See `RuntimeSection`."""
        check_environments(self.environments, roles)
        check_environments(self.runtime_envs, roles, key="runtime_envs")
        owner: dict[str, str] = {}
        for name, section in self.pools.items():
            _check_roles(name, section.roles, roles)
            for role in section.roles:
                other = owner.setdefault(role, name)
                if other != name:
                    raise PlanError(
                        f"role {role!r} is in two pools, {other!r} and {name!r}",
                        hint=f"remove it from the roles of runtime.pools.{other} or runtime.pools.{name}",
                    )
        pools = [self._pool(name, section) for name, section in self.pools.items()]
        rest = tuple(role for role in roles if role not in owner)
        if rest:
            name = "others" if pools else "all"
            if name in self.pools:
                raise PlanError(
                    f"runtime.pools.{name} has a reserved name: the run makes a pool {name!r} for the roles that no configured pool "
                    f"lists, here {', '.join(rest)}",
                    hint="rename the pool, or list every role in a pool",
                )
            pools.append(self._pool(name, PoolSection(roles=rest)))
        self._check_shared(pools)
        return tuple(pools)

    def shortage(self, pools: Sequence[Pool]) -> DovetailError | None:
        """Return the error if the run starts its own cluster and the pools do not fit on this machine, else None. See `RuntimeSection`."""
        if not self.own_cluster:
            return None
        import torch

        wanted = shares(pools, self.cpus_per_worker)
        here = {
            "GPU": self.ray_init.get("num_gpus", torch.accelerator.device_count()),
            "CPU": max(os.cpu_count() or 1, sum(share.needs["CPU"] for share in wanted)),
        }
        node = Node(node_id="", address="127.0.0.1", host=gethostname(), total=here, free=here)
        try:
            fit(wanted, [node])
        except PlacementError as error:
            return error
        return None

    def default_transport(self, *, joined: bool = False) -> str:
        """Return the weight transport for a config without one. See `RuntimeSection`.

        If actor and rollout share a pool: `cuda_ipc` on accelerators, `shared_memory` on CPUs. Otherwise `shared_memory` on one machine,
        unless both compute on accelerators; on several machines, or between accelerators, `nccl` if both compute on the same kind of
        device (it uses gloo between CPUs), else `disk`. Joined engines count as a separate pool on accelerators.

        Args:
            joined: whether the rollout connects to engines that already run elsewhere.
        """
        actor, rollout = self._home("actor"), self._home("rollout")
        if actor.name == rollout.name and not joined:
            return "cuda_ipc" if actor.accelerators else "shared_memory"
        sizes = [section.nodes or self.nodes for section in self.pools.values()] or [self.nodes]
        one_machine = max(sizes) == 1 and (self.own_cluster or not self.pools)
        if one_machine and not (actor.accelerators and (joined or rollout.accelerators)):
            return "shared_memory"
        alike = actor.accelerators if joined else actor.accelerators == rollout.accelerators
        return "nccl" if alike else "disk"

    def _check_shared(self, pools: Sequence[Pool]) -> None:
        """Check that no role has two environments, and that roles that share processes share an environment."""
        for role in self.environments.keys() & self.runtime_envs.keys():
            raise PlanError(
                f"the role {role} has two environments: runtime.environments.{role}={self.environments[role]!r} and "
                f"runtime.runtime_envs.{role}",
                hint="leave one of them out",
            )
        for pool in pools:
            training = [role for role in pool.roles if role != "rollout"]
            named = [self.environments.get(r) or self.runtime_envs.get(r) for r in training]
            if any(each != named[0] for each in named):
                listed = ", ".join(
                    f"{r}: {n or 'none'}" for r, n in zip(training, named, strict=True)
                )
                raise PlanError(
                    f"{', '.join(training)} share the processes of pool {pool.name!r}, but have different environments ({listed})",
                    hint="set the same environment for all of them in runtime.environments, or put them into separate pools",
                )

    def _home(self, role: str) -> Pool:
        """Return the pool of a role: its configured pool, or else the pool of all remaining roles."""
        for name, section in self.pools.items():
            if role in section.roles:
                return self._pool(name, section)
        return self._pool("", PoolSection(roles=(role,)))

    def _pool(self, name: str, section: PoolSection) -> Pool:
        key = f"runtime.pools.{name}" if name in self.pools else "runtime"
        gpus = self.gpus_per_node if section.gpus_per_node is None else section.gpus_per_node
        # `workers_per_node` alone makes a pool of CPUs, whatever `runtime.gpus_per_node` is.
        if section.workers_per_node is not None and section.gpus_per_node is None:
            gpus = 0
        workers = section.workers_per_node
        if workers is None and (not gpus or section.gpus_per_node is None):
            workers = self.workers_per_node
        if gpus and self.device == "cpu":
            raise PlanError(
                f"{key}.gpus_per_node={gpus} asks for accelerators, but runtime.device='cpu' forbids them",
                hint="set workers_per_node in place of gpus_per_node, or leave runtime.device out",
            )
        if gpus and workers not in {None, gpus}:
            raise PlanError(
                f"{key} has gpus_per_node={gpus} and workers_per_node={workers}, "
                "but each accelerator has exactly one process",
                hint="leave workers_per_node out",
            )
        return Pool(
            name=name,
            roles=section.roles,
            nodes=section.nodes or self.nodes,
            ranks_per_node=gpus or workers or 1,
            accelerators=bool(gpus),
        )


def _check_roles(name: str, named: Sequence[str], roles: Sequence[str]) -> None:
    if not named:
        raise PlanError(
            f"runtime.pools.{name} names no role",
            hint=f"set runtime.pools.{name}.roles to some of {', '.join(roles)}",
        )
    for role in named:
        if role in roles:
            continue
        near = nearest(role, roles)
        raise PlanError(
            f"runtime.pools.{name} names the role {role!r}, which this run does not have; its roles are {', '.join(roles)}",
            hint=(f"did you mean {near!r}? Otherwise " if near else "")
            + f"remove {role!r} from runtime.pools.{name}.roles",
        )
    if len(set(named)) < len(named):
        raise PlanError(f"runtime.pools.{name}.roles names a role twice: {', '.join(named)}")
