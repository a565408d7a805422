"""From ragged samples to what one rank of a layout is fed: all tokens of a micro-batch end to end, without padding.

Context-parallel ranks take equal runs of neighbouring tokens. The pack is filled up at its end, by a sequence of its own,
to a number that context and sequence parallelism divide. Of a response of n scored tokens the last one is never fed.
Legend: N samples, B rows that hold a scored token, S sequences, F fed tokens of the pack, R scored tokens, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from dovetail.batch import Batch
from dovetail.training.columns import distinct, scored_lengths
from dovetail.training.parts import Samples, packed_parts


@attrs.frozen(kw_only=True, eq=False)
class Pack:
    """One micro-batch, the same on all ranks that share it."""

    ids_F: np.ndarray
    """int64 [F]."""
    positions_F: np.ndarray
    """int64 [F], counted from the start of each token's own sequence."""
    lengths_S: np.ndarray
    """int64 [S], all ≥ 1."""
    source_R: np.ndarray
    """int64 [R]: which fed token's hidden state predicts each scored token."""
    targets_R: np.ndarray
    """int64 [R]: the scored tokens."""
    temperature_R: np.ndarray
    """float32 [R]."""
    token_R: np.ndarray
    """int64 [R]: positions of the scored tokens among the micro-batch's T response tokens."""
    tokens: int
    """T, masked tokens and rows without a scored token included."""

    def on(self, rank: int, ranks: int) -> slice:
        """The fed tokens of one of some context-parallel ranks."""
        count = len(self.ids_F) // ranks
        return slice(rank * count, (rank + 1) * count)


def make_pack(micro_batch: Batch, multiple: int) -> Pack:
    """Lay samples end to end.

    Args:
        micro_batch: with the columns in `dovetail.training.columns.READS`.
        multiple: F will be a multiple of it.
    """
    mask, responses = micro_batch["response_mask"], micro_batch["response_ids"]
    prompts = micro_batch["prompt_ids"]
    scored_N = scored_lengths(mask)
    active_B = np.flatnonzero(scored_N)
    token_R = np.flatnonzero(mask.values)
    row_R = np.repeat(np.cumsum(scored_N > 0) - 1, mask.lengths)[token_R]
    step_R = token_R - mask.offsets[active_B][row_R]
    rows = [np.concatenate([prompts[i], responses[i][: scored_N[i] - 1]]) for i in active_B]
    lengths_B = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    starts_B = np.cumsum(lengths_B) - lengths_B
    source_R = starts_B[row_R] + prompts.lengths[active_B][row_R] - 1 + step_R
    more = -int(lengths_B.sum()) % multiple
    if not rows and not more:
        # A model must run on something, also where there is nothing to score.
        more = multiple
    lengths_S = np.append(lengths_B, more) if more else lengths_B
    return Pack(
        ids_F=np.concatenate([np.empty(0, np.int64), *rows, np.zeros(more, np.int64)]),
        positions_F=np.concatenate([np.arange(n) for n in lengths_S]),
        lengths_S=lengths_S,
        source_R=source_R.astype(np.int64),
        targets_R=responses.values[token_R].astype(np.int64),
        temperature_R=micro_batch["temperature"].astype(np.float32)[active_B][row_R],
        token_R=token_R,
        tokens=len(mask.values),
    )


def cut(batch: Batch, budget: int, quadratic: float, at_least: int = 1) -> list[np.ndarray]:
    """Rows of each micro-batch: within the budget, of balanced cost, every sample in exactly one.

    Args:
        batch: with the columns in `dovetail.training.columns.READS`.
        budget: tokens of one micro-batch; a sample that alone exceeds it gets one to itself.
        quadratic: a sample of n tokens costs n · (1 + quadratic · n).
        at_least: so many micro-batches, since ranks must run equally many; empty ones where the samples run out.
    """
    scored_N = scored_lengths(batch["response_mask"])
    samples = Samples(
        active=np.flatnonzero(scored_N),
        prompt_N=distinct(batch["prompt_ids"]),
        prompts_N=batch["prompt_ids"].lengths,
        responses_N=scored_N - 1,
    )
    parts = (
        packed_parts(samples, budget, quadratic, at_least, shared=False)
        if len(samples.active)
        else []
    )
    rows = [np.array(part.rows, np.int64) for part in parts]
    rows += [np.empty(0, np.int64)] * (max(1, at_least) - len(rows))
    # What has nothing to score costs nothing, but the caller counts on every sample.
    rows[-1] = np.concatenate([rows[-1], np.flatnonzero(scored_N == 0)])
    return rows


def token_places(offsets_N1: np.ndarray, rows_B: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [T]: where the response tokens of these rows lie in the whole batch."""
    rows_B = np.asarray(rows_B, np.int64)
    starts_B, lengths_B = offsets_N1[rows_B], np.diff(offsets_N1)[rows_B]
    shift_B = starts_B - (np.cumsum(lengths_B) - lengths_B)
    places_T: np.ndarray = np.arange(lengths_B.sum()) + np.repeat(shift_B, lengths_B)
    return places_T
