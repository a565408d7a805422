"""Search for the samples of a micro-batch whose loss is not finite. Legend: N samples, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dovetail.batch import Batch
from dovetail.dispatch import Unit
from dovetail.interfaces import Objective, ObjectiveSpec
from dovetail.workers import unit_ids
from dovetail_torch_engines.scored import token_places


def unit_rows(batch: Batch, unit: Unit) -> list[np.ndarray]:
    """Return the row indices of each unit (samples that share a loss), int64 [n] each, ascending; units are ordered by first row.

    Args:
        batch: a batch with the column that identifies units, such as the group id.
        unit: the kind of unit that an objective declares, such as `sample`.
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
    """Return the row indices of a micro-batch's samples whose loss or outputs are not finite.

    Args:
        goal: the objective, built from the spec.
        spec: the specification of the objective.
        micro_batch: the micro-batch of a prepared mini-batch.
        outputs: the model's outputs by name, [T, …] each for the T response tokens.
        denominators: the loss's denominators over the whole mini-batch, by name.
    """
    offsets = micro_batch["response_mask"].offsets
    failing: list[int] = []
    for rows in unit_rows(micro_batch, spec.unit):
        places = torch.from_numpy(token_places(offsets, rows))
        alone = {name: values[places.to(values.device)] for name, values in outputs.items()}
        if not goal.term(alone, micro_batch.take(rows), denominators, spec.scalars).finite:
            failing += rows.tolist()
    return failing
