"""build_objective: from a spec to the objective, in the worker that uses it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

from dovetail.interfaces.objective import (
    AnyObjectiveSpec,
    PreferenceObjectiveSpec,
    ValueObjectiveSpec,
)
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.runtime import PluginRef
from dovetail.numerics.objective import Objective
from dovetail.numerics.policy_objective import PolicyObjective
from dovetail.numerics.preference_objective import PreferenceObjective
from dovetail.numerics.value_objective import ValueObjective
from dovetail.plugins.load import make_plugin

if TYPE_CHECKING:
    from dovetail.interfaces.policy_loss import LossAggregation, PolicyLoss
    from dovetail.interfaces.rollout_correction import RolloutCorrection

KEPT = 32
"""Plugins kept for later objectives: a KL weight that moves makes a new spec every step."""


def build_objective(spec: AnyObjectiveSpec, *, seed: int = 0) -> Objective:
    """Make the objective that the spec names, through the plugin index. Plugins made before are used again.

    Args:
        spec: of a policy, of a value function or of a reward model.
        seed: the run's, for losses that choose at random.

    Raises:
        PluginError: a plugin that it names can't be found or loaded here.
    """
    if isinstance(spec, PreferenceObjectiveSpec):
        return PreferenceObjective(spec)
    aggregation = cast("LossAggregation", _plugin(spec.loss_aggregation, seed))
    if isinstance(spec, ValueObjectiveSpec):
        return ValueObjective(spec, aggregation)
    correction = None if spec.correction is None else _plugin(spec.correction, seed)
    return PolicyObjective(
        spec,
        cast("PolicyLoss", _plugin(spec.policy_loss, seed)),
        aggregation,
        cast("RolloutCorrection | None", correction),
    )


@functools.lru_cache(maxsize=KEPT)
def _kept_plugin(ref: PluginRef, seed: int) -> object:
    return make_plugin(ref, PluginContext(seed=seed))


def _plugin(ref: PluginRef, seed: int) -> object:
    try:
        hash(ref)
    except TypeError:
        # A config with a dict in it can't be a key.
        return make_plugin(ref, PluginContext(seed=seed))
    return _kept_plugin(ref, seed)
