"""One local cluster that modules share, pools of real processes on it, and probes to run there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dovetail.dispatch import Mesh
from dovetail.interfaces import PluginContext, PluginRef, WorkerSpec
from dovetail.sections import Pool
from dovetail_runtime_ray.cluster import Cluster
from dovetail_runtime_ray.config import RayConfig
from dovetail_runtime_ray.runtime import RayRuntime

HERE = Path(__file__).parent
ENGINE = HERE / "probe_engine.py"
ROLLOUT = HERE / "probe_rollout.py"


class Heard(logging.Logger):
    """A logger that keeps events with their fields."""

    def __init__(self) -> None:
        super().__init__("heard")
        self.events: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: Any, *args: Any, **fields: Any) -> None:
        self.events.append((str(event), fields))

    def info(self, event: Any, *args: Any, **fields: Any) -> None:
        """Drop the event."""


class Shared:
    """A local cluster with more logical CPUs than any test takes, started on first use."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    def running(self) -> Cluster:
        if self._cluster is None:
            self._cluster = Cluster(RayConfig(), 8, Heard())
        return self._cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def cluster(shared: Shared) -> Cluster:
    """The cluster that modules share, since a process can be connected to only one cluster at a time."""
    return shared.running()


@pytest.fixture(scope="module")
def no_cluster(shared: Shared) -> None:
    """Disconnect this process, for modules that start a cluster of their own."""
    shared.close()


class Probes:
    """Specs and worker groups of probes."""

    @staticmethod
    def pool(*roles: str, ranks: int = 1) -> Pool:
        return Pool(name="+".join(roles), roles=roles, ranks_per_node=ranks)

    @staticmethod
    def engine(role: str = "actor", attribute: str = "ProbeEngine", **context: Any) -> WorkerSpec:
        """The spec of a worker group of probes."""
        ref = PluginRef(kind="engine", name=attribute, path=str(ENGINE), attribute=attribute)
        return WorkerSpec(role=role, plugin=ref, context=PluginContext(role=role, **context))

    @staticmethod
    def rollout() -> WorkerSpec:
        """The spec of replicas of the scripted rollout."""
        ref = PluginRef(
            kind="rollout", name="ProbeRollout", path=str(ROLLOUT), attribute="ProbeRollout"
        )
        return WorkerSpec(role="rollout", plugin=ref, context=PluginContext(role="rollout"))

    def group(
        self, runtime: RayRuntime, role: str = "actor", ranks: int = 2, **context: Any
    ) -> Any:
        return runtime.worker_group(self.engine(role, **context), Mesh(dp=ranks))


@pytest.fixture(scope="session")
def probes() -> Probes:
    return Probes()


Start = Callable[..., RayRuntime]


@pytest.fixture(scope="module")
def start_for_module(cluster: Cluster) -> Iterator[Start]:
    yield from _starting()


@pytest.fixture
def start(cluster: Cluster) -> Iterator[Start]:
    """A function that makes a runtime and places pools; the runtime is closed at the end of the test."""
    yield from _starting()


def _starting() -> Iterator[Start]:
    with ExitStack() as running:

        def make(*pools: Pool, run_directory: Path | None = None, **config: Any) -> RayRuntime:
            context = PluginContext(run_directory=run_directory, logger=Heard())
            runtime = RayRuntime(RayConfig(**config), context)
            running.callback(runtime.close)
            runtime.start()
            runtime.place(pools)
            return runtime

        yield make
