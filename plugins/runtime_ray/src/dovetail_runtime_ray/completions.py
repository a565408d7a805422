"""Completions in messages from a rollout process: many in one message, in a few arrays instead of thousands.

Legend: C completions of a message, T tokens of all completions together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from dovetail.interfaces import Completion, FinishReason
from dovetail_runtime_ray.wire import WireFailure

_COLUMNS = ("response_ids", "weight_versions", "log_probs", "raw_log_probs")
_REASONS = tuple(FinishReason)


@attrs.frozen(kw_only=True, eq=False)
class PackedCompletions:
    """C completions as columns."""

    request_ids: tuple[str, ...]
    samples_C: np.ndarray
    """int32: index of each completion among its request's samples."""
    reasons_C: np.ndarray
    """uint8: index of each completion's finish reason among the members of `FinishReason`."""
    columns: dict[str, tuple[np.ndarray, np.ndarray]]
    """For each column's name: the values of all completions, [T], and the offsets at which each completion's begin, int64 [C + 1]."""
    missing: dict[str, np.ndarray]
    """For each column's name: bool [C], True for completions whose value is None."""

    def unpack(self) -> Iterator[Completion]:
        """Yield the completions; their arrays are read-only views."""
        for c, request_id in enumerate(self.request_ids):
            fields = {}
            for name, (values_T, offsets) in self.columns.items():
                fields[name] = (
                    None if self.missing[name][c] else values_T[offsets[c] : offsets[c + 1]]
                )
            yield Completion(
                request_id=request_id,
                sample=int(self.samples_C[c]),
                finish_reason=_REASONS[self.reasons_C[c]],
                **fields,  # type: ignore[arg-type]
            )


def pack(completions: Sequence[Completion]) -> PackedCompletions:
    """Join completions into columns; dtypes are kept."""
    columns, missing = {}, {}
    for name in _COLUMNS:
        values = [getattr(completion, name) for completion in completions]
        missing[name] = np.array([value is None for value in values], dtype=bool)
        present = [value for value in values if value is not None]
        lengths = [0 if value is None else len(value) for value in values]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        joined = np.concatenate(present) if present else np.zeros(0, dtype=np.float32)
        columns[name] = (joined, offsets)
    return PackedCompletions(
        request_ids=tuple(completion.request_id for completion in completions),
        samples_C=np.array([completion.sample for completion in completions], dtype=np.int32),
        reasons_C=np.array(
            [_REASONS.index(completion.finish_reason) for completion in completions],
            dtype=np.uint8,
        ),
        columns=columns,
        missing=missing,
    )


@attrs.frozen(kw_only=True, eq=False)
class Message:
    """Results of the requests of one call of `ReplicaProcess.submit`: those that arrived after the call's previous message."""

    completions: PackedCompletions | None
    ended: tuple[str, ...] = ()
    """Ids of requests whose samples have all been sent."""
    failed: tuple[tuple[str, WireFailure], ...] = ()
    """Ids of requests that failed in the engine, with their errors."""
