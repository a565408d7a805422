"""The rewards that filters judge by. N samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64

from dovetail.batch import Batch
from dovetail.errors import ColumnError, nearest

_SHOWN = 3
"""Maximum number of samples that an error names as lacking a reward component."""


def rewards_column(component: str | None) -> str:
    """Return the name of the column to judge by: the scores, or the reward components if `component` is given."""
    return "scores" if component is None else "reward_components"


def judged_rewards(columns: Batch, component: str | None, who: str) -> Float64[np.ndarray, "N"]:
    """Return the samples' rewards, or one named component of them, float64 [N].

    Args:
        columns: `scores` float32 [N], or `reward_components`, N mappings of names to numbers.
        component: the component's name; None for the whole reward.
        who: the name of the filter in errors.

    Raises:
        ColumnError: the column is missing, or samples lack the component; the message names up to three of these samples, and
            the components that the first of them has.
    """
    columns.require([rewards_column(component)], who)
    if component is None:
        return np.asarray(columns["scores"], np.float64)
    components = columns["reward_components"]
    lacking = [row for row, parts in enumerate(components) if not _has(parts, component)]
    if lacking:
        raise _no_component(columns, lacking, component, who)
    return np.array([parts[component] for parts in components], np.float64)


def _has(parts: object, component: str) -> bool:
    return isinstance(parts, Mapping) and isinstance(parts.get(component), (int, float, np.number))


def _no_component(columns: Batch, lacking: list[int], component: str, who: str) -> ColumnError:
    ids = columns["sample_id"] if "sample_id" in columns else list(range(len(columns)))
    listed = ", ".join(str(ids[row]) for row in lacking[:_SHOWN])
    more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
    parts = columns["reward_components"][lacking[0]]
    known = sorted(map(str, parts)) if isinstance(parts, Mapping) else []
    close = nearest(component, known)
    return ColumnError(
        f"{who} needs the reward component {component!r} as a number, but {len(lacking)} of {len(columns)} samples lack it "
        f"({listed}{more}); the first of these has the components: {', '.join(known) or 'none'}",
        hint=f"did you mean {close!r}?"
        if close and close != component
        else f"let the reward function return {component!r} for every sample, or leave `component` out",
    )
