"""An estimate of the memory that a plan's models take, from the model's shape alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dovetail.errors import ModelError
from dovetail.interfaces.model_shape import BYTES, ModelShape
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


def estimate_memory(config: RunConfig, plan: Plan) -> dict[str, int]:
    """Return bytes by purpose on the fullest rank: weights, gradients, the optimizer's moments, rollout weights, KV cache.

    What is trained is float32: weights, gradients, and the state that the optimizer says it keeps. Under
    low-rank adapters that is the adapters alone; the model below them is frozen in `model.dtype` where it is stored in that,
    and in float32 elsewhere. Activations are not counted: they follow `actor.max_tokens_per_micro_batch`.

    Raises:
        ModelError: a model can't be read, or a config leaves to the engine which layers have adapters.
    """
    taken = {role.role: dict(_training(config, plan, role)) for role in plan.models}
    source = plan.facts.plugins["source"]
    taken |= {role: dict(parts) for role, parts in source.cls.memory(source.config, plan).items()}
    pools = [
        {what: size for role in pool.roles for what, size in taken.get(role, {}).items()}
        for pool in plan.placement.pools
    ]
    return max(pools, key=lambda pool: sum(pool.values()))


def _training(config: RunConfig, plan: Plan, role: ModelRole) -> Iterator[tuple[str, int]]:
    section, shape = role.engine.config, shape_of(config, plan, role)
    shards = section.shards(role.mesh.size) if isinstance(section, EngineSection) else 1
    base = -(-base_parameters(shape, role) // shards)
    planned = planned_adapter(role)
    if planned is not None and not adapted_layers(planned, shape):
        raise ModelError(f"which layers of {role.role} have adapters is left to the engine")
    trained = base if role.trained else 0
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
        trained = -(-adapter_parameters(planned, shape) // shards)
        yield f"{role.role} adapters", trained * _FLOAT32
    if role.trained:
        yield f"{role.role} gradients", trained * _FLOAT32
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
    """Return how many checkpoints a run has on its disk at most: those that it keeps, the best one, and one that is being written."""
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
