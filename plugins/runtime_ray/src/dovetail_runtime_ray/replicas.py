"""Rollout replicas as Ray actors: started together, and started again one by one in the same place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import ray

from dovetail.errors import DispatchError, RolloutError
from dovetail.interfaces import Logger, WorkerSpec
from dovetail_runtime_ray.health import CallTimeouts, Health, why_lost
from dovetail_runtime_ray.launch import actor_class
from dovetail_runtime_ray.logs import last_printed
from dovetail_runtime_ray.pool import PoolProcesses, travelling
from dovetail_runtime_ray.replica import RayReplica
from dovetail_runtime_ray.replica_process import ReplicaProcess
from dovetail_runtime_ray.reserve import Reserved
from dovetail_runtime_ray.wire import ProcessSetup, Reply, WireFailure

_MANY_REQUESTS = 100_000
"""Most calls under way in one replica's event loop."""


@attrs.frozen(kw_only=True)
class ReplicaSettings:
    """What every replica shares."""

    setup: Callable[[str, int], ProcessSetup]
    """The setup of a process, from its label and number."""
    health: Health
    limits: CallTimeouts
    logger: Logger
    timeout: float
    """Seconds for all of them to start."""
    ending: ExitStack
    """Closes them at the end of the run."""
    run_directory: str | None
    """Holds their log files."""
    label: str
    """What these are called."""
    apart: bool = False
    """Whether they run in another environment than the controller."""


class Replicas:
    """The replicas of one spec, over a pool's ranks.

    Args:
        spec: what they run.
        count: how many.
        reserved: their pool.
        ranks: training processes on the same accelerators, if any.
        around: what they share.

    Raises:
        DispatchError: they need more ranks than the pool has.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        count: int,
        reserved: Reserved,
        ranks: PoolProcesses | None,
        around: ReplicaSettings,
    ) -> None:
        self._spec, self._count, self._reserved, self._around = spec, count, reserved, around
        self._parts = 2 if ranks is not None else 1
        config = spec.plugin.config
        joined = bool(config is not None and config.joined)
        self._each = config.ranks_per_replica() if config is not None else 1
        self._computes = reserved.pool.accelerators and not joined
        """Whether replicas take accelerators of the pool."""
        if self._computes:
            _check_fits(count, self._each, reserved)
        self._accelerators: list[str] | None = None
        if self._computes and self._each > 1:
            self._accelerators = _accelerators(reserved, ranks)
        self._travelling: Any = None

    def start(self, numbers: Sequence[int] | None = None) -> list[RayReplica]:
        """Start all replicas, or these, and wait until their engines are up.

        Raises:
            RolloutError: one did not start in time, or died.
            DovetailError: what an engine raised in its start.
        """
        wanted = list(range(self._count)) if numbers is None else list(numbers)
        around = self._around
        if self._travelling is None:
            self._travelling = ray.put(travelling(self._spec, apart=around.apart))
        actors = [self._actor(number) for number in wanted]
        try:
            deadline = time.monotonic() + around.timeout
            places = self._answers(
                wanted, [actor.whereabouts.remote() for actor in actors], deadline
            )
            started = self._answers(
                wanted, [actor.start.remote(self._travelling) for actor in actors], deadline
            )
            for number, facts, reply in zip(wanted, places, started, strict=True):
                _check_started(number, reply, facts.described())
        except BaseException:
            for actor in actors:
                ray.kill(actor, no_restart=True)
            raise
        made = []
        for number, actor, facts, reply in zip(wanted, actors, places, started, strict=True):
            made.append(
                RayReplica(
                    self._spec,
                    actor,
                    number,
                    facts,
                    around.health,
                    around.limits,
                    around.logger,
                    receivers=reply.result,
                )
            )
            around.ending.callback(made[-1].close)
        return made

    def restart(self, replica: RayReplica) -> RayReplica:
        """Close a replica, whatever state it is in, and start another with its number and its accelerators. For errors
        see `start`.
        """
        # Whoever failed is not to be trusted with closing itself in time: its process ends in any case.
        replica.close()
        return self.start([replica.number])[0]

    def _actor(self, number: int) -> Any:
        first = number * self._each % self._reserved.pool.ranks
        setup = self._around.setup(self._spec.role, number)
        parts = self._parts if self._computes else 0
        if self._accelerators is not None:
            setup = attrs.evolve(
                setup, visible=tuple(self._accelerators[first : first + self._each])
            )
            parts = 0
        elif self._reserved.pool.accelerators and not self._computes:
            setup = attrs.evolve(setup, accelerator=False)
        actor = (
            actor_class(ReplicaProcess)
            .options(
                **self._reserved.options(first, parts=parts),
                max_concurrency=_MANY_REQUESTS,
                runtime_env=setup.runtime_env(),
            )
            .remote(setup)
        )
        self._around.ending.callback(ray.kill, actor, no_restart=True)
        return actor

    def _answers(self, numbers: Sequence[int], refs: Sequence[Any], deadline: float) -> list[Any]:
        """Every replica's answer; which died, or did not come in time, is said."""
        around = self._around
        left = max(deadline - time.monotonic(), 0.0)
        _, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=left)
        if waiting:
            late = [number for number, ref in zip(numbers, refs, strict=True) if ref in waiting]
            raise RolloutError(
                f"rollout replicas {late} of {self._count} did not start within {around.timeout:g} seconds",
                hint="raise runtime.start_timeout if loading takes that long",
            )
        answers = []
        for number, ref in zip(numbers, refs, strict=True):
            try:
                answers.append(ray.get(ref))
            except ray.exceptions.RayError as error:
                # In words here: a run that does not start keeps no directory.
                printed = last_printed(around.run_directory, f"{around.label}-{number}")
                raise RolloutError(
                    f"rollout replica {number} of {self._count} died while it started: {why_lost(error)}{printed}"
                ) from error
        return answers


def _check_fits(count: int, each: int, reserved: Reserved) -> None:
    pool = reserved.pool
    if each * count > pool.ranks:
        raise DispatchError(
            f"{count} rollout replicas of {each} accelerators each need {count * each}, "
            f"but pool {pool.name!r} has {pool.described()}"
        )


def _accelerators(reserved: Reserved, ranks: PoolProcesses | None) -> list[str]:
    """The id of every rank's accelerator on its node."""
    if ranks is not None:
        return [facts.accelerators[0] for facts in ranks.facts]
    look = ray.remote(_mine)
    refs = []
    for number in range(reserved.pool.ranks):
        options = reserved.options(number, parts=1)
        del options["max_restarts"]
        refs.append(look.options(**options).remote())
    return ray.get(refs)


def _mine() -> str:
    ids = ray.get_runtime_context().get_accelerator_ids()
    return str(next(i for kind in sorted(ids) for i in ids[kind]))


def _check_started(number: int, reply: Reply, where: str) -> None:
    if isinstance(reply.result, WireFailure):
        failure = reply.result.unpack()
        failure.error.add_note(f"raised in the start of rollout replica {number} ({where})")
        failure.error.add_note(failure.traceback)
        raise failure.error
