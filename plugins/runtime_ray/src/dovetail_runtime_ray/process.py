"""The code of a worker's process: it hosts the workers of several roles, for one rank of a pool."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from dovetail.dispatch import Mesh
from dovetail.errors import PlacementError
from dovetail.interfaces import NODE_ADDRESS, WorkerSpec
from dovetail.random_streams import seed_torch
from dovetail.telemetry import bind_process, get_logger
from dovetail.workers import (
    RankFailure,
    WorkerHost,
    check_plugins,
    join_processes,
    leave_processes,
    reduction_over,
    stacks,
)
from dovetail_runtime_ray.columns import BatchCodec
from dovetail_runtime_ray.isolation import check_environment
from dovetail_runtime_ray.logs import WorkerLogs
from dovetail_runtime_ray.specs import spec_received
from dovetail_runtime_ray.store import RayStore
from dovetail_runtime_ray.wire import ProcessInfo, ProcessSetup, Reply, WireFailure

CONTROL = "control"
"""Ray's concurrency group for methods that run beside a call."""
CONTROL_THREADS = 3
"""Threads of the group: one for `watch`, which never returns, one for `finish_save`, and one for `stacks`."""


class Process:
    """Base of every worker process: environment, log files, and methods to inspect it."""

    def __init__(self, setup: ProcessSetup) -> None:
        self.setup = setup
        if Path(setup.working_directory).is_dir():
            os.chdir(setup.working_directory)
        self.machine: str | None = None
        if setup.spread:
            import ray

            self.machine = str(ray.get_runtime_context().get_node_id())
            os.environ.setdefault(NODE_ADDRESS, node_address())
        if setup.place.title:
            _activate()
        if setup.visible is not None:
            _show_accelerators(setup.visible)
        self.logs = WorkerLogs(setup.run_directory, setup.label, setup.rank)
        self._checked = False

    def facts(self) -> ProcessInfo:
        """Return where this process runs, its id and its accelerators."""
        import ray

        context = ray.get_runtime_context()
        ids = context.get_accelerator_ids()
        return ProcessInfo(
            pid=os.getpid(),
            host=socket.gethostname(),
            node=node_address(),
            machine=self.machine,
            worker=context.get_worker_id(),
            accelerators=tuple(str(i) for kind in sorted(ids) for i in ids[kind]),
            executable=sys.executable,
        )

    def prepare(self) -> str:
        """Import torch, apply the set-up's number of threads and determinism, and return the device's name.

        Raises:
            PlacementError: an accelerator is reserved, but torch finds none.
        """
        import torch

        torch.set_num_threads(self.setup.threads)
        if self.setup.deterministic:
            torch.use_deterministic_algorithms(True)
        if not self.setup.accelerator:
            return "cpu"
        here = torch.accelerator.current_accelerator(check_available=True)
        if here is None:
            raise PlacementError(
                f"Ray gave {self.setup.label} rank {self.setup.rank} an accelerator on {socket.gethostname()}, "
                f"but torch {torch.__version__} sees none there",
                hint="install a build of torch for this accelerator on every node, or set runtime.device=cpu",
            )
        return f"{here.type}:0"

    def spec_here(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the spec with this process's logger, after comparing the plugins here with the controller's.

        Raises:
            PluginError: a plugin differs from the controller's, or this environment does not fit.
        """
        place, host = self.setup.place, socket.gethostname()
        if not self._checked:
            if place.controller is not None:
                where = f"{place.title} on {host} ({node_address()})"
                check_environment(place.controller, place.plugins, where=where)
            elif self.setup.plugins is not None:
                check_plugins(self.setup.plugins, where=f"a worker on {host} ({node_address()})")
            self._checked = True
            seed_torch(spec.context.seed, self.setup.label, self.setup.rank)
        context = attrs.evolve(
            spec.context,
            logger=get_logger(),
            machine=self.machine,
            machine_rank=self.setup.machine_rank,
        )
        return spec_received(attrs.evolve(spec, context=context))

    def answer(self, act: Callable[[], Any]) -> Reply:
        """Call a function, and return its result or failure with the warnings that it logged."""
        try:
            result = act()
        except KeyboardInterrupt:
            raise
        except Exception as error:  # noqa: BLE001 - a worker may raise anything; the controller raises it again
            result = WireFailure.now(error)
        return Reply(result=result, warnings=self.logs.warnings())


class HostProcess(Process):
    """One rank of a pool: holds a worker of every training role of the pool."""

    def __init__(self, setup: ProcessSetup) -> None:
        super().__init__(setup)
        self._host: WorkerHost | None = None
        self._codec = BatchCodec(RayStore())

    def address(self) -> str:
        """Return a free address `tcp://host:port` of this node, for the rendezvous of ranks on several nodes."""
        node = node_address()
        with socket.socket() as probe:
            probe.bind((node, 0))
            return f"tcp://{node}:{probe.getsockname()[1]}"

    def join(self, address: str | None, world: int, timeout: float) -> Reply:
        """Load torch, and join the default process group.

        Args:
            address: the address at which the ranks meet; None for a single rank, which joins no group.
            world: the number of ranks of the pool.
            timeout: seconds after which a collective fails that not all ranks have joined.
        """

        def act() -> str:
            device = self.prepare()
            if address is not None:
                join_processes(
                    address=address,
                    rank=self.setup.rank,
                    world=world,
                    device=device,
                    timeout=timeout,
                )
            self._host = WorkerHost(device)
            return device

        return self.answer(act)

    def start(self, spec: WorkerSpec, mesh: Mesh) -> Reply:
        """Start this rank's worker of a role."""

        def act() -> None:
            rank = self.setup.rank
            reduction = reduction_over(mesh, rank)
            self._joined().start_worker(self.spec_here(spec), mesh, rank, reduction)

        return self.answer(act)

    def call(
        self, role: str, method: str, payload: Any, answers: bool, context: Mapping[str, Any]
    ) -> Reply:
        """Call a method of this rank's worker, and return the encoded result.

        Args:
            role: the worker's role.
            method: the method of the worker.
            payload: the encoded call.
            answers: whether to send the result; False if no caller reads it.
            context: fields of the controller's events, such as the step.
        """

        def act() -> Any:
            bind_process(**context)
            result = self._joined().run(role, method, self._codec.decode(payload))
            if isinstance(result, RankFailure):
                return WireFailure.of(result)
            return self._codec.encode_result(result) if answers else None

        return self.answer(act)

    def close(self) -> None:
        """Close every worker, and leave the process group."""
        try:
            if self._host is not None:
                self._host.close()
        finally:
            leave_processes()
            self._codec.close()
            self.logs.close()

    def stacks(self) -> str:
        """Return the stack of every thread, also while a call is running."""
        return stacks()

    def watch(self) -> None:
        """Wait forever: the call fails as soon as the process dies, which notifies the controller."""
        threading.Event().wait()

    def _joined(self) -> WorkerHost:
        if self._host is None:
            raise PlacementError("the process can't run a call: it has not joined its pool yet")
        return self._host


def node_address() -> str:
    """Return the address of this machine in the Ray cluster."""
    from ray import util

    address: Any = util.get_node_ip_address
    return str(address())


def _activate() -> None:
    """Put programs of this interpreter's environment first in PATH, such as the helpers of an engine's compiler."""
    programs = Path(sys.executable).parent
    os.environ["VIRTUAL_ENV"] = str(programs.parent)
    os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"


def _show_accelerators(ids: tuple[str, ...]) -> None:
    """Make exactly these accelerators of the node visible to torch, whatever accelerators Ray assigned to the actor."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    if manager is not None:
        os.environ[str(manager.get_visible_accelerator_ids_env_var())] = ",".join(ids)
