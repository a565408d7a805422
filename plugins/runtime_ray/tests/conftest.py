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
    """A logger that keeps what it is told, fields too."""

    def __init__(self) -> None:
        super().__init__("heard")
        self.events: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: Any, *args: Any, **fields: Any) -> None:
        self.events.append((str(event), fields))

    def info(self, event: Any, *args: Any, **fields: Any) -> None:
        """Not kept."""


class Shared:
    """A local cluster with more logical CPUs than any test takes, started when it is first asked for."""

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
    """The shared cluster: a process is connected to one at a time, so that one serves every module it can."""
    return shared.running()


@pytest.fixture(scope="module")
def no_cluster(shared: Shared) -> None:
    """This process is connected to none; for modules that start their own."""
    shared.close()


class Probes:
    """Specs and groups of probes."""

    @staticmethod
    def pool(*roles: str, ranks: int = 1) -> Pool:
        return Pool(name="+".join(roles), roles=roles, ranks_per_node=ranks)

    @staticmethod
    def engine(role: str = "actor", attribute: str = "ProbeEngine", **context: Any) -> WorkerSpec:
        """A worker group of probes."""
        ref = PluginRef(kind="engine", name=attribute, path=str(ENGINE), attribute=attribute)
        return WorkerSpec(role=role, plugin=ref, context=PluginContext(role=role, **context))

    @staticmethod
    def rollout() -> WorkerSpec:
        """Replicas of the scripted rollout."""
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
    """Make a runtime and place pools; it is closed at the end of the test."""
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
