"""Checks of the columns that every training engine reads, and what of them is scored. Legend: N samples, T response tokens."""

from __future__ import annotations

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import READS
from dovetail.workers import PADDING


def check_columns(batch: Batch) -> None:
    """Check that a batch can be scored.

    Raises:
        ColumnError: a column is missing or does not line up, a prompt is empty, or a temperature is not positive.
    """
    batch.require(READS, "the training engine")
    prompts, responses, mask = (batch[name] for name in READS[:3])
    if not np.array_equal(responses.offsets, mask.offsets):
        raise ColumnError("response_mask does not line up with response_ids")
    empty = np.flatnonzero((prompts.lengths == 0) & (mask.sum() > 0))
    if empty.size:
        raise ColumnError(
            f"sample {empty[0]} has an empty prompt: nothing predicts its first token",
            hint="start the prompt with the tokenizer's bos token",
        )
    wrong = np.flatnonzero(~(batch["temperature"] > 0))
    if wrong.size:
        raise ColumnError(
            f"sample {wrong[0]} has temperature {batch['temperature'][wrong[0]]}, which logits can't be divided by",
            hint="log-probabilities need a temperature above 0; greedy samples are scored at 1",
        )


def without_padding(mini_batch: Batch) -> Batch:
    """Leave out the masked copies that dispatch gives to ranks without samples of their own."""
    if PADDING not in mini_batch:
        return mini_batch
    return mini_batch.take(np.flatnonzero(~mini_batch[PADDING])).drop([PADDING])


def scored_lengths(mask: Ragged) -> np.ndarray:
    """Return int64 [N]: up to and including the last token with mask 1."""
    lengths_N = np.zeros(len(mask), np.int64)
    kept = np.flatnonzero(mask.values)
    row = mask.row_index[kept]
    np.maximum.at(lengths_N, row, kept - mask.offsets[row] + 1)
    return lengths_N


def distinct(prompts: Ragged) -> np.ndarray:
    """Return int64 [N]: a number for each distinct prompt, by its tokens."""
    numbers: dict[bytes, int] = {}
    found = (numbers.setdefault(row.tobytes(), len(numbers)) for row in prompts)
    return np.fromiter(found, np.int64, len(prompts))
