"""The columns that a model's outputs are computed from.

Legend: N samples, T response tokens, R scored tokens, K words.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dovetail.batch import Batch, sizes_of
from dovetail.errors import ColumnError, ConfigError
from dovetail.interfaces import OutputSpec


def check_reads(batch: Batch, outputs: Iterable[OutputSpec], vocabulary: int) -> None:
    """Check the columns that outputs are computed from, besides those that every forward pass reads.

    Args:
        batch: N samples.
        outputs: as `check_outputs` returned them.
        vocabulary: words that the model has.

    Raises:
        ColumnError: one is missing, does not line up with the response tokens, or holds no ids of words.
        ConfigError: more words are asked for than there are.
    """
    for output in outputs:
        if output.inner and (count := output.inner[0]) > vocabulary:
            raise ConfigError(
                f"{output.name} of {count} words a token is asked of a model with {vocabulary}",
                hint=f"ask for {vocabulary} at most",
            )
        if output.name == "log_probs_at":
            _check_ids(batch, output, vocabulary)


def columns_read(outputs: Iterable[OutputSpec]) -> list[str]:
    """Return the columns that outputs are computed from, besides those that every forward pass reads, in order."""
    return sorted(set().union(*(output.reads for output in outputs)))


def read_at(
    micro_batch: Batch, token_R: np.ndarray, outputs: Iterable[OutputSpec]
) -> dict[str, np.ndarray]:
    """Return those columns at the scored tokens, [R, …] each; integers as int64.

    Args:
        micro_batch: with those columns, ragged over response tokens.
        token_R: int64 [R], positions of the scored tokens.
        outputs: as `check_outputs` returned them.
    """
    found = {name: micro_batch[name].values[token_R] for name in columns_read(outputs)}
    return {n: x.astype(np.int64) if x.dtype.kind in "iu" else x for n, x in found.items()}


def empty_columns(tokens: int, outputs: Iterable[OutputSpec]) -> dict[str, np.ndarray]:
    """Return zeros for each output by name, [T, …] of its dtype and inner shape."""
    return {o.name: np.zeros((tokens, *o.inner), o.dtype) for o in outputs}


def ids_column(outputs: Iterable[OutputSpec]) -> str | None:
    """Return the column of word ids at which log-probabilities are asked for; None where they are not."""
    return next((next(iter(o.reads)) for o in outputs if o.name == "log_probs_at"), None)


def _check_ids(batch: Batch, output: OutputSpec, vocabulary: int) -> None:
    (name,) = output.reads
    batch.require([name], f"the output {output.name!r}")
    ids, mask = batch[name], batch["response_mask"]
    if ids.dtype.kind not in "iu" or ids.inner != output.inner:
        raise ColumnError(
            f"{name} holds {ids.dtype} {sizes_of('T', *ids.inner)}; expected integers {sizes_of('T', *output.inner)}"
        )
    if not np.array_equal(ids.offsets, mask.offsets):
        raise ColumnError(f"{name} does not line up with response_ids")
    wrong = ids.values[mask.values.astype(bool)]
    wrong = wrong[(wrong < 0) | (wrong >= vocabulary)]
    if wrong.size:
        raise ColumnError(
            f"{name} holds the word {wrong[0]}, and the model has {vocabulary}",
            hint="score with models of one vocabulary",
        )
