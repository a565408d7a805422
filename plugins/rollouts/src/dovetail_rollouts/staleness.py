"""How old the tokens of a step are, in versions of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.interfaces import Sample


def staleness_metrics(samples: Sequence[Sample], weight_version: int) -> dict[str, float]:
    """Return how many versions older than the weights in force those are that made the tokens.

    `rollout/staleness_mean`, `_p95` and `_max` over the tokens that the policy produced; `rollout/staleness_share_K`, the share of
    them that is K versions old, for each K that occurs; and `rollout/partial_share`, the share of responses of which several
    versions made a part. Nothing without tokens.

    Args:
        samples: of a step.
        weight_version: in force in the rollout when the step took them.
    """
    versions = [
        np.concatenate([c.weight_versions[c.produced_T] for c in s.sequences])
        for s in samples
        if s.response_length
    ]
    if not versions:
        return {}
    age_T = weight_version - np.concatenate(versions)
    ages, counts = np.unique(age_T, return_counts=True)
    shares = (counts / len(age_T)).tolist()
    return {
        "rollout/staleness_mean": float(age_T.mean()),
        "rollout/staleness_p95": float(np.percentile(age_T, 95, method="higher")),
        "rollout/staleness_max": float(age_T.max()),
        "rollout/partial_share": float(np.mean([v[0] != v[-1] for v in versions])),
        **{
            f"rollout/staleness_share_{age}": share
            for age, share in zip(ages.tolist(), shares, strict=True)
        },
    }
