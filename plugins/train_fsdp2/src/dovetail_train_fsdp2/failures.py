"""Search for the samples that made an update fail. Samples are scored one by one only after a failure, at no cost otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dovetail.batch import Batch
from dovetail.interfaces import Objective, ObjectiveSpec
from dovetail_torch_engines import failing_rows
from dovetail_train_fsdp2.forward import ModelRunner
from dovetail_train_fsdp2.layout import lay_out
from dovetail_train_fsdp2.packing import MicroBatchPlan


@torch.no_grad()
def all_failing_rows(
    runner: ModelRunner,
    goal: Objective,
    spec: ObjectiveSpec,
    mini_batch: Batch,
    denominators: Mapping[str, float],
    parts: Sequence[MicroBatchPlan],
) -> list[int]:
    """Return positions in the mini-batch of the samples whose outputs or loss are not finite, in order.

    Args:
        runner: the model, whose weights the failed update did not change.
        goal: the objective.
        spec: the specification of the objective.
        mini_batch: the prepared mini-batch.
        denominators: the loss's denominators over the whole mini-batch, by name.
        parts: the update's micro-batches; with a sharded model their number is the same on every rank.
    """
    failing: list[int] = []
    for part in parts:
        micro_batch = mini_batch.take(part.rows_B)
        layout = lay_out(micro_batch, spec.outputs, shared=part.shared, packed=part.packed)
        scores = runner(layout, spec.outputs)
        found = failing_rows(goal, spec, micro_batch, scores, denominators)
        failing += part.rows_B[found].tolist()
    return sorted(failing)
