"""The processes of one pool, as the controller sees them: started, called and ended together; and the worker groups that they run."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import ray

from dovetail.dispatch import Future, Mesh
from dovetail.errors import PlacementError, WorkerError
from dovetail.interfaces import Call, WorkerSpec
from dovetail.sections import Pool
from dovetail.telemetry import process_context
from dovetail.workers import WorkerGroup, resolve_mode
from dovetail_runtime_ray.columns import BatchCodec
from dovetail_runtime_ray.gather import Gather
from dovetail_runtime_ray.health import why_lost
from dovetail_runtime_ray.launch import RunProcesses
from dovetail_runtime_ray.logs import FOLDER
from dovetail_runtime_ray.process import CONTROL
from dovetail_runtime_ray.specs import spec_to_send
from dovetail_runtime_ray.wire import ProcessInfo, WireFailure

STACKS_SECONDS = 5.0
"""Seconds that a silent process may take to return its stacks."""
CLOSE_SECONDS = 20.0
"""Seconds that idle processes may take to close their workers before they are ended."""
BUSY_SECONDS = 1.0
"""Like `CLOSE_SECONDS`, but while a call is still running, as after an interruption: workers can close only once the call has ended."""

BESIDE_CALLS = frozenset({"finish_save"})
"""Methods that run beside other calls, because they only wait for a thread of the engine."""


class PoolProcesses:
    """The R processes of a pool, one a rank, that run its training roles.

    Args:
        pool: the pool.
        actors: handles of `HostProcess` actors, by rank.
        run: the state shared with the run's other processes; without a run directory, stacks go into the error.
        label: the prefix of the processes' files in `logs/`.
        apart: whether the processes' Python environment differs from the controller's.
    """

    def __init__(
        self,
        pool: Pool,
        actors: Sequence[Any],
        run: RunProcesses,
        label: str,
        *,
        apart: bool,
    ) -> None:
        self.pool = pool
        self.health, self.limits, self.logger = run.health, run.limits, run.logger
        self.facts: list[ProcessInfo] = []
        self.roles: list[str] = []
        self._actors = list(actors)
        self._run = run
        self._label, self._apart = label, apart
        self._order = threading.Lock()
        self._calls: weakref.WeakSet[Gather] = weakref.WeakSet()
        self._closed = False

    @property
    def name(self) -> str:
        """The started roles, joined by `+`; the pool's name if there are none yet."""
        return "+".join(self.roles) or f"pool {self.pool.name}"

    @property
    def alive(self) -> bool:
        """Whether the processes can still be called."""
        return not self._closed and self.health.error is None

    @property
    def size(self) -> int:
        """The number of processes, R."""
        return len(self._actors)

    def begin(self, rendezvous: str | None) -> None:
        """Wait until every process is up, and join the processes to one process group.

        Args:
            rendezvous: the address of a file that only these processes share; None if rank 0 listens instead.

        Raises:
            PlacementError: the processes did not start in time.
            WorkerError: a process died, or could not join.
        """
        timeout = self.limits.start
        deadline = time.monotonic() + timeout
        self.facts = self._run.started(
            {rank: actor.facts.remote() for rank, actor in enumerate(self._actors)},
            timeout,
            self._label,
            late=lambda ranks: PlacementError(
                f"{len(ranks)} of {self.size} processes of {self.name} ({self.pool.described()}) did not start "
                f"within {timeout:g} seconds",
                hint="see `ray status`, and raise runtime.start_timeout if the machine is only slow",
            ),
            died=lambda rank, why: WorkerError(
                f"{self.name} rank {rank} of {self.size} died while it started: {why}",
                rank=rank,
                lost=True,
            ),
        )
        for rank, actor in enumerate(self._actors):
            self.health.watch(
                actor.watch.options(concurrency_group=CONTROL).remote(),
                partial(self._lost, rank),
            )
        address = None
        if self.size > 1:
            address = rendezvous or ray.get(self._actors[0].address.remote())
        left = max(deadline - time.monotonic(), 1.0)
        # A collective may wait for a rank as long as the longest call may take.
        patience = max(self.limits.longest, left)
        self.everywhere("join", lambda actor: actor.join.remote(address, self.size, patience), left)

    def start(self, spec: WorkerSpec, mesh: Mesh) -> None:
        """Start a role's worker on every rank.

        Raises:
            DovetailError: the error of the first rank that failed.
        """
        if spec.role not in self.roles:
            self.roles.append(spec.role)
        shared = ray.put(travelling(spec, apart=self._apart))
        self.everywhere(
            f"{spec.role}.start", lambda actor: actor.start.remote(shared, mesh), self.limits.start
        )

    def everywhere(self, what: str, send: Callable[[Any], Any], timeout: float) -> list[Any]:
        """Send every rank the same call and wait for the answers; raise the first failing rank's own error.

        Args:
            what: the call as text, for errors.
            send: a function that sends the call to an actor handle and returns Ray's reference.
            timeout: the time limit in seconds.
        """
        # Ray keeps the order of calls to a single actor only. Calls of two threads could reach the ranks in different orders,
        # and the collectives of one call would wait for those of the other.
        with self._order:
            refs = {rank: send(actor) for rank, actor in enumerate(self._actors)}
        results = Gather(self, what, refs, timeout).results(None)
        failures = [
            (r.failed_at, k, r) for k, r in enumerate(results) if isinstance(r, WireFailure)
        ]
        if failures:
            _, rank, wire = min(failures, key=lambda entry: entry[:2])
            where = f"{what}() on rank {rank} of {self.size} ({self.facts[rank].described()})"
            raise wire.raised_in(where)
        return results

    def call(
        self,
        role: str,
        method: str,
        payloads: Sequence[Any],
        answering: frozenset[int] | None = None,
    ) -> Gather:
        """Call a role's method on every rank that has a payload; every rank gets all calls in the same order.

        Args:
            role: the worker's role.
            method: the method of the worker.
            payloads: the result of `BatchCodec.encode`: a payload for each rank, or None.
            answering: the ranks whose results are read; None for all. Other ranks send None, or their failure.
        """
        what = f"{role}.{method}()"
        self.health.check(what)
        beside = {"concurrency_group": CONTROL} if method in BESIDE_CALLS else {}
        with self._order:
            refs = {
                rank: actor.call.options(name=what, **beside).remote(
                    role, method, payload, answering is None or rank in answering, process_context()
                )
                for rank, (actor, payload) in enumerate(zip(self._actors, payloads, strict=True))
                if payload is not None
            }
        gather = Gather(self, what, refs, self.limits.of(method), method=method)
        self._calls.add(gather)
        return gather

    # Methods that Gather calls

    def lost(self, rank: int, what: str, error: Exception) -> WorkerError:
        """End the other processes after a process died, and return the run's first error, which may be an earlier failure."""
        where = self.facts[rank].described() if rank < len(self.facts) else "not yet started"
        during = f" during {what}" if what else ""
        failure = WorkerError(
            f"{self.name} rank {rank} of {self.size} ({where}) died{during}: {why_lost(error)}"
            + self._run.printed(f"{self._label}-{rank}"),
            rank=rank,
            call=what,
            lost=True,
        )
        failure.__cause__ = error
        return self.fail(failure)

    def fail(self, error: WorkerError) -> WorkerError:
        """End every process because of an error, and return the run's first error."""
        first = self.health.fail(error)
        self.kill()
        return first

    def stacks(self, ranks: Sequence[int], name: str) -> tuple[str, list[int]]:
        """Collect the stacks of silent ranks, and write them to a file in `logs/` if there is a run directory.

        Args:
            ranks: the silent ranks.
            name: the method that names the file; empty during the start, for no file.

        Returns:
            A text for the error, with the file's path or the stacks themselves; and the started ranks that gave no stacks.
            Even a rank that waits in a collective gives its stacks, so a started rank without stacks must be suspended (SIGSTOP).
        """
        asked = {
            rank: self._actors[rank].stacks.options(concurrency_group=CONTROL).remote()
            for rank in ranks
        }
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=STACKS_SECONDS)
        texts = {rank: _stack(ref) for rank, ref in asked.items()}
        # A rank that has not started yet has no facts.
        stopped = [rank for rank, text in texts.items() if text is None and rank < len(self.facts)]
        named = ", ".join(f"rank {rank} ({self.facts[rank].described()})" for rank in stopped)
        words = (
            f"; {named} does not answer at all, like a stopped process (SIGSTOP)" if named else ""
        )
        whole = "\n".join(
            f"==== rank {rank}\n{text or 'no answer, and no stacks either'}"
            for rank, text in texts.items()
        )
        if self._run.run_directory is None or not name:
            return f"{words}\n{whole}", stopped
        path = Path(self._run.run_directory) / FOLDER / f"stacks-{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(whole, encoding="utf-8")
        return f"{words}; their stacks are in {path}", stopped

    def kill(self) -> None:
        """End every process now."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Close every worker and end the processes, in any state; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self.health.error is None:
            busy = any(not call.done() for call in self._calls)
            refs = [actor.close.remote() for actor in self._actors]
            _, waiting = ray.wait(
                refs, num_returns=len(refs), timeout=BUSY_SECONDS if busy else CLOSE_SECONDS
            )
            for rank, ref in enumerate(refs):
                if ref in waiting:
                    if not busy:
                        self.logger.warning(
                            f"{self.name} rank {rank} did not close within {CLOSE_SECONDS:g} seconds, and was ended"
                        )
                    continue
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as error:
                    self.logger.warning(f"{self.name} rank {rank} did not close cleanly: {error}")
        self.kill()

    def _lost(self, rank: int, error: Exception) -> None:
        if not self._closed:
            self.lost(rank, "", error)


def _stack(ref: Any) -> str | None:
    try:
        text: str = ray.get(ref, timeout=0)
    except (ray.exceptions.RayError, TimeoutError):
        return None
    return text


def travelling(spec: WorkerSpec, *, apart: bool = False) -> WorkerSpec:
    """Return a spec that can be sent to a worker's process, without objects that only the controller's process can use.

    Args:
        spec: the controller's spec.
        apart: whether the workers' Python environment differs from the controller's.
    """
    context = attrs.evolve(spec.context, reward_functions=None, logger=None, transport=None)
    spec = attrs.evolve(spec, context=context)
    return spec_to_send(spec) if apart else spec


class RayGroup(WorkerGroup):
    """Workers of one role, one in each process of a pool. Calls may come from any thread of the controller.

    Args:
        worker_class: the class of the workers.
        mesh: the device mesh of the workers; its size is the number of processes.
        role: the role's name in the processes.
        processes: the processes of the pool.
        codec: the codec of calls and results.
    """

    def __init__(
        self,
        worker_class: type,
        mesh: Mesh,
        role: str,
        processes: PoolProcesses,
        codec: BatchCodec,
    ) -> None:
        super().__init__(worker_class, mesh, role=role)
        self._processes, self._codec = processes, codec

    def _invoke(self, method: str, calls: Sequence[Call | None]) -> Future[list[Any]]:
        answering = None
        if method in self.modes:
            answering = resolve_mode(self.modes[method]).answering(self.mesh)
        pending = self._processes.call(self.role, method, self._codec.encode(calls), answering)

        def results(timeout: float | None) -> list[Any]:
            return self._codec.decode_results(
                [
                    answer.unpack() if isinstance(answer, WireFailure) else answer
                    for answer in pending.results(timeout)
                ]
            )

        return Future(results, done=pending.done)

    def close(self) -> None:
        """Close the workers of this role; their processes stay alive for other roles."""
        if self._processes.alive:
            self._invoke("close", [((), {})] * self.mesh.size).result()
