"""Rollout replicas as Ray actors: started together, and restarted one by one on the same accelerators."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import ray

from dovetail.errors import DispatchError, RolloutError
from dovetail.interfaces import WorkerSpec
from dovetail_runtime_ray.launch import RunProcesses, start_actor
from dovetail_runtime_ray.pool import PoolProcesses, travelling
from dovetail_runtime_ray.replica import RayReplica
from dovetail_runtime_ray.replica_process import ReplicaProcess
from dovetail_runtime_ray.reserve import Reserved
from dovetail_runtime_ray.wire import ProcessSetup, WireFailure

_MANY_REQUESTS = 100_000
"""Maximum number of concurrent calls in one replica's event loop."""


class Replicas:
    """Starts the rollout replicas of one spec on the ranks of a pool.

    Args:
        spec: the spec of the replicas.
        count: the number of replicas.
        reserved: the pool's reserved resources.
        ranks: training processes on the same accelerators, if any.
        run: the state shared with all processes of the run.
        setup: a function that returns the set-up of the process with the given label and number.
        apart: whether the replicas' Python environment differs from the controller's.

    Raises:
        DispatchError: the replicas need more ranks than the pool has.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        count: int,
        reserved: Reserved,
        ranks: PoolProcesses | None,
        run: RunProcesses,
        setup: Callable[[str, int], ProcessSetup],
        *,
        apart: bool = False,
    ) -> None:
        self._spec, self._count, self._reserved, self._run = spec, count, reserved, run
        self._setup, self._apart = setup, apart
        self._parts = 2 if ranks is not None else 1
        config = spec.plugin.config
        joined = bool(config is not None and config.joined)
        self._each = config.ranks_per_replica() if config is not None else 1
        self._computes = reserved.pool.accelerators and not joined
        """Whether the replicas use accelerators of the pool."""
        if self._computes:
            _check_fits(count, self._each, reserved)
        self._accelerators: list[str] | None = None
        if self._computes and self._each > 1:
            self._accelerators = _accelerators(reserved, ranks)
        self._travelling: Any = None

    def start(self, numbers: Sequence[int] | None = None) -> list[RayReplica]:
        """Start all replicas, or those with these numbers, and wait until their engines are up.

        Raises:
            RolloutError: a replica did not start in time, or died.
            DovetailError: an error that an engine raised in its start.
        """
        wanted = list(range(self._count)) if numbers is None else list(numbers)
        if self._travelling is None:
            self._travelling = ray.put(travelling(self._spec, apart=self._apart))
        actors = {number: self._actor(number) for number in wanted}
        try:
            made = self._started(actors)
        except BaseException:
            for actor in actors.values():
                ray.kill(actor, no_restart=True)
            raise
        for replica in made:
            self._run.ending.callback(replica.close)
        return made

    def restart(self, replica: RayReplica) -> RayReplica:
        """Close a replica in any state, and start a new one with its number and accelerators. See `start` for errors."""
        # A failed replica may not close its engine in time; `close` ends its process in any case.
        replica.close()
        return self.start([replica.number])[0]

    def _actor(self, number: int) -> Any:
        first = number * self._each % self._reserved.pool.ranks
        setup = self._setup(self._spec.role, number)
        parts = self._parts if self._computes else 0
        if self._accelerators is not None:
            setup = attrs.evolve(
                setup, visible=tuple(self._accelerators[first : first + self._each])
            )
            parts = 0
        elif self._reserved.pool.accelerators and not self._computes:
            setup = attrs.evolve(setup, accelerator=False)
        options = self._reserved.options(first, parts=parts)
        actor = start_actor(ReplicaProcess, setup, max_concurrency=_MANY_REQUESTS, **options)
        self._run.ending.callback(ray.kill, actor, no_restart=True)
        return actor

    def _started(self, actors: Mapping[int, Any]) -> list[RayReplica]:
        """Wait until the engines in these processes have started, and return the replicas."""
        deadline = time.monotonic() + self._run.limits.start
        places = self._answers({n: a.whereabouts.remote() for n, a in actors.items()}, deadline)
        replies = self._answers(
            {n: a.start.remote(self._travelling) for n, a in actors.items()}, deadline
        )
        made = []
        for (number, actor), facts, reply in zip(actors.items(), places, replies, strict=True):
            if isinstance(reply.result, WireFailure):
                raise reply.result.raised_in(
                    f"the start of rollout replica {number} ({facts.described()})"
                )
            made.append(RayReplica(self._spec, actor, number, facts, self._run, reply.result))
        return made

    def _answers(self, refs: Mapping[int, Any], deadline: float) -> list[Any]:
        limit = self._run.limits.start
        return self._run.started(
            refs,
            max(deadline - time.monotonic(), 0.0),
            self._spec.role,
            late=lambda numbers: RolloutError(
                f"rollout replicas {numbers} of {self._count} did not start within {limit:g} seconds",
                hint="raise runtime.start_timeout if loading takes that long",
            ),
            died=lambda number, why: RolloutError(
                f"rollout replica {number} of {self._count} died while it started: {why}"
            ),
        )


def _check_fits(count: int, each: int, reserved: Reserved) -> None:
    pool = reserved.pool
    if each * count > pool.ranks:
        raise DispatchError(
            f"pool {pool.name!r} has {pool.described()}; expected at least {count * each}, since the run has {count} rollout replica(s) "
            f"with {each} rank(s) per replica: lower rollout.replicas, or enlarge the pool"
        )


def _accelerators(reserved: Reserved, ranks: PoolProcesses | None) -> list[str]:
    """Return the id of every rank's accelerator on its node."""
    if ranks is not None:
        return [facts.accelerators[0] for facts in ranks.facts]
    look = ray.remote(_mine)
    return ray.get(
        [
            look.options(**reserved.options(number, parts=1)).remote()
            for number in range(reserved.pool.ranks)
        ]
    )


def _mine() -> str:
    ids = ray.get_runtime_context().get_accelerator_ids()
    return str(next(i for kind in sorted(ids) for i in ids[kind]))
