"""Dividing a batch into micro-batches within a token budget, in the layout that costs least.

Padded micro-batches hold samples of similar lengths, to save padding. Packed micro-batches have no padding and are balanced by
cost, including attention's, which grows with the square of a sample's length.
Legend: N samples, B rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from dovetail.batch import Batch
from dovetail.dispatch import Unit
from dovetail_torch_engines import (
    MicroBatchRows,
    Samples,
    packed_parts,
    padded_parts,
    rows_of,
    shared_parts,
)
from dovetail_train_fsdp2.config import Packing, Share

WORTHWHILE = {"cpu": 0.85}
"""By type of device: `share_prompts: auto` computes each distinct prompt of padded micro-batches once if at most this share of the tokens
is then left to compute. Sharing prompts costs a second forward pass."""
WORTHWHILE_ELSEWHERE = 0.7
"""The same limit on accelerators, where sharing also rules out the fastest attention, which takes no mask."""
WORTHWHILE_PACKED = 0.9
"""The same limit for packed micro-batches on any device, where sharing costs a second attention call."""


@attrs.frozen(kw_only=True)
class Means:
    """The allowed layouts of micro-batches, and the criteria for choosing between them."""

    packing: Packing = "never"
    """Whether to pack samples; `never` if the architecture does not support packing."""
    share: Share = "never"
    """Whether to compute each distinct prompt once in padded micro-batches."""
    share_packed: Share = "never"
    """Whether to compute each distinct prompt once in packed micro-batches."""
    device: str = "cpu"
    """Type of the device that runs the model, by which `auto` weighs costs."""
    quadratic: float = 0.0
    """The relative cost of attention: a sample of n tokens costs n · (1 + quadratic · n)."""


@attrs.frozen(kw_only=True, eq=False)
class MicroBatchPlan:
    """The samples of one micro-batch, and their layout."""

    rows_B: np.ndarray
    """int64 [B], positions of the samples in the whole batch."""
    shared: bool
    """Whether each distinct prompt is computed once."""
    packed: bool
    """Whether all tokens are in one row, without padding."""


def cut(
    batch: Batch, budget: int, means: Means, at_least: int = 1, unit: Unit = "sample"
) -> list[MicroBatchPlan]:
    """Divide a batch into micro-batches of balanced cost, each within the token budget.

    Args:
        batch: the samples, with the columns in `dovetail.interfaces.READS`.
        budget: the token limit of a micro-batch, padding included; a larger unit gets a micro-batch to itself.
        means: the allowed layouts.
        at_least: the minimum number of micro-batches, since ranks must run equally many; empty micro-batches are added.
        unit: the kind of unit whose samples stay in one micro-batch, such as `group`. Prompts are computed once only if the unit is
            `sample`.

    Returns:
        Every sample in exactly one micro-batch, the most expensive one first.
    """
    samples = Samples.of(batch, unit)
    if unit != "sample":
        means = attrs.evolve(means, share="never", share_packed="never")
    parts, shared, packed = _chosen(samples, budget, means, at_least)
    rows = rows_of(parts, samples, at_least)
    return [MicroBatchPlan(rows_B=rows_B, shared=shared, packed=packed) for rows_B in rows]


def _chosen(
    samples: Samples, budget: int, means: Means, at_least: int
) -> tuple[Sequence[MicroBatchRows], bool, bool]:
    """Return the micro-batches, whether they share prompts, and whether they are packed."""
    packs = means.packing != "never"
    if not len(samples.active):
        return [], False, packs
    if packs and _worthwhile(
        means.share_packed, samples.tokens_shared, samples.tokens, WORTHWHILE_PACKED
    ):
        return packed_parts(samples, budget, means.quadratic, at_least, shared=True), True, True
    plain = [] if packs else padded_parts(samples, budget, at_least)
    if means.share != "never" and means.packing != "always":
        in_common = shared_parts(samples, budget, at_least)
        after = sum(part.cost for part in in_common)
        before = samples.tokens if packs else sum(part.cost for part in plain)
        most = WORTHWHILE.get(means.device, WORTHWHILE_ELSEWHERE)
        if _worthwhile(means.share, after, before, most):
            return in_common, True, False
    if packs:
        return packed_parts(samples, budget, means.quadratic, at_least, shared=False), False, True
    return plain, False, False


def _worthwhile(share: Share, after: float, before: float, most: float) -> bool:
    return share == "always" or (share == "auto" and after <= most * before)
