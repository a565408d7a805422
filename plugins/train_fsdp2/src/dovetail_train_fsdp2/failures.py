"""Which samples made an update fail: found afterwards, by scoring each alone, since a good update must not pay for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dovetail.batch import Batch
from dovetail.errors import NumericsError
from dovetail.interfaces import Objective, ObjectiveSpec
from dovetail.numerics import listed
from dovetail_train_fsdp2.forward import Scorer
from dovetail_train_fsdp2.layout import lay_out
from dovetail_train_fsdp2.packing import Cut


@torch.no_grad()
def failing_rows(
    scorer: Scorer,
    goal: Objective,
    spec: ObjectiveSpec,
    mini_batch: Batch,
    denominators: Mapping[str, float],
    parts: Sequence[Cut],
) -> list[int]:
    """Positions in the mini-batch of the samples whose outputs or loss are not finite, in order.

    Args:
        scorer: with the weights of the update, which were not changed by it.
        goal: the objective.
        spec: that it was built from.
        mini_batch: prepared.
        denominators: of the whole mini-batch.
        parts: the update's micro-batches; where the model is sharded, equally many on every rank, all of which call.
    """
    failing: list[int] = []
    for part in parts:
        micro_batch = mini_batch.take(part.rows_B)
        layout = lay_out(micro_batch, shared=part.shared, packed=part.packed)
        scores = scorer(layout, spec.output_names)
        offsets = micro_batch["response_mask"].offsets
        for i, row in enumerate(part.rows_B.tolist()):
            tokens = slice(int(offsets[i]), int(offsets[i + 1]))
            alone: dict[str, Tensor] = {name: values[tokens] for name, values in scores.items()}
            sample = micro_batch.slice(i, i + 1)
            if not goal.term(alone, sample, denominators, spec.scalars).finite:
                failing.append(row)
    return sorted(failing)


def traced(error: NumericsError, samples: tuple[str, ...]) -> NumericsError:
    """The error with the samples that it came from."""
    whence = (
        f"; it came from {listed(samples)}" if samples else "; each sample's own loss is finite"
    )
    return NumericsError(error.message + whence, hint=error.hint, sample_ids=samples)
