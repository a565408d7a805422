"""An estimate of the memory of a plan's models, from the model's shape alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import attrs

from dovetail.errors import ModelError
from dovetail.interfaces import BYTES, MemoryRules, ModelShape, UpdateSize, WorkingMemory
from dovetail.planning import ModelRole, Plan
from dovetail.sections import EngineSection

Measured = MutableMapping[str, WorkingMemory | None]
"""Cache of the working memory that engines reported (None if unknown). The key is the text of all arguments that the engine was given."""
_FLOAT32 = BYTES["float32"]
_NF4 = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a 4-bit weight, including 8 bits for each 64 weights' scale, and 32 bits for the scale of 256 such scales."""


@attrs.frozen(kw_only=True)
class PlannedMemory:
    """The memory use of the fullest rank's accelerator, for each phase of a step."""

    phases: Mapping[str, Mapping[str, int]]
    """Phase, such as `update of actor` → bytes held in this phase, by purpose, such as `actor weights`."""
    spare: Mapping[str, int] = attrs.field(factory=dict)
    """Phase → bytes that the engine of the phase's model can do without if memory is short."""
    rollout: Mapping[str, int] = attrs.field(factory=dict)
    """Phase → bytes that rollout engines occupy on the accelerator during the phase."""
    uncounted: tuple[str, ...] = ()
    """Roles whose working memory, which includes activations, is not known."""

    @property
    def fullest(self) -> str:
        """The phase that takes the most memory."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        """Bytes of the fullest phase."""
        return sum(self.phases[self.fullest].values())

    def least(self, phase: str) -> int:
        """Return the minimum bytes of a phase: all of its bytes minus its `spare` bytes."""
        return sum(self.phases[phase].values()) - self.spare.get(phase, 0)


def estimate_memory(
    plan: Plan, *, card: int | None = None, measured: Measured | None = None
) -> PlannedMemory:
    """Estimate the memory use of a rank's accelerator: weights, gradients, optimizer state, working memory, and the rollout engine.

    Trained weights and gradients are float32; the optimizer plugin gives the size of its state. With low-rank adapters, only the adapters are
    trained. The frozen base model is in `model.dtype` if it is stored in that dtype, else in float32.

    Args:
        plan: the plan of the run.
        card: memory of an accelerator in bytes. A rollout engine that is configured to take a share of the accelerator counts
            with this share of `card`. If `card` is None, the engine counts with its estimated need.
        measured: a cache of measurements, read and extended here, because an engine may run a model to measure its memory.

    Raises:
        ModelError: a model can't be read, or the config does not say which layers have adapters.
    """
    source = plan.facts.plugins["source"]
    generating: Mapping[str, Mapping[str, int]] = source.cls.memory(source.config, plan)
    rules: Mapping[str, MemoryRules] = source.cls.memory_rules(source.config, plan)
    taken = {
        role: _taken(role, parts, rules.get(role, MemoryRules()), card)
        for role, parts in generating.items()
    }
    awake = {role for role in taken if not rules.get(role, MemoryRules()).sleeps}
    found = [
        _at_times(
            [
                _needs(plan, model, {} if measured is None else measured)
                for model in plan.models
                if model.role in pool.roles
            ],
            _joined(*(taken[role] for role in pool.roles if role in taken)),
            _joined(*(taken[role] for role in pool.roles if role in awake)),
        )
        for pool in plan.placement.pools
    ]
    return max((memory for memory in found if memory.phases), key=lambda memory: memory.peak)


def _taken(
    role: str, parts: Mapping[str, int], rule: MemoryRules, card: int | None
) -> Mapping[str, int]:
    """Return the bytes that a rollout engine takes, by purpose: its estimated needs (`parts`), or its configured share of `card` bytes."""
    if card is None or rule.share is None:
        return parts
    share = round(card * rule.share * rule.engines)
    if rule.bounded and sum(parts.values()) < share:
        return parts
    return {f"{role}, its share": share}


@attrs.frozen
class _Needs:
    """The memory of a role: held always (`held`), and in addition while it computes (`gradients`, `working`)."""

    role: ModelRole
    held: Mapping[str, int]
    gradients: Mapping[str, int]
    working: WorkingMemory | None


def _needs(plan: Plan, role: ModelRole, measured: Measured) -> _Needs:
    working = _working(plan, role, measured)
    section = role.engine.config
    if isinstance(section, EngineSection) and section.host_states:
        return _Needs(role, {}, {}, working)
    held, gradients = _held(plan, role), _gradients(plan, role)
    return _Needs(role, dict(held), dict(gradients), working)


def _at_times(
    models: Sequence[_Needs], engines: Mapping[str, int], awake: Mapping[str, int]
) -> PlannedMemory:
    """Return the memory that a rank holds in each phase of a step.

    Args:
        models: the models that share the rank.
        engines: the memory of engines that generate on the rank, by purpose.
        awake: the part of `engines` that stays on the accelerator while the models compute.
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


def _working(plan: Plan, role: ModelRole, measured: Measured) -> WorkingMemory | None:
    config, counts = plan.facts.config, plan.counts
    prompts = {
        "actor": counts.prompts_per_mini_batch,
        "critic": counts.critic_prompts_per_mini_batch,
    }.get(role.role, counts.prompts_per_step)
    unit = "sample" if role.objective is None else role.objective.unit
    parts, responses = role.mesh.axis_size("dp"), counts.of.samples
    if unit == "sample" and prompts % parts:
        # Groups are divided among the ranks then, so that a rank has fewer responses to more prompts.
        prompts, responses = prompts * responses, -(-responses // parts)
        prompts = -(-prompts // responses)
    size = UpdateSize(
        prompts=-(-prompts // parts),
        responses=responses,
        prompt_tokens=config.data.max_prompt_length,
        response_tokens=config.data.max_response_length,
        budget=role.training.max_tokens_per_micro_batch,
        unit=unit,
    )
    section, trained, ranks = config.model_section(role.role), role.trained, role.mesh.size
    question = repr((role.engine, section, role.head, trained, ranks, size))
    if question not in measured:
        measured[question] = plan.facts.engine(role.role).cls.working_memory(
            role.engine.config, section, head=role.head, trained=trained, ranks=ranks, size=size
        )
    return measured[question]


def _gradients(plan: Plan, role: ModelRole) -> Iterator[tuple[str, int]]:
    if role.trained:
        section, shape = role.engine.config, plan.shape(role)
        shards = section.shards(role.mesh.size) if isinstance(section, EngineSection) else 1
        planned = role.adapter
        whole = shape.adapter_parameters(planned) if planned else role.parameters(shape)
        yield f"{role.role} gradients", -(-whole // shards) * _FLOAT32


def _held(plan: Plan, role: ModelRole) -> Iterator[tuple[str, int]]:
    section, shape = role.engine.config, plan.shape(role)
    shards = section.shards(role.mesh.size) if isinstance(section, EngineSection) else 1
    base = -(-role.parameters(shape) // shards)
    planned = role.adapter
    if planned is not None and not shape.adapted_layers(planned):
        raise ModelError(
            f"the memory of the LoRA adapters of {role.role} can't be estimated: the engine chooses their layers only when the run starts; "
            f"name them in {role.key}.engine.lora.target_modules"
        )
    if planned is None:
        yield f"{role.role} weights", base * _FLOAT32
    else:
        full, rounded = base * _frozen_width(plan, shape), 0
        if planned.base is not None:
            # Every rank has the complete base weights.
            matrices = shape.linear_parameters
            rest = -(-(role.parameters(shape) - matrices) // shards)
            full, rounded = rest * _frozen_width(plan, shape), round(matrices * _NF4)
        yield f"{role.role} weights, frozen", full + rounded
        yield f"{role.role} adapters", -(-shape.adapter_parameters(planned) // shards) * _FLOAT32
    if role.trained:
        state = -(-plan.optimizer_bytes(role, shape) // shards)
        if state:
            yield f"{role.role} optimizer", state


def most_checkpoints(plan: Plan) -> int:
    """Return the maximum number of checkpoints on disk: the kept checkpoints, the best one, and one being written."""
    trainer, steps = plan.facts.config.trainer, plan.counts.steps or 1
    saved = steps // trainer.save_every if trainer.save_every else 0
    saved += trainer.save_last and not (trainer.save_every and steps % trainer.save_every == 0)
    if trainer.keep_checkpoints is None:
        return saved
    every = math.lcm(trainer.keep_every, trainer.save_every) if trainer.save_every else steps
    kept = trainer.keep_checkpoints + 1 + (trainer.best_metric is not None)
    return min(saved, kept + (steps // every if trainer.keep_every else 0))


def _frozen_width(plan: Plan, shape: ModelShape) -> int:
    """Return the bytes of a frozen weight: float32 unless the model is stored in the config's dtype."""
    dtype = plan.facts.config.model.dtype
    return BYTES[dtype] if shape.stored_dtype in (None, dtype) else _FLOAT32
