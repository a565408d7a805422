"""The columns of a batch that training engines read: for every forward pass, and for particular outputs.

Legend: N samples, T response tokens, R scored tokens, K token ids for each scored token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dovetail.batch import Batch, sizes_of
from dovetail.errors import ColumnError, ConfigError
from dovetail.interfaces import READS, OutputSpec
from dovetail.workers import PADDING


def check_columns(batch: Batch, outputs: Sequence[OutputSpec], vocabulary: int) -> None:
    """Check that a batch has the columns from which a model's outputs are computed.

    Args:
        batch: N samples.
        outputs: the specs of the requested outputs, as `check_outputs` returns them.
        vocabulary: the model's vocabulary size.

    Raises:
        ColumnError: a column is missing or invalid, a prompt is empty, or a temperature is not positive.
        ConfigError: an output asks for more token ids per token than the vocabulary has.
    """
    batch.require(READS, "the training engine")
    prompts, responses, mask = (batch[name] for name in READS[:3])
    if not np.array_equal(responses.offsets, mask.offsets):
        raise ColumnError(
            "the columns response_mask and response_ids differ in length; expected one mask value for each token"
        )
    empty = np.flatnonzero((prompts.lengths == 0) & (mask.sum() > 0))
    if empty.size:
        raise ColumnError(
            f"sample {empty[0]} has an empty prompt; expected at least one token, from which the first response token is predicted",
            hint="start the prompt with the tokenizer's bos token",
        )
    wrong = np.flatnonzero(~(batch["temperature"] > 0))
    if wrong.size:
        raise ColumnError(
            f"sample {wrong[0]} has temperature {batch['temperature'][wrong[0]]}; log-probabilities need one above 0",
            hint="score greedy samples at temperature 1",
        )
    for output in outputs:
        if output.inner and (count := output.inner[0]) > vocabulary:
            raise ConfigError(
                f"the output {output.name!r} is requested for {count} token ids per token, but the model's vocabulary has only "
                f"{vocabulary}",
                hint=f"request at most {vocabulary} token ids",
            )
        if output.name == "log_probs_at":
            _check_ids(batch, output, vocabulary)


def columns_read(outputs: Iterable[OutputSpec]) -> list[str]:
    """Return the sorted names of the columns that these outputs read, without the columns that every forward pass reads."""
    return sorted(set().union(*(output.reads for output in outputs)))


def read_at(
    micro_batch: Batch, token_R: np.ndarray, outputs: Iterable[OutputSpec]
) -> dict[str, np.ndarray]:
    """Return, for R scored tokens, the values of the columns that the outputs read: [R, …] by column name, integers as int64.

    Args:
        micro_batch: a micro-batch with the outputs' columns, ragged over response tokens.
        token_R: int64 [R], positions of the scored tokens.
        outputs: the specs of the requested outputs, as `check_outputs` returns them.
    """
    found = {name: micro_batch[name].values[token_R] for name in columns_read(outputs)}
    return {n: x.astype(np.int64) if x.dtype.kind in "iu" else x for n, x in found.items()}


def empty_columns(tokens: int, outputs: Iterable[OutputSpec]) -> dict[str, np.ndarray]:
    """Return a column of zeros for each output, to be filled with values: by name, [tokens, …] in the output's dtype and inner shape."""
    return {o.name: np.zeros((tokens, *o.inner), o.dtype) for o in outputs}


def ids_column(outputs: Iterable[OutputSpec]) -> str | None:
    """Return the name of the column with token ids for the output `log_probs_at`; None if this output is not requested."""
    return next((next(iter(o.reads)) for o in outputs if o.name == "log_probs_at"), None)


def without_padding(mini_batch: Batch) -> Batch:
    """Return the mini-batch without its masked padding samples, which a rank receives if it has no samples of its own."""
    if PADDING not in mini_batch:
        return mini_batch
    return mini_batch.take(np.flatnonzero(~mini_batch[PADDING])).drop([PADDING])


def _check_ids(batch: Batch, output: OutputSpec, vocabulary: int) -> None:
    (name,) = output.reads
    batch.require([name], f"the output {output.name!r}")
    ids, mask = batch[name], batch["response_mask"]
    if ids.dtype.kind not in "iu" or ids.inner != output.inner:
        raise ColumnError(
            f"the column {name!r} holds {ids.dtype} {sizes_of('T', *ids.inner)}; expected integers {sizes_of('T', *output.inner)}"
        )
    if not np.array_equal(ids.offsets, mask.offsets):
        raise ColumnError(
            f"the columns {name!r} and 'response_ids' differ in length; expected one entry for each response token"
        )
    wrong = ids.values[mask.values.astype(bool)]
    wrong = wrong[(wrong < 0) | (wrong >= vocabulary)]
    if wrong.size:
        raise ColumnError(
            f"the column {name!r} holds the token id {wrong[0]}, but the model's vocabulary has only {vocabulary} tokens",
            hint="use a model with the vocabulary from which the token ids come",
        )
