"""Validation: scores on held-out prompts, a figure for each data source and one over all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from dovetail.flow.generation import Sample


def validation_metrics(samples: Sequence[Sample], n: int) -> dict[str, float]:
    """`val/mean@n` over all prompts and `val/<data_source>/mean@n` for each source.

    A sample whose scoring failed has no score and counts in `val/failures` alone.
    """
    by_source: dict[str, list[float]] = defaultdict(list)
    failures = 0
    for sample in samples:
        if sample.score is None:
            failures += 1
            continue
        by_source[sample.issued.prompt.data_source or ""].append(sample.score)
    everything = [score for scores in by_source.values() for score in scores]
    metrics = {"val/failures": float(failures)}
    if everything:
        metrics[f"val/mean@{n}"] = float(np.mean(everything))
    for source, scores in by_source.items():
        if source:
            metrics[f"val/{source}/mean@{n}"] = float(np.mean(scores))
    lengths = [len(sample.completion.response_ids) for sample in samples]
    if lengths:
        metrics["val/response_length/mean"] = float(np.mean(lengths))
    return metrics
