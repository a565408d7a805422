"""An estimate of the memory that a plan's models take, from the model's shape alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import attrs

from dovetail.errors import ModelError
from dovetail.interfaces.model_shape import (
    BYTES,
    MemoryRules,
    ModelShape,
    UpdateSize,
    WorkingMemory,
)
from dovetail.planning.adapters import (
    adapted_layers,
    adapter_parameters,
    base_parameters,
    planned_adapter,
    shape_of,
)
from dovetail.planning.models import ModelRole
from dovetail.planning.plan import Plan
from dovetail.sections import EngineSection, RunConfig

_FLOAT32 = BYTES["float32"]
_NF4 = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a weight in 4 bits, with 8 for the scale of 64 weights and 32 for that of 256 scales."""


@attrs.frozen(kw_only=True)
class PlannedMemory:
    """The memory use of the fullest rank's accelerator, for each phase of a step."""

    phases: Mapping[str, Mapping[str, int]]
    """By time, such as `update of actor`: bytes by purpose."""
    spare: Mapping[str, int] = attrs.field(factory=dict)
    """By time: bytes that the engine does without by itself where memory is short."""
    rollout: Mapping[str, int] = attrs.field(factory=dict)
    """By time: bytes of the engines that generate, where some are there."""
    uncounted: tuple[str, ...] = ()
    """Roles of which the working memory is not known, activations among it."""

    @property
    def fullest(self) -> str:
        """The time at which most is held."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        """Bytes that are held then."""
        return sum(self.phases[self.fullest].values())

    def least(self, phase: str) -> int:
        """Return the bytes that a time of a step takes at least."""
        return sum(self.phases[phase].values()) - self.spare.get(phase, 0)


def estimate_memory(config: RunConfig, plan: Plan, *, card: int | None = None) -> PlannedMemory:
    """Estimate the memory use of a rank's accelerator: weights, gradients, optimizer state, working memory, the rollout's engine.

    What is trained is float32: weights, gradients, and the state that the optimizer says it keeps. Under
    low-rank adapters that is the adapters alone; the model below them is frozen in `model.dtype` where it is stored in that,
    and in float32 elsewhere.

    Args:
        config: the config of the run.
        plan: the plan of the run.
        card: bytes of an accelerator, of which some engines take a share; None counts what they need at most.

    Raises:
        ModelError: a model can't be read, or a config leaves to the engine which layers have adapters.
    """
    source = plan.facts.plugins["source"]
    generating: Mapping[str, Mapping[str, int]] = source.cls.memory(source.config, plan)
    rules: Mapping[str, MemoryRules] = source.cls.memory_rules(source.config, plan)
    taken = {
        role: {f"{role}, its share": round(card * rule.share)}
        if card is not None and (rule := rules.get(role, MemoryRules())).share is not None
        else parts
        for role, parts in generating.items()
    }
    awake = {role for role in taken if not rules.get(role, MemoryRules()).sleeps}
    found = [
        _at_times(
            [_needs(config, plan, model) for model in plan.models if model.role in pool.roles],
            _joined(*(taken[role] for role in pool.roles if role in taken)),
            _joined(*(taken[role] for role in pool.roles if role in awake)),
        )
        for pool in plan.placement.pools
    ]
    return max((memory for memory in found if memory.phases), key=lambda memory: memory.peak)


@attrs.frozen
class _Needs:
    """What a role takes: always, and while it computes."""

    role: ModelRole
    held: Mapping[str, int]
    gradients: Mapping[str, int]
    working: WorkingMemory | None


def _needs(config: RunConfig, plan: Plan, role: ModelRole) -> _Needs:
    working = _working(config, plan, role)
    section = role.engine.config
    if isinstance(section, EngineSection) and section.host_states:
        return _Needs(role, {}, {}, working)
    held, gradients = _held(config, plan, role), _gradients(config, plan, role)
    return _Needs(role, dict(held), dict(gradients), working)


def _at_times(
    models: Sequence[_Needs], engines: Mapping[str, int], awake: Mapping[str, int]
) -> PlannedMemory:
    """Return what a rank holds at each time of a step.

    Args:
        models: that share the rank.
        engines: what generates there, by purpose.
        awake: what of that stays while the models compute.
    """
    phases: dict[str, Mapping[str, int]] = {}
    rollout: dict[str, int] = {}
    if engines:
        stay = (needs.held for needs in models if not needs.role.training.offload)
        phases["generation"] = _joined(engines, *stay)
        rollout["generation"] = sum(engines.values())
    spare = {}
    for needs in models:
        role, working = needs.role, needs.working
        phase = f"{'update' if role.trained else 'scores'} of {role.role}"
        parts = working.parts if working else {}
        own = {f"{role.role} {what}": size for what, size in parts.items()}
        beside = (m.held for m in models if m is not needs and not m.role.training.offload)
        phases[phase] = _joined(needs.held, needs.gradients, own, *beside, awake)
        spare[phase] = working.spare if working else 0
        if awake:
            rollout[phase] = sum(awake.values())
    return PlannedMemory(
        phases=phases,
        spare=spare,
        rollout=rollout,
        uncounted=tuple(needs.role.role for needs in models if needs.working is None),
    )


def _joined(*parts: Mapping[str, int]) -> dict[str, int]:
    return {what: size for part in parts for what, size in part.items()}


def _working(config: RunConfig, plan: Plan, role: ModelRole) -> WorkingMemory | None:
    counts = plan.counts
    prompts = {
        "actor": counts.prompts_per_mini_batch,
        "critic": counts.critic_prompts_per_mini_batch,
    }.get(role.role, counts.prompts_per_step)
    found: WorkingMemory | None = plan.facts.engine(role.role).cls.working_memory(
        role.engine.config,
        config.model_section(role.role),
        head=role.head,
        trained=role.trained,
        ranks=role.mesh.size,
        size=UpdateSize(
            prompts=-(-prompts // role.mesh.axis_size("dp")),
            responses=counts.of.samples,
            prompt_tokens=config.data.max_prompt_length,
            response_tokens=config.data.max_response_length,
            budget=role.training.max_tokens_per_micro_batch,
        ),
    )
    return found


def _gradients(config: RunConfig, plan: Plan, role: ModelRole) -> Iterator[tuple[str, int]]:
    if role.trained:
        section, shape = role.engine.config, shape_of(config, plan, role)
        shards = section.shards(role.mesh.size) if isinstance(section, EngineSection) else 1
        planned = planned_adapter(role)
        whole = adapter_parameters(planned, shape) if planned else base_parameters(shape, role)
        yield f"{role.role} gradients", -(-whole // shards) * _FLOAT32


def _held(config: RunConfig, plan: Plan, role: ModelRole) -> Iterator[tuple[str, int]]:
    section, shape = role.engine.config, shape_of(config, plan, role)
    shards = section.shards(role.mesh.size) if isinstance(section, EngineSection) else 1
    base = -(-base_parameters(shape, role) // shards)
    planned = planned_adapter(role)
    if planned is not None and not adapted_layers(planned, shape):
        raise ModelError(f"which layers of {role.role} have adapters is left to the engine")
    if planned is None:
        yield f"{role.role} weights", base * _FLOAT32
    else:
        full, rounded = base * _frozen_width(config, shape), 0
        if planned.base is not None:
            # Every rank has them whole.
            matrices = _matrices(shape)
            rest = -(-(base_parameters(shape, role) - matrices) // shards)
            full, rounded = rest * _frozen_width(config, shape), round(matrices * _NF4)
        yield f"{role.role} weights, frozen", full + rounded
        yield f"{role.role} adapters", -(-adapter_parameters(planned, shape) // shards) * _FLOAT32
    if role.trained:
        state = -(-_state_bytes(plan, role, shape) // shards)
        if state:
            yield f"{role.role} optimizer", state


def checkpoint_bytes(config: RunConfig, plan: Plan) -> int:
    """Return the bytes of a checkpoint's weights and moments, over all ranks; 0 where a model's shape can't be read."""
    total = 0
    for role in plan.models:
        if not role.moves:
            continue
        try:
            shape = shape_of(config, plan, role)
        except ModelError:
            return 0
        planned = planned_adapter(role)
        trained = (
            base_parameters(shape, role) if planned is None else adapter_parameters(planned, shape)
        )
        total += trained * _FLOAT32
        if role.trained:
            total += _state_bytes(plan, role, shape)
    return total


def most_checkpoints(config: RunConfig, plan: Plan) -> int:
    """Return the maximum number of checkpoints on disk: those that are kept, the best one, and one being written."""
    trainer, steps = config.trainer, plan.counts.steps or 1
    saved = steps // trainer.save_every if trainer.save_every else 0
    saved += trainer.save_last and not (trainer.save_every and steps % trainer.save_every == 0)
    if trainer.keep_checkpoints is None:
        return saved
    every = math.lcm(trainer.keep_every, trainer.save_every) if trainer.save_every else steps
    kept = trainer.keep_checkpoints + 1 + (trainer.best_metric is not None)
    return min(saved, kept + (steps // every if trainer.keep_every else 0))


def _state_bytes(plan: Plan, role: ModelRole, shape: ModelShape) -> int:
    """Bytes of the optimizer's state, over all ranks."""
    optimizer = plan.facts.plugins[f"{role.key}.optim"]
    planned = planned_adapter(role)
    if planned is None:
        matrices = _matrices(shape)
        others = max(0, base_parameters(shape, role) - matrices)
    else:
        matrices, others = adapter_parameters(planned, shape), 0
    sizes: list[float] = [
        optimizer.cls.state_bytes(optimizer.config, matrix=m) for m in (True, False)
    ]
    return round(matrices * sizes[0] + others * sizes[1])


def _matrices(shape: ModelShape) -> int:
    """Weights of linear layers, without the output layer's."""
    layers = [layer for layer in shape.layers.values() if layer.linear and not layer.shared]
    return sum(layer.inputs * layer.outputs for layer in layers)


def _frozen_width(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of a frozen number: masters are narrowed only to the dtype that they are stored in."""
    same = shape.stored_dtype in (None, config.model.dtype)
    return BYTES[config.model.dtype] if same else _FLOAT32
