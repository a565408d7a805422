"""make_sample: makes a sample to score from a text."""

from __future__ import annotations

from typing import Any

import numpy as np

from dovetail.interfaces import Completion, FinishReason, Prompt, Sample


def make_sample(
    sample_id: str,
    text: str = "",
    *,
    prompt: Any = "",
    response_ids: np.ndarray | None = None,
    finish_reason: str = "stop",
    **row: Any,
) -> Sample:
    """Return a sample without a score.

    Args:
        sample_id: the id of the sample.
        text: the response.
        prompt: messages or a string.
        response_ids: int64 [T]; None for a sample without tokens.
        finish_reason: the finish reason of the completion.
        row: further fields of the prompt, such as `data_source` and `ground_truth`.
    """
    completion = None
    if response_ids is not None:
        completion = Completion(
            request_id=sample_id,
            sample=0,
            response_ids=response_ids,
            finish_reason=FinishReason(finish_reason),
            weight_versions=np.zeros(len(response_ids), np.int64),
        )
    return Sample(
        sample_id=sample_id,
        prompt=Prompt(**{"index": 0, "raw": prompt, **row}),
        text=text,
        completion=completion,
    )
