"""Conversion of ragged samples to a model's input: all tokens of a micro-batch end to end, without padding between samples.

Context-parallel ranks take equal ranges of neighbouring tokens. If context and sequence parallelism do not divide the number of tokens,
a sequence of padding is added at the end. The last scored token of a response is never fed to the model, since no token after it is
predicted.

Legend: N samples, B rows that hold a scored token, S sequences, F fed tokens of the pack, R scored tokens, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import numpy as np

from dovetail.batch import Batch
from dovetail.dispatch import Unit
from dovetail.interfaces import OutputSpec
from dovetail_torch_engines import Samples, Scored, packed_parts, read_at, rows_of


@attrs.frozen(kw_only=True, eq=False)
class PackedMicroBatch:
    """One micro-batch, with all tokens end to end; the same on all tensor-, pipeline- and context-parallel ranks."""

    ids_F: np.ndarray
    """int64 [F], token ids of all sequences."""
    positions_F: np.ndarray
    """int64 [F], position of each token, counted from the start of the token's own sequence."""
    lengths_S: np.ndarray
    """int64 [S], lengths of the sequences, all ≥ 1."""
    source_R: np.ndarray
    """int64 [R]: index, among the F tokens, of the hidden state that predicts each scored token."""
    targets_R: np.ndarray
    """int64 [R]: ids of the scored tokens."""
    temperature_R: np.ndarray
    """float32 [R]: sampling temperature of each scored token."""
    token_R: np.ndarray
    """int64 [R]: positions of the scored tokens among the micro-batch's T response tokens."""
    tokens: int
    """Number of response tokens T, masked tokens and rows without a scored token included."""
    read: Mapping[str, np.ndarray]
    """Values of the columns that the outputs read, at the R scored tokens: [R, …] by column name, integers as int64."""

    def on(self, rank: int, ranks: int) -> slice:
        """Return the range of the F input tokens that context-parallel rank `rank` of `ranks` takes."""
        count = len(self.ids_F) // ranks
        return slice(rank * count, (rank + 1) * count)


def make_pack(
    micro_batch: Batch, multiple: int, outputs: Iterable[OutputSpec] = ()
) -> PackedMicroBatch:
    """Concatenate a micro-batch's samples to a pack.

    Args:
        micro_batch: the samples, with the columns in `dovetail.interfaces.READS`.
        multiple: the pack is padded to a length F that is a multiple of this number.
        outputs: the outputs to compute; the pack includes the columns that these outputs read.
    """
    mask, responses = micro_batch["response_mask"], micro_batch["response_ids"]
    prompts = micro_batch["prompt_ids"]
    scored = Scored.of(mask)
    active_B, row_R = scored.active_B, scored.row_R
    fed = zip(active_B, scored.lengths_B, strict=True)
    rows = [np.concatenate([prompts[i], responses[i][: n - 1]]) for i, n in fed]
    lengths_B = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    starts_B = np.cumsum(lengths_B) - lengths_B
    source_R = starts_B[row_R] + prompts.lengths[active_B][row_R] - 1 + scored.step_R
    more = -int(lengths_B.sum()) % multiple
    if not rows and not more:
        # The model needs tokens to run on, even if there is nothing to score.
        more = multiple
    lengths_S = np.append(lengths_B, more) if more else lengths_B
    return PackedMicroBatch(
        ids_F=np.concatenate([np.empty(0, np.int64), *rows, np.zeros(more, np.int64)]),
        positions_F=np.concatenate([np.arange(n) for n in lengths_S]),
        lengths_S=lengths_S,
        source_R=source_R.astype(np.int64),
        targets_R=responses.values[scored.token_R].astype(np.int64),
        temperature_R=micro_batch["temperature"].astype(np.float32)[active_B][row_R],
        token_R=scored.token_R,
        tokens=len(mask.values),
        read=read_at(micro_batch, scored.token_R, outputs),
    )


def cut(
    batch: Batch, budget: int, quadratic: float, at_least: int = 1, unit: Unit = "sample"
) -> list[np.ndarray]:
    """Divide a batch into micro-batches of balanced cost within the budget, and return the sample indices of each, int64 [B].

    Every sample is in one micro-batch. Samples without a scored token cost nothing and are in the last micro-batch.

    Args:
        batch: the samples, with the columns in `dovetail.interfaces.READS`.
        budget: the token limit of a micro-batch; a longer sample gets a micro-batch to itself.
        quadratic: the relative cost of attention: a sample of n tokens costs n · (1 + quadratic · n).
        at_least: the minimum number of micro-batches, since ranks must run equally many; empty micro-batches are added.
        unit: which samples must stay in one micro-batch, such as those of a `group`.
    """
    samples = Samples.of(batch, unit)
    parts = (
        packed_parts(samples, budget, quadratic, at_least, shared=False)
        if len(samples.active)
        else []
    )
    return rows_of(parts, samples, at_least)
