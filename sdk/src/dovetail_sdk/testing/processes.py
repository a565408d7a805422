"""Ranks in real processes, joined by gloo, without a runtime, for tests of distributed code.

    with ProcessRanks(2) as ranks:
        group = ranks.worker_group(spec, Mesh(dp=2))
        group.update(batch, objective).result()

Processes are started once and hold workers of any number of groups. They are forks of one server process, which imports
torch and the modules of `preload` once for all of them. All arguments and results are pickled, so use the processes only
with code that you trust.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import attrs

from dovetail.dispatch import Future, Mesh
from dovetail.errors import WorkerError
from dovetail.interfaces import Call, WorkerSpec
from dovetail.workers import RankFailure, WorkerGroup, WorkerHost

START_SECONDS = 120.0
"""Seconds within which processes must start and join the process group."""

_preloaded = [
    "torch.distributed",
    "dovetail.workers.host",
    "dovetail.workers.processes",
    "dovetail_sdk.testing.transport_ends",
]


def preload(*modules: str) -> None:
    """Name modules to import once, before the first ranks of this process start. Missing modules are ignored.

    Call it in a conftest. It saves time and changes nothing else.
    """
    _preloaded.extend(modules)


def start_forked(*processes: Callable[[Any], Any]) -> list[Any]:
    """Start processes and return them. They are forked from a server process that has imported torch and the modules of `preload`.

    Args:
        processes: functions that take a `multiprocessing` context and return a process that has not been started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    started = []
    # The server reads the variable before it loads torch, since a process with running threads can't be forked.
    with patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        for make in processes:
            started.append(make(context))
            started[-1].start()
    return started


@attrs.frozen(kw_only=True)
class Rank:
    """The rank on which a function runs."""

    rank: int
    world: int


class ProcessRanks:
    """R processes on the CPU that form torch's default process group.

    Args:
        world: the number of processes, R.
        threads: the number of threads of each process; few, since the machine's cores are shared.
        timeout: seconds that a call may take before it fails and every process is ended.
    """

    def __init__(self, world: int, *, threads: int = 1, timeout: float = 240.0) -> None:
        self.world = world
        self._timeout = timeout
        self._directory = Path(tempfile.mkdtemp(prefix="dovetail-ranks-"))
        self._groups = 0
        address = f"file://{self._directory / 'store'}"
        pipes = [multiprocessing.Pipe() for _ in range(world)]
        own = {**os.environ, "OMP_NUM_THREADS": "1"}

        def of(rank: int) -> Callable[[Any], Any]:
            args = (pipes[rank][1], rank, world, address, timeout, threads, own)
            return lambda context: context.Process(target=_serve, args=args, daemon=True)

        self._processes = start_forked(*(of(rank) for rank in range(world)))
        self._pipes: list[Any] = [ours for ours, _ in pipes]
        for _, theirs in pipes:
            theirs.close()
        self._readers = ThreadPoolExecutor(world)
        self._gather("start", START_SECONDS)

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> list[Any]:
        """Call `function(rank: Rank, *args)` on every rank at once, and return the results in rank order.

        The function is pickled by name, so it must be defined at the top of a module, which each rank imports at its first call.

        Args:
            function: the function to call.
            args: further arguments of the function.
            timeout: seconds that this call may take; by default the group's limit.

        Raises:
            WorkerError: the function raised on a rank, did not return in time, or a process died.
        """
        return self._everywhere(f"{function.__qualname__}()", ("run", function, args), timeout)

    def worker_group(self, spec: WorkerSpec, mesh: Mesh) -> WorkerGroup:
        """Start a worker of this spec on every rank, as a runtime does, and return the group of workers."""
        mesh.check_size(self.world)
        self._groups += 1
        role = f"{spec.role}#{self._groups}"
        named = attrs.evolve(
            spec, role=role, context=attrs.evolve(spec.context, role=spec.context.role or spec.role)
        )
        (worker_class, *_) = self._everywhere(f"start of {spec.role}", ("start", named, mesh))
        return _Group(self, role, worker_class, mesh, spec.role)

    def calls(self, role: str, method: str, calls: Sequence[Call | None]) -> list[Any]:
        """Call a worker's method with separate arguments per rank and return results or `RankFailure`s; ranks with None are not called."""
        for pipe, call in zip(self._pipes, calls, strict=True):
            pipe.send(("call", role, method, call))
        return self._gather(f"{role}.{method}()", self._timeout)

    def close(self) -> None:
        """End every process; safe to call twice."""
        pipes, self._pipes = self._pipes, []
        for pipe in pipes:
            try:
                pipe.send(("close",))
            except OSError:
                continue
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()
        self._readers.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _everywhere(
        self, what: str, message: tuple[Any, ...], timeout: float | None = None
    ) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(message)
        results = self._gather(what, self._timeout if timeout is None else timeout)
        failed = [(r.failed_at, i, r) for i, r in enumerate(results) if isinstance(r, RankFailure)]
        if failed:
            _, rank, failure = min(failed, key=lambda entry: entry[:2])
            failure.error.add_note(f"{what} on rank {rank} of {self.world}\n{failure.traceback}")
            raise failure.error
        return results

    def _gather(self, what: str, timeout: float) -> list[Any]:
        """Return the next answer of every rank. If a rank does not answer in time, for example in a collective with a failed rank, all
        processes are killed.

        Args:
            what: the name of the call, for the error.
            timeout: seconds that each rank may take.

        Raises:
            WorkerError: a rank did not answer.
        """
        answers = [self._readers.submit(_answer, pipe, timeout) for pipe in self._pipes]
        results = [answer.result() for answer in answers]
        silent = [rank for rank, result in enumerate(results) if result is _NO_ANSWER]
        if silent:
            spoke = [r.traceback for r in results if isinstance(r, RankFailure)]
            for process in self._processes:
                process.kill()
            raise WorkerError(
                f"{what}: the ranks {silent} (world size {self.world}) died or did not answer within {timeout:g} seconds"
                + "".join(f"\nerror of another rank:\n{text}" for text in spoke),
                rank=silent[0],
                call=what,
            )
        return results


class _Group(WorkerGroup):
    def __init__(
        self, ranks: ProcessRanks, key: str, worker_class: type, mesh: Mesh, role: str
    ) -> None:
        super().__init__(worker_class, mesh, role=role)
        self._ranks, self._key = ranks, key

    def _invoke(self, method: str, calls: Sequence[Call | None]) -> Future[list[Any]]:
        return Future.completed(self._ranks.calls(self._key, method, calls))

    def close(self) -> None:
        """Close the group's workers; the processes continue."""
        self._ranks.calls(self._key, "close", [((), {})] * self.mesh.size)


_NO_ANSWER = object()


def _answer(pipe: Any, timeout: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(timeout) else _NO_ANSWER
    except (EOFError, OSError):
        return _NO_ANSWER


def _serve(
    pipe: Any,
    rank: int,
    world: int,
    address: str,
    timeout: float,
    threads: int,
    environment: dict[str, str],
) -> None:
    """Run a rank's process: join the other ranks, then execute calls until the call to close."""
    import torch

    from dovetail.workers import join_processes, leave_processes

    # Imported objects live to the end; a garbage collection that visits them would copy the server's memory pages.
    gc.freeze()
    # The server's environment is as old as the server, so it is replaced.
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS=str(threads), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(threads)
    join_processes(address=address, rank=rank, world=world, device="cpu", timeout=timeout)
    host = WorkerHost("cpu")
    pipe.send(None)
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            break
        match message:
            case ("close",):
                break
            case ("call", role, method, call):
                pipe.send(None if call is None else host.run(role, method, call))
            case ("start", spec, mesh):
                pipe.send(_guarded(_started_class, host, spec, mesh, rank))
            case ("run", function, args):
                pipe.send(_guarded(function, Rank(rank=rank, world=world), *args))
    host.close()
    leave_processes()


def _started_class(host: WorkerHost, spec: WorkerSpec, mesh: Mesh, rank: int) -> type:
    from dovetail.workers import reduction_over

    return type(host.start_worker(spec, mesh, rank, reduction_over(mesh, rank)))


def _guarded(act: Callable[..., Any], *args: object) -> Any:
    try:
        return act(*args)
    except Exception as error:  # noqa: BLE001 - raised again by the process that asked
        return RankFailure(error=error, traceback=traceback.format_exc(), failed_at=time.time())
