"""Row: one sample that is being decoded, and its completion."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from dovetail.interfaces import Completion, FinishReason, RolloutRequest
from dovetail_rollout_hf.stops import StopRule


@attrs.define(eq=False)
class Row:
    """One sample of the running batch."""

    owner: Any
    """The `Ticket` of the request to which the sample belongs; returned with the completion, to deliver it."""
    request: RolloutRequest
    sample: int
    stop: StopRule
    pad: int = 0
    """Number of padding columns on the row's left."""
    start: int = 0
    """Column of the row's first response token."""
    shift: int = 0
    """Number to add to the position ids of tokens after the prompt, since an image takes fewer positions than tokens; 0 without images."""
    done: bool = False
    response: list[int] = attrs.field(factory=list)
    """The response tokens so far; recorded only if the stop rule needs them."""
    versions: list[tuple[int, int]] = attrs.field(factory=list)
    """Pairs (column, weight version): the weights that produced the tokens from this column on."""

    @property
    def last_column(self) -> int:
        """Column of the last token if the response reaches its maximum length."""
        return self.start + self.request.sampling.max_new_tokens - 1

    def completion(self, reason: FinishReason, taken: dict[str, np.ndarray]) -> Completion:
        """Return the sample, with the tokens generated so far, as a completion.

        Args:
            reason: the reason why the sample ends.
            taken: `ids` of the T tokens, [T], and `log_probs` and `raw_log_probs`, [T] each, if requested.
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
"""The owner and the completion of a finished row."""
