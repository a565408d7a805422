"""Starting processes as Ray actors: training ranks, and rollout replicas with their engines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import ray

from dovetail.errors import DispatchError, RolloutError
from dovetail.interfaces.runtime import WorkerSpec
from dovetail_runtime_ray.config import RayConfig
from dovetail_runtime_ray.health import Health, Limits, why_lost
from dovetail_runtime_ray.logs import last_printed
from dovetail_runtime_ray.pool import PoolProcesses, travelling
from dovetail_runtime_ray.process import CONTROL, CONTROL_THREADS, HostProcess
from dovetail_runtime_ray.replica import RayReplica
from dovetail_runtime_ray.replica_process import ReplicaProcess
from dovetail_runtime_ray.reserve import Reserved
from dovetail_runtime_ray.wire import Reply, Setup, WireFailure

_MANY_REQUESTS = 100_000
"""Most calls under way in one replica's event loop."""
_DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG"
"""Set by the controller where kernels must be deterministic; workers need the same."""


@attrs.frozen(kw_only=True)
class Surroundings:
    """What every replica shares."""

    setup: Callable[[str, int], Setup]
    """The setup of a process, from its label and number."""
    health: Health
    limits: Limits
    logger: Any
    timeout: float
    """Seconds for all of them to start."""
    ending: ExitStack
    """Closes them at the end of the run."""
    run_directory: str | None
    """Holds their log files."""
    label: str
    """What these are called."""


def setup_of(
    config: RayConfig,
    *,
    label: str,
    rank: int,
    accelerator: bool,
    run_directory: str | None,
    threads: int,
    deterministic: bool,
    loopback: bool,
    plugins: dict[str, Any] | None = None,
) -> Setup:
    """What a process is told; for the fields see `Setup`."""
    # Nobody sees a progress bar there: it would only fill the log files.
    environment = {"OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
    if loopback:
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if deterministic and _DETERMINISTIC in os.environ:
        environment[_DETERMINISTIC] = os.environ[_DETERMINISTIC]
    return Setup(
        label=label,
        rank=rank,
        accelerator=accelerator,
        working_directory=str(Path.cwd()),
        run_directory=run_directory,
        environment=environment | config.env_vars,
        threads=threads,
        deterministic=deterministic,
        plugins=plugins,
    )


def rank(reserved: Reserved, number: int, parts: int, setup: Setup) -> Any:
    """Start the process of a training rank; returns its handle at once.

    Args:
        reserved: its pool.
        number: the rank.
        parts: how many processes share its accelerator.
        setup: what it is told.
    """
    return (
        _actor_class(HostProcess)
        .options(
            **reserved.options(number, parts=parts),
            runtime_env={"env_vars": setup.environment},
        )
        .remote(setup)
    )


def replicas(
    spec: WorkerSpec,
    count: int,
    reserved: Reserved,
    ranks: PoolProcesses | None,
    around: Surroundings,
) -> list[RayReplica]:
    """Start rollout replicas over a pool's ranks and wait until their engines are up.

    Args:
        spec: what they run.
        count: how many.
        reserved: their pool.
        ranks: training processes on the same accelerators, if any.
        around: what they share.

    Raises:
        DispatchError: they need more ranks than the pool has.
        RolloutError: one did not start in time, or died.
        DovetailError: what an engine raised in its start.
    """
    each = spec.plugin.config.ranks_per_replica() if spec.plugin.config is not None else 1
    if reserved.pool.accelerators and each * count > reserved.pool.ranks:
        raise DispatchError(
            f"{count} rollout replicas of {each} accelerators each need {count * each}, "
            f"but pool {reserved.pool.name!r} has {reserved.pool.described()}"
        )
    shared = ray.put(travelling(spec))
    several = _accelerators(reserved, ranks) if reserved.pool.accelerators and each > 1 else None
    actors = []
    for number in range(count):
        first = number * each % reserved.pool.ranks
        setup = around.setup(spec.role, number)
        options = reserved.options(first, parts=2 if ranks is not None else 1)
        if several is not None:
            setup = attrs.evolve(setup, visible=tuple(several[first : first + each]))
            options = reserved.options(first, parts=0)
        actors.append(_replica(options, setup))
        around.ending.callback(ray.kill, actors[-1], no_restart=True)
    deadline = time.monotonic() + around.timeout
    places = _answers([actor.whereabouts.remote() for actor in actors], deadline, around)
    started = _answers([actor.start.remote(shared) for actor in actors], deadline, around)
    made = []
    for number, (actor, facts, reply) in enumerate(zip(actors, places, started, strict=True)):
        _check_started(number, reply, facts.described())
        made.append(
            RayReplica(spec, actor, number, facts, around.health, around.limits, around.logger)
        )
        around.ending.callback(made[-1].close)
    return made


def _replica(options: dict[str, Any], setup: Setup) -> Any:
    return (
        _actor_class(ReplicaProcess)
        .options(
            **options,
            max_concurrency=_MANY_REQUESTS,
            runtime_env={"env_vars": setup.environment},
        )
        .remote(setup)
    )


def _actor_class(cls: type) -> Any:
    """Ray's actor class of a process, with threads beside the calls."""
    remote: Any = ray.remote
    return remote(concurrency_groups={CONTROL: CONTROL_THREADS})(cls)


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
    ids: list[str] = ray.get(refs)
    return ids


def _mine() -> str:
    ids = ray.get_runtime_context().get_accelerator_ids()
    return str(next(i for kind in sorted(ids) for i in ids[kind]))


def _answers(refs: Sequence[Any], deadline: float, around: Surroundings) -> list[Any]:
    """Every replica's answer; which died, or did not come in time, is said."""
    left = max(deadline - time.monotonic(), 0.0)
    _, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=left)
    if waiting:
        late = [number for number, ref in enumerate(refs) if ref in waiting]
        raise RolloutError(
            f"rollout replicas {late} of {len(refs)} did not start within {around.timeout:g} seconds",
            hint="raise runtime.start_timeout if loading takes that long",
        )
    answers = []
    for number, ref in enumerate(refs):
        try:
            answers.append(ray.get(ref))
        except ray.exceptions.RayError as error:
            # In words here: a run that does not start keeps no directory.
            printed = last_printed(around.run_directory, f"{around.label}-{number}")
            raise RolloutError(
                f"rollout replica {number} of {len(refs)} died while it started: {why_lost(error)}{printed}"
            ) from error
    return answers


def _check_started(number: int, reply: Reply, where: str) -> None:
    if isinstance(reply.result, WireFailure):
        failure = reply.result.unpack()
        failure.error.add_note(f"raised in the start of rollout replica {number} ({where})")
        failure.error.add_note(failure.traceback)
        raise failure.error
