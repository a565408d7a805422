"""Which response tokens of a batch are scored, and the positions of a micro-batch's scores in the batch.

Legend: N samples, B of them that hold a scored token, R scored tokens, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from dovetail.batch import Ragged


@attrs.frozen(kw_only=True, eq=False)
class Scored:
    """The scored tokens of a micro-batch, in the order of their positions."""

    active_B: np.ndarray
    """int64 [B]: indices of the samples with a scored token."""
    lengths_B: np.ndarray
    """int64 [B]: number of response tokens of each sample, up to and including the last scored one."""
    token_R: np.ndarray
    """int64 [R]: positions of the scored tokens among the T response tokens."""
    row_R: np.ndarray
    """int64 [R]: the sample of each scored token, as an index into `active_B`, the samples with a scored token."""
    step_R: np.ndarray
    """int64 [R]: position of each scored token in its response."""

    @classmethod
    def of(cls, mask: Ragged) -> Scored:
        """Return the scored tokens of a mask, ragged [T] of N samples: the tokens whose mask is 1."""
        scored_N = scored_lengths(mask)
        active_B = np.flatnonzero(scored_N)
        token_R = np.flatnonzero(mask.values)
        row_R = np.repeat(np.cumsum(scored_N > 0) - 1, mask.lengths)[token_R]
        return cls(
            active_B=active_B,
            lengths_B=scored_N[active_B],
            token_R=token_R,
            row_R=row_R,
            step_R=token_R - mask.offsets[active_B][row_R],
        )


def scored_lengths(mask: Ragged) -> np.ndarray:
    """Return each response's length up to and including the last token with mask 1, int64 [N]."""
    lengths_N = np.zeros(len(mask), np.int64)
    kept = np.flatnonzero(mask.values)
    row = mask.row_index[kept]
    np.maximum.at(lengths_N, row, kept - mask.offsets[row] + 1)
    return lengths_N


def token_places(offsets_N1: np.ndarray, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the positions in the whole batch of all response tokens of some samples: int64, the samples in the order of `rows`.

    Args:
        offsets_N1: int64 [N + 1], the position at which each sample's tokens begin in the batch.
        rows: int64, the indices of the samples, in any order.
    """
    rows = np.asarray(rows, np.int64)
    starts, lengths = offsets_N1[rows], np.diff(offsets_N1)[rows]
    shift = starts - (np.cumsum(lengths) - lengths)
    return np.arange(lengths.sum()) + np.repeat(shift, lengths)
