"""Detection of NaN and infinity before they reach a weight, and of the samples that contain them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.errors import NumericsError, listed
from dovetail.interfaces import Reduction


def require_finite(mini_batch: Batch, names: Iterable[str], reduction: Reduction, who: str) -> None:
    """Check that every number that an objective is about to read is finite, on all ranks.

    Tokens outside `response_mask` are not checked, nor are samples whose tokens are all outside.

    Args:
        mini_batch: this rank's part of the mini-batch; needs `response_mask` and the columns in `names`. Columns
            without floating-point numbers are not checked.
        names: the columns to check.
        reduction: the sum over the ranks that share the mini-batch.
        who: the name of the objective or correction, for the message.

    Raises:
        NumericsError: a column holds NaN or infinity. Raised on every rank; carries this rank's samples.
    """
    mask: Ragged = mini_batch["response_mask"]
    found = {name: rows for name in sorted(names) if len(rows := _bad_rows(mini_batch[name], mask))}
    if not reduction.sum(np.array([len(found)], np.float64))[0]:
        return
    if not found:
        raise NumericsError(
            f"another rank's part of the mini-batch is not finite, so {who} can't read it; that rank's error names the samples"
        )
    samples = sample_names(mini_batch, np.unique(np.concatenate(list(found.values()))).tolist())
    columns = ", ".join(map(repr, found))
    raise NumericsError(
        f"{columns} {'is' if len(found) == 1 else 'are'} not finite in {listed(samples)}; "
        f"{who} can't read {'it' if len(found) == 1 else 'them'}, and no weight was changed",
        hint="look at the rewards and the log-probabilities of these samples",
        sample_ids=samples,
    )


def sample_names(batch: Batch, rows: Sequence[int]) -> tuple[str, ...]:
    """Return the `sample_id` of these rows; positions such as `row 3` if the batch has no ids."""
    if "sample_id" not in batch:
        return tuple(f"row {row}" for row in rows)
    ids = batch["sample_id"]
    return tuple(str(ids[row]) for row in rows)


def _bad_rows(values: object, mask: Ragged) -> np.ndarray:
    """Return the rows of samples that hold NaN or infinity where the mask is 1, int64."""
    if isinstance(values, Ragged):
        if values.dtype.kind != "f" or len(values.values) != len(mask.values):
            return np.empty(0, np.int64)
        bad_T = ~values.finite_T() & mask.values
        return np.unique(mask.row_index[bad_T]) if bad_T.any() else np.empty(0, np.int64)
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
        return np.empty(0, np.int64)
    finite_N = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    return np.flatnonzero(~finite_N & (mask.sum() > 0))
