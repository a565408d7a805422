"""The Python environment of each role: the interpreter of its processes, and whether it fits the controller's."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import ray

from dovetail.errors import PlacementError
from dovetail.plugins import ISOLATED
from dovetail_runtime_ray.config import RayConfig
from dovetail_runtime_ray.isolation import (
    RUNTIME,
    EnvironmentInfo,
    environment_problems,
    facts_here,
    facts_of,
    interpreter_of,
    plugins_of_roles,
    require_environment,
)
from dovetail_runtime_ray.reserve import Reserved
from dovetail_runtime_ray.wire import RoleEnvironment

PACKAGES = (RUNTIME, "ray")
"""Distributions, besides core, that must have the same version in all environments of a run."""
_BETWEEN_ACCELERATORS = frozenset({"nccl", "cuda_ipc"})
_EXAMINE_SECONDS = 180.0


class Environments:
    """The Python environments of a run's processes.

    Args:
        config: the config that names the environments.
        lock: the run's plugin lock, which records its plugins with versions and hashes (`plugins.lock.json`); None outside a run.
    """

    def __init__(self, config: RayConfig, lock: Mapping[str, Any] | None) -> None:
        self._config = config
        self._locked: list[Mapping[str, Any]] = list(lock["plugins"]) if lock else []
        self._here: dict[tuple[str, ...], EnvironmentInfo] = {}

    def of(self, *roles: str) -> RoleEnvironment:
        """Return the environment of processes that hold these roles; the config gives all these roles the same environment."""
        role = next((r for r in roles if self._names(r)), None)
        if role is None:
            return RoleEnvironment()
        plugins = plugins_of_roles(roles, self._locked)
        controller = asdict(self._facts(roles))
        if role in self._config.runtime_envs:
            given = dict(self._config.runtime_envs[role])
            variables = {**given.pop("env_vars", {}), ISOLATED: f"runtime_envs.{role}"}
            return RoleEnvironment(
                title=f"runtime.runtime_envs.{role}",
                runtime_env=given,
                env_vars=variables,
                controller=controller,
                plugins=plugins,
            )
        path = self._config.environments[role]
        interpreter = interpreter_of(path, f"runtime.environments.{role}", exists=False)
        return RoleEnvironment(
            title=f"runtime.environments.{role}={path!r}",
            runtime_env={"py_executable": shlex.quote(str(interpreter))},
            env_vars={ISOLATED: path},
            controller=controller,
            plugins=plugins,
        )

    def check(self, reserved: Sequence[Reserved]) -> None:
        """Check every interpreter that the config names, on every machine where it will run.

        Ray would wait forever for a process whose interpreter does not exist.

        Raises:
            ConfigError: an interpreter does not exist.
            PluginNeedsError: an environment lacks a package that a plugin needs; says how to install the package.
            PluginIncompatibleError: an environment differs from the controller's; names both values.
        """
        homes = {role: place for place in reserved for role in place.pool.roles}
        across = {item["name"] for item in self._locked if item["kind"] == "weight_transport"}
        for role, path in self._config.environments.items():
            if role not in homes:
                continue
            key, home = f"runtime.environments.{role}", homes[role]
            wanted = plugins_of_roles([role], self._locked)
            for there, where in self._examined(home, path, key, wanted):
                trainer = self._facts((role,))
                accelerators = (
                    role == "rollout"
                    and home.pool.accelerators
                    and bool(across & _BETWEEN_ACCELERATORS)
                )
                require_environment(
                    f"{key}={path!r}{where}",
                    environment_problems(trainer, there, accelerators=accelerators),
                )

    def _names(self, role: str) -> bool:
        return role in self._config.environments or role in self._config.runtime_envs

    def _facts(self, roles: Sequence[str]) -> EnvironmentInfo:
        key = tuple(roles)
        if key not in self._here:
            self._here[key] = facts_here(plugins_of_roles(roles, self._locked), PACKAGES)
        return self._here[key]

    def _examined(
        self, home: Reserved, path: str, key: str, wanted: Sequence[Mapping[str, Any]]
    ) -> list[tuple[EnvironmentInfo, str]]:
        """Return a description of an interpreter's environment on each of a pool's machines.

        Args:
            home: the pool's reserved resources.
            path: the path of the environment, as in the config.
            key: the config's key, for errors.
            wanted: the plugins to describe, as entries of the plugin lock.

        Returns:
            For each machine: the environment, and a text that names the machine in errors; the text is empty for this machine.
        """
        mine = ray.get_runtime_context().get_node_id()
        found = []
        for index, node in enumerate(home.nodes):
            if node.node_id == mine:
                found.append((facts_of(interpreter_of(path, key), wanted, PACKAGES), ""))
                continue
            options = home.options(index * home.pool.ranks_per_node, parts=0)
            look: Any = ray.remote(_facts_there).options(**options)
            try:
                facts = ray.get(
                    look.remote(path, key, list(wanted), PACKAGES), timeout=_EXAMINE_SECONDS
                )
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.GetTimeoutError as error:
                raise PlacementError(
                    f"the environment {key}={path!r} on {node.host} ({node.address}) could not be examined within {_EXAMINE_SECONDS:g} seconds"
                ) from error
            found.append((EnvironmentInfo(**facts), f" on {node.host} ({node.address})"))
        return found


def _facts_there(
    path: str, key: str, plugins: list[Mapping[str, Any]], packages: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of `facts_of` for an interpreter on this machine; runs as a Ray task on another machine than the controller's."""
    return asdict(facts_of(interpreter_of(path, key), plugins, packages))
