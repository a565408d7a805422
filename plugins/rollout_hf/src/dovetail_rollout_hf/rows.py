"""Row: one sample that is being decoded, and what becomes of it in the end."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from dovetail.interfaces import Completion, FinishReason, RolloutRequest
from dovetail_rollout_hf.stops import StopRule


@attrs.define(eq=False)
class Row:
    """One sample that is being decoded."""

    owner: Any
    """The submitter of the request, returned with the completion."""
    request: RolloutRequest
    sample: int
    stop: StopRule
    pad: int = 0
    """Number of padding columns on the row's left."""
    start: int = 0
    """Column of the row's first response token."""
    shift: int = 0
    """Offset that is added to the positions of the row's tokens after the prompt."""
    done: bool = False
    response: list[int] = attrs.field(factory=list)
    """The tokens so far; kept only where a stop rule watches them."""
    versions: list[tuple[int, int]] = attrs.field(factory=list)
    """(column, weight version): which version produced the tokens from that column on."""

    @property
    def last_column(self) -> int:
        """Column of its last token, if it runs to its full length."""
        return self.start + self.request.sampling.max_new_tokens - 1

    def completion(self, reason: FinishReason, taken: dict[str, np.ndarray]) -> Completion:
        """Return the sample so far.

        Args:
            reason: why it ends.
            taken: `ids` of its T tokens, [T], and `log_probs` and `raw_log_probs`, [T] each, where the request wants
                them.
        """
        sampling = self.request.sampling
        ids_T = taken["ids"]
        versions_T = np.empty(len(ids_T), dtype=np.int64)
        for column, version in self.versions:
            versions_T[max(column - self.start, 0) :] = version
        return Completion(
            request_id=self.request.request_id,
            sample=self.sample,
            response_ids=ids_T,
            finish_reason=reason,
            weight_versions=versions_T,
            log_probs=taken["log_probs"] if sampling.log_probs else None,
            raw_log_probs=taken["raw_log_probs"] if sampling.raw_log_probs else None,
        )


Finished = tuple[Any, Completion]
"""A row's owner, and its completion."""
