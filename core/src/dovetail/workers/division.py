"""How nd divides batches over the parts of a mesh, and what a part without samples of its own gets instead.

Legend: N samples, K parts.
"""

from __future__ import annotations

from functools import lru_cache

import attrs
import numpy as np

from dovetail.batch.batch import Batch
from dovetail.batch.partition import balanced_partition, token_counts
from dovetail.batch.ragged import Ragged
from dovetail.dispatch.registration import UNIT_COLUMNS
from dovetail.errors import DispatchError

PADDING = "padding"
"""Column that is True on padding samples; only in batches where some part has none but those."""


@attrs.frozen(kw_only=True, eq=False)
class Division:
    """Which samples go to which part.

    Attributes:
        parts_K: int64 sample indices of each part; empty where there were fewer units than parts.
        spare: int64 indices of the lightest unit, which empty parts get a masked copy of; None if there are none.
    """

    parts_K: list[np.ndarray]
    spare: np.ndarray | None

    def shares(self, batch: Batch) -> list[Batch]:
        """Return what each part is given: K batches, none empty."""
        if len(self.parts_K) == 1:
            return [batch]
        if self.spare is None:
            return [batch.take(part) for part in self.parts_K]
        marked = batch
        if PADDING not in batch:
            marked = batch.with_columns({PADDING: np.zeros(len(batch), np.bool_)})
        padding = masked_copy(marked.take(self.spare))
        return [marked.take(part) if len(part) else padding for part in self.parts_K]


def divide(batch: Batch, parts: int, unit: str) -> Division:
    """Divide by token count, units whole; deterministic.

    Raises:
        DispatchError: there is no sample, or the batch does not consist of whole units.
    """
    if not len(batch):
        raise DispatchError(
            "a batch without samples can't be dispatched",
            hint="skip the call when every sample was filtered out or failed",
        )
    units_N, tokens_N = unit_ids(batch, unit), token_counts(batch)
    parts_K = list(_parts(tokens_N.tobytes(), units_N.tobytes(), units_N.dtype.str, parts))
    spare = None if all(map(len, parts_K)) else _lightest(units_N, tokens_N)
    return Division(parts_K=parts_K, spare=spare)


@lru_cache(maxsize=8)
def _parts(tokens_N: bytes, units_N: bytes, units_dtype: str, parts: int) -> tuple[np.ndarray, ...]:
    """The partition, remembered: the passes of a step divide the same batch in turn. Read-only, as it is shared."""
    divided = balanced_partition(
        np.frombuffer(tokens_N, np.int64), parts, np.frombuffer(units_N, units_dtype)
    )
    for rows in divided:
        rows.flags.writeable = False
    return tuple(divided)


def unit_ids(batch: Batch, unit: str) -> np.ndarray:
    """Return int [N]: the id of the unit of each sample; samples with the same id stay together."""
    if unit == "pair" and UNIT_COLUMNS[unit] not in batch:
        if len(batch) % 2:
            raise DispatchError(f"unit 'pair' needs an even number of samples, not {len(batch)}")
        return np.arange(len(batch)) // 2
    if unit in UNIT_COLUMNS:
        column = UNIT_COLUMNS[unit]
        if column not in batch:
            raise DispatchError(
                f"unit {unit!r} needs the column {column!r}; the batch has {', '.join(batch.names)}"
            )
        return np.asarray(batch[column])
    return np.arange(len(batch))


def masked_copy(batch: Batch) -> Batch:
    """Return the same samples as padding: they are computed like any other and count for nothing.

    `response_mask` is all False, other ragged floats are 0 (as masked tokens are everywhere) and `padding` is True.
    """
    columns = {}
    for name, values in batch.columns.items():
        zeroed = name == "response_mask" or (
            isinstance(values, Ragged) and values.dtype.kind == "f"
        )
        columns[name] = _zeros(values) if zeroed else values
    return Batch({**columns, PADDING: np.ones(len(batch), np.bool_)})


def _zeros(column: Ragged) -> Ragged:
    """The same rows filled with zeros; the column's own values may lie elsewhere and are not read."""
    return column.with_values(np.zeros((column.total, *column.inner), column.dtype))


def _lightest(units_N: np.ndarray, tokens_N: np.ndarray) -> np.ndarray:
    ids, index_N = np.unique(units_N, return_inverse=True)
    weights = np.bincount(index_N, weights=tokens_N, minlength=len(ids))
    return np.flatnonzero(index_N == int(np.argmin(weights)))
