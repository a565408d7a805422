"""Computing a batch's outputs over the pipeline stages, in the batch's order, and finding samples with outputs or losses that are
not finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import attrs
import numpy as np
import torch

from dovetail.batch import Batch
from dovetail.dispatch import Unit
from dovetail.interfaces import OUTPUTS, Objective, ObjectiveSpec, OutputSpec
from dovetail_torch_engines import Ranks, empty_columns, failing_rows, token_places
from dovetail_train_megatron import pipeline
from dovetail_train_megatron.network import Network
from dovetail_train_megatron.packs import PackedMicroBatch, cut, make_pack
from dovetail_train_megatron.pipeline import Scores

REFERENCE = "ref_log_probs"
"""The output with log-probabilities of the frozen base without its adapter."""


@attrs.frozen(kw_only=True)
class PackedMicroBatches:
    """A batch divided into micro-batches, equally many on every rank, since pipeline stages and expert-parallel ranks wait for each
    other.
    """

    rows: Sequence[np.ndarray]
    """For each micro-batch, the indices of its samples in the batch, int64."""
    packs: Sequence[PackedMicroBatch]
    """The micro-batches in the same order, each packed: its samples are end to end."""


def packed(
    network: Network,
    batch: Batch,
    budget: int,
    ranks: Ranks,
    outputs: Sequence[OutputSpec],
    unit: Unit = "sample",
) -> PackedMicroBatches:
    """Divide a batch into packs of at most `budget` tokens; a longer sample gets a pack to itself. Collective."""
    quadratic = network.architecture.quadratic()
    rows = cut(batch, budget, quadratic, unit=unit)
    most = ranks.largest(len(rows))
    if len(rows) != most:
        rows = cut(batch, budget, quadratic, at_least=most, unit=unit)
    packs = [make_pack(batch.take(own), network.multiple, outputs) for own in rows]
    return PackedMicroBatches(rows=rows, packs=packs)


def scored(
    network: Network, batch: Batch, cuts: PackedMicroBatches, outputs: Sequence[OutputSpec]
) -> Batch:
    """Return the outputs as ragged columns over response tokens. On pipeline stages before the last, all values are 0. Collective."""
    mask = batch["response_mask"]
    columns = empty_columns(len(mask.values), outputs)
    for rows, scores in _all_scores(network, cuts, outputs):
        places = token_places(mask.offsets, rows)
        for name, values_T in scores.items():
            columns[name][places] = values_T.cpu().numpy()
    return Batch(
        {name: mask.with_values(values) for name, values in columns.items()}, length=len(batch)
    )


def all_failing_rows(
    network: Network,
    goal: Objective,
    spec: ObjectiveSpec,
    batch: Batch,
    denominators: Mapping[str, float],
    cuts: PackedMicroBatches,
) -> list[int]:
    """Score the batch again, and return the sorted indices of this rank's samples whose outputs or loss are not finite. Collective.

    The list is empty on stages before the last.

    Args:
        network: this rank's stage of the model.
        goal: the objective whose loss is computed.
        spec: the objective's spec, with the outputs that it reads.
        batch: the samples of this rank.
        denominators: the denominators of the objective's terms, by name.
        cuts: the division of the batch into micro-batches.
    """
    failing: list[int] = []
    for rows, scores in _all_scores(network, cuts, spec.outputs):
        micro_batch = batch.take(rows)
        found = failing_rows(goal, spec, micro_batch, scores, denominators)
        failing += rows[found].tolist()
    return sorted(failing)


def _all_scores(
    network: Network, cuts: PackedMicroBatches, outputs: Sequence[OutputSpec]
) -> Iterator[tuple[np.ndarray, Scores]]:
    """Yield the row indices and the outputs of every micro-batch; nothing on pipeline stages before the last."""
    own = [output for output in outputs if output.name != REFERENCE]
    found: list[Iterable[Scores]] = []
    if own:
        found.append(pipeline.score(network, cuts.packs, own, network.module))
    if len(own) < len(outputs):
        found.append(_of_base(network, cuts))
    for rows, *parts in zip(cuts.rows, *found, strict=False):
        yield rows, {name: values for scores in parts for name, values in scores.items()}


def _of_base(network: Network, cuts: PackedMicroBatches) -> list[Scores]:
    adapter = network.adapter
    with torch.no_grad(), nullcontext() if adapter is None else adapter.off():
        found = pipeline.score(network, cuts.packs, [OUTPUTS["log_probs"]], network.module)
    return [{REFERENCE: scores["log_probs"]} for scores in found]
