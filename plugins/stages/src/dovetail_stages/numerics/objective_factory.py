"""Builds an objective from its spec, and prepares a mini-batch for it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import cast

from dovetail.batch import Batch
from dovetail.interfaces import READS, Objective, ObjectiveSpec, PluginContext, PluginRef, Reduction
from dovetail.plugins import make_plugin
from dovetail_stages.numerics.finite import require_finite

KEPT = 32
"""Number of objectives that are cached for later updates."""


def build_objective(spec: ObjectiveSpec, *, seed: int = 0) -> Objective:
    """Return the objective that a spec describes, made from the plugin that the spec names; objectives are cached.

    Args:
        spec: the spec of the objective.
        seed: the run's seed, for losses that choose at random.

    Raises:
        PluginError: a plugin that the spec names can't be found or loaded.
    """
    try:
        hash(spec.plugin)
    except TypeError:
        # A config that contains a dict can't be a key of the cache.
        return _made(spec.plugin, seed)
    return _kept(spec.plugin, seed)


def prepare_mini_batch(
    goal: Objective,
    spec: ObjectiveSpec,
    mini_batch: Batch,
    reduction: Reduction,
    also: Collection[str] = (),
) -> tuple[Batch, Mapping[str, float]]:
    """Return the prepared mini-batch, and the denominators by which sums over it are divided; every rank must make this call.

    The prepared mini-batch has only the columns that micro-batches need.

    Args:
        goal: the objective, built from the spec.
        spec: the spec of the objective.
        mini_batch: this rank's part of the mini-batch.
        reduction: the sum over the ranks that share the mini-batch.
        also: further columns that the engine reads, if the mini-batch has them.

    Raises:
        ColumnError: a column is missing, or not as the objective needs it.
        NumericsError: a required column is not finite where the mask is 1; carries the samples' ids.
    """
    who = f"objective {spec.plugin.name!r}"
    mini_batch.require(sorted(spec.requires), who)
    require_finite(mini_batch, spec.requires, reduction, who)
    prepared = goal.prepare(mini_batch, reduction)
    denominators = goal.denominators(prepared, reduction)
    made = set(prepared.names) - set(mini_batch.names)
    kept = {*READS, *spec.requires, *made, *also} & set(prepared.names)
    return prepared.select(sorted(kept)), denominators


def _made(ref: PluginRef, seed: int) -> Objective:
    return cast("Objective", make_plugin(ref, PluginContext(seed=seed)))


_kept = functools.lru_cache(maxsize=KEPT)(_made)
