"""What engines do with an objective: build it from its spec, prepare the mini-batch, and find what is not finite."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dovetail.batch.batch import Batch
from dovetail.dispatch.registration import Unit
from dovetail.interfaces.objective import Objective, ObjectiveSpec
from dovetail.interfaces.plugin import PluginContext, Reduction
from dovetail.interfaces.runtime import PluginRef
from dovetail.numerics.finite import require_finite
from dovetail.plugins.load import make_plugin
from dovetail.training.columns import READS
from dovetail.training.scored import token_places
from dovetail.workers.division import unit_ids

KEPT = 32
"""Objectives kept for later updates."""


def build_objective(spec: ObjectiveSpec, *, seed: int = 0) -> Objective:
    """Make the objective that the spec names, through the plugin index; one made before is used again.

    Args:
        spec: of any objective.
        seed: the run's, for losses that choose at random.

    Raises:
        PluginError: a plugin that it names can't be found or loaded here.
    """
    try:
        hash(spec.plugin)
    except TypeError:
        # A config with a dict in it can't be a key.
        return _made(spec.plugin, seed)
    return _kept(spec.plugin, seed)


def prepare_mini_batch(
    goal: Objective,
    spec: ObjectiveSpec,
    mini_batch: Batch,
    reduction: Reduction,
    also: Collection[str] = (),
) -> tuple[Batch, Mapping[str, float]]:
    """Return the mini-batch with the columns that micro-batches need, and no others, and its denominators. Collective.

    Args:
        goal: built from the spec.
        spec: of the objective.
        mini_batch: this rank's part of it.
        reduction: sums over the ranks that hold the other parts.
        also: further columns that the engine reads, where the mini-batch has them.

    Raises:
        ColumnError: a column is missing, or not as the objective needs it.
        NumericsError: a required column is not finite where the mask is 1; it carries the samples' ids.
    """
    who = f"objective {spec.plugin.name!r}"
    mini_batch.require(sorted(spec.requires), who)
    require_finite(mini_batch, spec.requires, reduction, who)
    prepared = goal.prepare(mini_batch, reduction)
    denominators = goal.denominators(prepared, reduction)
    made = set(prepared.names) - set(mini_batch.names)
    kept = {*READS, *spec.requires, *made, *also} & set(prepared.names)
    return prepared.select(sorted(kept)), denominators


def unit_rows(batch: Batch, unit: Unit) -> list[np.ndarray]:
    """Rows of each unit, int64 [n] each, rising; units in the order of their first rows.

    Args:
        batch: with the unit's column.
        unit: of an objective.
    """
    _, first, index_N = np.unique(unit_ids(batch, unit), return_index=True, return_inverse=True)
    return [np.flatnonzero(index_N == number) for number in np.argsort(first)]


def failing_rows(
    goal: Objective,
    spec: ObjectiveSpec,
    micro_batch: Batch,
    outputs: Mapping[str, Tensor],
    denominators: Mapping[str, float],
) -> list[int]:
    """Rows of a micro-batch whose unit's loss or outputs are not finite.

    Args:
        goal: built from the spec.
        spec: of the objective.
        micro_batch: of a prepared mini-batch.
        outputs: of the micro-batch, [T, …] each.
        denominators: of the mini-batch.
    """
    offsets = micro_batch["response_mask"].offsets
    failing: list[int] = []
    for rows in unit_rows(micro_batch, spec.unit):
        places = torch.from_numpy(token_places(offsets, rows))
        alone = {name: values[places.to(values.device)] for name, values in outputs.items()}
        if not goal.term(alone, micro_batch.take(rows), denominators, spec.scalars).finite:
            failing += rows.tolist()
    return failing


def _made(ref: PluginRef, seed: int) -> Objective:
    return cast("Objective", make_plugin(ref, PluginContext(seed=seed)))


_kept = functools.lru_cache(maxsize=KEPT)(_made)
