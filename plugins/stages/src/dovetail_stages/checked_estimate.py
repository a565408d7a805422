"""An estimator's advantages, checked."""

from __future__ import annotations

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.errors import PluginBrokenError
from dovetail.interfaces import AdvantageEstimator, Advantages, Groups
from dovetail.plugins import called, title_of


def checked_estimate(estimator: AdvantageEstimator, batch: Batch, groups: Groups) -> Advantages:
    """Return the estimator's answer. It sees the batch, and can't write into it.

    Raises:
        PluginBrokenError: it raised, or returned something else; names the plugin, its file and line.
    """
    name = title_of("advantage", estimator)
    result = called(lambda: name, estimator.estimate, batch.read_only(), groups)
    if not isinstance(result, Advantages):
        raise PluginBrokenError(
            f"{name} returned {type(result).__name__}",
            hint="`estimate` returns dovetail.interfaces.Advantages(advantages=…)",
        )
    promised = "returns" in type(estimator).provides(estimator.config)
    for what, values, needed in (
        ("advantages", result.advantages, True),
        ("returns", result.returns, promised),
    ):
        if (values is not None or needed) and (why := _misfit(values, batch)):
            raise PluginBrokenError(
                f"{name} returned {what} that are {why}",
                hint="float32, [N] for a figure a sample, or a Ragged that lines up with response_mask",
            )
    for metric, figure in result.metrics.items():
        if isinstance(figure, bool) or not isinstance(figure, int | float | np.number):
            raise PluginBrokenError(
                f"{name} returned the metric {metric!r} as {type(figure).__name__} {figure!r}",
                hint="metrics are numbers",
            )
    return result


def _misfit(values: object, batch: Batch) -> str | None:
    """Why this is no column of advantages or returns; None where it is one."""
    if isinstance(values, Ragged):
        if values.dtype != np.float32:
            return f"ragged {values.dtype}"
        mask = batch["response_mask"]
        fits = np.array_equal(values.offsets, mask.offsets)
        return None if fits else f"{len(values.values)} values for {len(mask.values)} tokens"
    if not isinstance(values, np.ndarray):
        return "absent" if values is None else f"a {type(values).__name__}"
    if values.dtype != np.float32 or values.shape != (len(batch),):
        return f"{values.dtype} of shape {values.shape} for {len(batch)} samples"
    return None
