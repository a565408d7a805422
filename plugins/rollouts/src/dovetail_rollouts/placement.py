"""The placement of the rollout's replicas, and the weight transport to them."""

from __future__ import annotations

import attrs

from dovetail.errors import PlanError
from dovetail.interfaces import PlanFacts, SelectedPlugin, SourcePlacement
from dovetail.plugins import default_index
from dovetail.sections import EngineSection, Pool, RolloutSection, RunConfig

ROLLOUT = "rollout"
TRANSPORT = "rollout.weight_transport"
_BETWEEN_PROCESSES = "shared_memory"
"""The transport between processes of one machine, on CPU or GPU."""
_BETWEEN_ACCELERATORS = "nccl"
"""The transport between different accelerators."""


@attrs.frozen(kw_only=True)
class RolloutPlacement(SourcePlacement):
    """The number and the placement of a rollout's replicas."""

    replicas: int
    joined: int = 0
    """The number of engines started outside the run, each of which one replica joins; 0 if each replica starts its own engine."""
    engine_ranks: int | None = None
    """The number of ranks of each replica's engine, each rank a process; None if the engine computes in the replica's own process."""
    ends_meet: bool = False
    """Whether sender and receivers of a weight update run at the same time, since the sender waits for the receivers."""
    on_each_machine: bool = False
    """Whether the first rank of each machine sends weights to the replicas there."""


def place_rollout(facts: PlanFacts, pool: Pool, trainer: Pool) -> RolloutPlacement:
    """Return the number of rollout replicas, and how their engines run and receive weights.

    Args:
        facts: the config of the run and the plugins that it selects.
        pool: the ranks of the rollout.
        trainer: the ranks of the actor.

    Raises:
        PlanError: the replicas do not fit the pool, or lack a required capability, or the weight transport does not reach
            them.
    """
    config, rollout, transport = facts.config, facts.plugins[ROLLOUT], facts.plugins[TRANSPORT]
    replicas, joined = replicas_in(config, pool), config.rollout.joined
    ranks = None if config.rollout.in_process else config.rollout.ranks_per_replica()
    _check_transport(config, transport, rollout)
    _check_machines(config, transport, pool, trainer)
    _check_kind(config.rollout, facts.engine("actor"), rollout)
    _check_offload(config, rollout)
    return RolloutPlacement(
        replicas=replicas,
        joined=joined,
        engine_ranks=ranks,
        ends_meet="ends_meet" in transport.cls.capabilities,
        on_each_machine="on_each_machine" in transport.cls.capabilities,
        described={ROLLOUT: _described(replicas, joined, ranks)},
        apart=ranks is not None or bool(joined),
        elsewhere=frozenset({ROLLOUT} if joined else ()),
        beside=config.rollout.starts_beside,
        imports=config.rollout.imports,
    )


def _described(replicas: int, joined: int, engine_ranks: int | None) -> str:
    """Return the number of replicas and the processes of their engines as text."""
    if joined:
        return f"rollout × {replicas}, each an engine that is already running"
    if engine_ranks is None:
        return f"rollout × {replicas}"
    ranks = "1 rank" if engine_ranks == 1 else f"{engine_ranks} ranks"
    each = ", each" if replicas > 1 else ""
    return f"rollout × {replicas}{each} with an engine of {ranks} in processes of its own"


def replicas_in(config: RunConfig, pool: Pool) -> int:
    """Return the number of rollout replicas in a pool (a set of ranks).

    Raises:
        PlanError: the configured replicas do not fit the pool.
    """
    joined = config.rollout.joined
    if joined:
        if config.rollout.replicas not in {None, joined}:
            raise PlanError(
                f"rollout.replicas={config.rollout.replicas}, but rollout {config.rollout.name!r} connects to "
                f"{joined} engines that are already running, one for each replica",
                hint="leave rollout.replicas out",
            )
        return joined
    each = config.rollout.ranks_per_replica()
    if config.runtime.in_process:
        return config.rollout.replicas or 1
    if each > pool.ranks:
        raise PlanError(
            f"one rollout replica takes {each} ranks, but pool {pool.name!r} has {pool.described()}",
            hint="give the pool more ranks, or lower the engine's parallel sizes",
        )
    fitting = pool.ranks // each
    if pool.accelerators and pool.nodes > 1 and pool.ranks_per_node % each:
        raise PlanError(
            f"one rollout replica takes {each} accelerators, and pool {pool.name!r} has {pool.described()}: a replica would span "
            "two machines",
            hint=f"choose parallel sizes of the engine whose product divides {pool.ranks_per_node}",
        )
    wanted = config.rollout.replicas or fitting
    if wanted > fitting and pool.accelerators:
        raise PlanError(
            f"rollout.replicas={wanted} needs {wanted * each} accelerators, but pool {pool.name!r} has "
            f"{pool.described()}",
            hint=f"set rollout.replicas={fitting} or leave it out",
        )
    return wanted


def default_transport(config: RunConfig) -> str:
    """Return the weight transport for a config that selects none, according to where trainer and engine run."""
    runtime, rollout = config.runtime, config.rollout
    if not runtime.in_process or (rollout.in_process and not rollout.joined):
        return runtime.default_transport(joined=bool(rollout.joined))
    kind = _accelerator(getattr(runtime, "device", "auto"))
    if kind is None:
        return _BETWEEN_PROCESSES
    if rollout.joined:
        return _BETWEEN_ACCELERATORS
    # The engine's processes use this process's accelerator. Few kinds of accelerator can share memory between processes.
    installed = {entry.name for entry in default_index().entries("weight_transport")}
    return f"{kind}_ipc" if f"{kind}_ipc" in installed else _BETWEEN_PROCESSES


def _accelerator(device: str) -> str | None:
    """Return the device type of the accelerator that `runtime.device` selects in this process, such as `cuda`; None for the CPU."""
    import torch

    if device != "auto":
        kind = device.partition(":")[0]
        return None if kind == "cpu" else kind
    here = torch.accelerator.current_accelerator(check_available=True)
    return None if here is None else here.type


def _check_transport(config: RunConfig, transport: SelectedPlugin, rollout: SelectedPlugin) -> None:
    one_process = config.runtime.in_process and config.rollout.in_process
    if not one_process and "in_process" in transport.cls.capabilities:
        apart = (
            f"rollout {rollout.ref.name!r} loads weights in processes of its own"
            if not config.rollout.in_process
            else f"runtime {config.runtime.name!r} runs trainer and rollout in different processes"
        )
        raise PlanError(
            f"rollout.weight_transport {transport.ref.name!r} hands weights over within one process, but {apart}",
            hint=f"leave rollout.weight_transport out ({default_transport(config)!r} is then used), or name another transport",
        )
    if one_process and "ends_meet" in transport.cls.capabilities:
        raise PlanError(
            f"rollout.weight_transport {transport.ref.name!r} needs trainer and rollout to run at the same time, but runtime "
            f"{config.runtime.name!r} runs them one after the other in this process",
            hint=f"leave rollout.weight_transport out ({default_transport(config)!r} is then used)",
        )


def _check_machines(
    config: RunConfig, transport: SelectedPlugin, rollout: Pool, trainer: Pool
) -> None:
    """Raise PlanError if the transport can't connect the machines of trainer and rollout.

    Also refuse a transport between different accelerators (such as NCCL) if trainer and rollout share the same accelerators.
    """
    able, joined = transport.cls.capabilities, config.rollout.joined
    together = rollout == trainer and not joined
    if together and trainer.accelerators and able >= {"across_machines", "ends_meet"}:
        raise PlanError(
            f"rollout.weight_transport {transport.ref.name!r} carries weights between accelerators, but in pool {trainer.name!r} "
            "the rollout and the actor share the same accelerators",
            hint=f"leave rollout.weight_transport out ({default_transport(config)!r} is then used), or give the rollout a pool of its own "
            "(runtime.pools)",
        )
    if max(rollout.nodes, trainer.nodes) == 1 or "across_machines" in able:
        return
    if "on_each_machine" in able and together:
        return
    where = f"pool {trainer.name!r} ({trainer.described()})"
    if not together:
        other = "engines that are already running" if joined else f"pool {rollout.name!r}"
        where = f"the actor is in {where} and the rollout in {other}"
    raise PlanError(
        f"rollout.weight_transport {transport.ref.name!r} carries weights within one machine, but the run spans several: {where}",
        hint=f"leave rollout.weight_transport out ({default_transport(config)!r} is then used), or name one with the capability "
        "'across_machines': `dovetail plugins list weight_transport` shows them",
    )


def _check_offload(config: RunConfig, rollout: SelectedPlugin) -> None:
    if config.rollout.offload and "sleep" not in rollout.cls.capabilities:
        raise PlanError(
            f"rollout.offload=true frees the rollout's memory between rollouts, but rollout {rollout.ref.name!r} can't do this: it "
            "lacks the capability 'sleep'",
            hint="leave rollout.offload out, or choose a rollout with that capability: "
            "`dovetail plugins list rollout` shows them",
        )


def _check_kind(section: RolloutSection, actor: SelectedPlugin, rollout: SelectedPlugin) -> None:
    if not isinstance(actor.config, EngineSection):
        return
    if actor.config.weight_kind() != "adapter":
        return
    if "lora" not in rollout.cls.capabilities:
        raise PlanError(
            f"actor.engine {actor.ref.name!r} is set to send its adapter alone, but rollout {rollout.ref.name!r} can't "
            "apply adapters: it lacks the capability 'lora'",
            hint="let the engine send merged weights (`lora.sync: merged` where the engine is fsdp2 or megatron), or choose a "
            "rollout with that capability: `dovetail plugins list rollout` shows them",
        )
    problem = section.unfit_adapter(actor.config.planned_adapter())
    if problem is not None:
        raise PlanError(
            f"actor.engine {actor.ref.name!r} is set to send its adapter alone, and rollout {rollout.ref.name!r} {problem}",
            hint="change the adapter, or let the engine send merged weights (`lora.sync: merged` where the engine is fsdp2 or megatron)",
        )
