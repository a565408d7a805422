"""The connection to Ray: joins a cluster, or starts one for this run alone and removes it completely afterwards."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import worker

from dovetail.errors import PlacementError, nearest
from dovetail.interfaces import Logger
from dovetail.workers import environment_variables
from dovetail_runtime_ray import sweeper
from dovetail_runtime_ray.capacity import Node
from dovetail_runtime_ray.config import RayConfig

REACH_SECONDS = 5.0
"""Seconds that an existing cluster's head may take to accept a connection."""


SETTLE_SECONDS = 3.0
"""Seconds that a local cluster's processes may take to end after the cluster was stopped."""
_LONGEST_PLACE = 30
"""Maximum length of the temporary directory's path: Ray puts sockets below it, and a socket's path has at most 107 characters."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
_NONE_AHEAD = {"RAY_prestart_worker_first_driver": "0"}
"""Stops Ray from starting one idle worker a CPU: actors with their own environment variables, as in this runtime, can't use them."""
_OURS = ("address",)
"""Keywords of `ray.init` that the runtime sets itself."""
_OF_A_NEW_CLUSTER = (
    "num_cpus",
    "num_gpus",
    "object_store_memory",
    "include_dashboard",
    "_temp_dir",
)


class Cluster:
    """A connection to Ray.

    Attributes:
        local: whether this run started the cluster, on this machine's loopback interface.
        directory: the private directory of the local cluster that this run started; None if the run joined a cluster.
    """

    def __init__(self, config: RayConfig, cpus: int, logger: Logger) -> None:
        """Connect to Ray, unless this process is connected already.

        Args:
            config: the address and the keywords of `ray.init`.
            cpus: number of CPUs that the run reserves; a local cluster has at least as many.
            logger: the logger of the run, for warnings about keywords that have no effect, and for Ray's own output.

        Raises:
            PlacementError: the cluster can't be reached, or Ray refuses to start.
        """
        self.local = False
        self.directory: str | None = None
        self._joined = ray.is_initialized()
        """Whether this process was connected to Ray before, and so stays connected after `close`."""
        self._sweeper: subprocess.Popen[bytes] | None = None
        self._unroute: Callable[[], None] = _nothing
        if self._joined:
            return
        given = _given(config, logger)
        if not given.get("log_to_driver"):
            self._unroute = _routed(logger)
        if config.own_cluster:
            self._start(given, cpus)
        else:
            self._join(str(config.wanted_address), given)

    def nodes(self) -> list[Node]:
        """Return the living nodes, with the free resources of each."""
        from ray._private import state

        api: Any = ray
        known_free: Any = state.available_resources_per_node
        deadline = time.monotonic() + 2.0
        while True:
            alive = [node for node in api.nodes() if node["Alive"]]
            free = known_free()
            if all(node["NodeID"] in free for node in alive) or time.monotonic() > deadline:
                break
            time.sleep(0.05)  # a new node has not reported its resources yet
        return [
            Node(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                host=node["NodeManagerHostname"],
                total=_counted(node["Resources"]),
                free=_counted(free.get(node["NodeID"], {})),
            )
            for node in sorted(alive, key=lambda node: str(node["NodeManagerAddress"]))
        ]

    def close(self) -> None:
        """Disconnect; a local cluster is stopped and its files are removed. Safe to call twice."""
        if self._joined:
            return
        self._joined = True
        ray.shutdown()
        self._unroute()
        if self.directory is not None:
            sweeper.sweep(self.directory, SETTLE_SECONDS)
        if self._sweeper is not None:
            self._sweeper.kill()
            self._sweeper.wait()

    def _start(self, given: Mapping[str, Any], cpus: int) -> None:
        self.local = True
        self.directory = _private_directory()
        self._sweeper = _watched(self.directory)
        settings = {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "num_cpus": max(os.cpu_count() or 1, cpus),
            "_temp_dir": self.directory,
            **given,
        }
        settled = {**_QUIET, **_NONE_AHEAD, sweeper.MARK: self.directory}
        with _environment(settled), _loopback():
            try:
                _init(address="local", **settings)
            except BaseException:
                self.close()
                raise

    def _join(self, address: str, given: Mapping[str, Any]) -> None:
        if address.startswith("ray://"):
            raise PlacementError(
                f"runtime.address={address!r} is an address of Ray Client, which does not support worker groups",
                hint="run on a node of the cluster with runtime.address=auto, or with `ray job submit`",
            )
        place = found_here() if address == "auto" else address
        check_reachable(place)
        with _environment(_QUIET):
            try:
                _init(
                    address=place,
                    **{"log_to_driver": False, "logging_level": logging.ERROR, **given},
                )
            except ConnectionError as error:
                raise unreachable(place, str(error).splitlines()[0]) from error


def _init(**settings: Any) -> None:
    try:
        ray.init(**settings)
    except ConnectionError:
        raise
    except RuntimeError as error:
        unknown = str(error)
        if "keyword" not in unknown:
            raise PlacementError(f"Ray did not start: {unknown}") from error
        raise PlacementError(
            f"runtime.ray_init has keywords that ray.init does not know: {unknown}",
            hint=_keyword_hint(settings),
        ) from error
    except (ValueError, TypeError, OSError) as error:
        raise PlacementError(
            f"Ray did not start: {type(error).__name__}: {error}",
            hint="check runtime.ray_init",
        ) from error


def _keyword_hint(settings: Mapping[str, Any]) -> str | None:
    import inspect

    known = [name for name in inspect.signature(ray.init).parameters if name != "kwargs"]
    for name in settings:
        near = nearest(name, known)
        if name not in known and not name.startswith("_") and near:
            return f"for {name!r}, did you mean {near!r}?"
    return None


def _given(config: RayConfig, logger: Logger) -> dict[str, Any]:
    """Return the config's keywords for `ray.init`, without keywords that have no effect; these are logged as warnings."""
    given = dict(config.ray_init)
    refused = {name: "runtime.address sets it" for name in _OURS if name in given}
    if not config.own_cluster:
        refused |= {
            name: f"the run joins a running cluster, {config.wanted_address}"
            for name in _OF_A_NEW_CLUSTER
            if name in given
        }
    for name, why in refused.items():
        logger.warning(f"runtime.ray_init.{name}={given.pop(name)!r} is not used: {why}")
    return given


def _private_directory() -> str:
    place = tempfile.gettempdir()
    if len(place) > _LONGEST_PLACE:
        place = "/tmp"  # noqa: S108 - mkdtemp makes a directory that only this user can enter
    return tempfile.mkdtemp(prefix=sweeper.PREFIX, dir=place)


def _watched(directory: str) -> subprocess.Popen[bytes] | None:
    """Start a process that removes the cluster's leftovers if this process is killed; None on systems without /proc."""
    if not Path("/proc/self/environ").exists():
        return None
    return subprocess.Popen(  # noqa: S603 - our own file, run by this Python
        [sys.executable, "-I", "-S", sweeper.__file__, str(os.getpid()), directory],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _counted(resources: Mapping[str, float]) -> dict[str, float]:
    return {kind: float(resources.get(kind, 0.0)) for kind in ("CPU", "GPU")}


def _nothing() -> None:
    """Do nothing: the function to call on closing as long as no output is redirected."""


def _routed(logger: Logger) -> Callable[[], None]:
    """Redirect the output of Ray's own processes from the terminal to the log, and return a function that undoes this.

    Ray prints, among other things, the loss of a worker, which the run's error reports already.
    """
    module: Any = worker
    before = module.print_to_stdstream

    def log(data: Mapping[str, Any], *_: object, **__: object) -> None:
        logger.info("ray_message", text=" ".join(str(line) for line in data.get("lines", ())))

    def undo() -> None:
        module.print_to_stdstream = before

    module.print_to_stdstream = log
    return undo


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in a context; Ray's own variables keep values that the user has set."""
    ours = {
        name: value
        for name, value in variables.items()
        if name == sweeper.MARK or name not in os.environ
    }
    with environment_variables(ours):
        yield


@contextmanager
def _loopback() -> Iterator[None]:
    """Let a new cluster listen only on the loopback interface, as Ray does on macOS and Windows.

    Ray has no public setting for this on Linux, where Ray replaces 127.0.0.1 by an address that other machines can reach.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def check_reachable(address: str) -> None:
    """Check that a cluster's head answers at `host:port`; an address without a colon is not checked.

    Ray itself waits for minutes; a plain connection shows within seconds whether the address answers.

    Raises:
        PlacementError: the head does not answer, or the address is malformed.
    """
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    if not port.isdigit():
        raise PlacementError(
            f"runtime.address={address!r} is not the address of a Ray cluster",
            hint="set it to HOST:PORT, such as 10.0.0.1:6379, or to auto",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise unreachable(address, f"{type(error).__name__}: {error}") from error


def found_here() -> str:
    """Return the address of the cluster that runs on this machine, as Ray's own `auto` finds it.

    Raises:
        PlacementError: no cluster runs on this machine.
    """
    from ray._private import services

    find: Any = services.canonicalize_bootstrap_address
    try:
        found = find("auto")
    except (ConnectionError, ValueError) as error:
        raise unreachable("auto", str(error).splitlines()[0]) from error
    if found is None:
        raise unreachable("auto", "no cluster runs on this machine")
    return str(found)


def unreachable(address: str, why: str) -> PlacementError:
    """Return the error for a cluster that does not answer."""
    return PlacementError(
        f"no Ray cluster answers at {address!r} (runtime.address or RAY_ADDRESS): {why}",
        hint="start one with `ray start --head`, correct the address, or leave it out: "
        "then the run starts a cluster of its own on this machine",
    )
