"""EstimateAdvantages: rewards to advantages and returns, by the chosen estimator."""

from __future__ import annotations

from functools import partial

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.errors import PluginBrokenError
from dovetail.interfaces import (
    AdvantageEstimator,
    Advantages,
    Groups,
    PlanFacts,
    PluginConfig,
    Stage,
    StepContext,
)
from dovetail.plugins import called, title_of
from dovetail_stages.wording import with_settings

ESTIMATOR = "algorithm.advantage"


class EstimateAdvantages(Stage):
    """Runs the advantage estimator over the whole batch."""

    name = "advantage"
    api = ">=1.0,<2"
    phase = "estimate"

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> dict[str, str]:
        estimator = facts.plugins[ESTIMATOR]
        columns = {"scores", "token_rewards", "response_mask", "group_id", "trajectory_id"}
        return dict.fromkeys(sorted(columns | estimator.requires()), estimator.title)

    @classmethod
    def provides(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"advantages"} | {"returns"} & facts.plugins[ESTIMATOR].provides())

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        if not facts.required.keys() & {"advantages", "returns"}:
            return None
        return f"{with_settings(facts.plugins[ESTIMATOR], changed_only=True)}; every step"

    def run(self, batch: Batch, step: StepContext) -> Batch:
        groups = Groups.of(batch["group_id"], batch["trajectory_id"])
        result = checked_estimate(step.plugins[ESTIMATOR], batch, groups)
        advantages = result.advantages
        columns = {"advantages": advantages}
        if result.returns is not None and "returns" in self.provides(self.config, step.facts):
            columns["returns"] = result.returns
        flat = advantages.values if isinstance(advantages, Ragged) else advantages
        if len(flat):
            step.metrics |= {
                "advantage/mean": float(flat.mean()),
                "advantage/std": float(flat.std()),
            }
        step.metrics |= result.metrics
        return batch.with_columns(columns)


def checked_estimate(estimator: AdvantageEstimator, batch: Batch, groups: Groups) -> Advantages:
    """Call the estimator on a read-only view of the batch, and return its checked result.

    Raises:
        PluginBrokenError: the estimator raised an error or returned no valid `Advantages`; names the plugin, its file
            and line.
    """
    name = partial(title_of, "advantage", estimator)
    result = called(name, estimator.estimate, batch.read_only(), groups)
    if not isinstance(result, Advantages):
        raise PluginBrokenError(
            f"{name()} returned {type(result).__name__}; expected Advantages",
            hint="return dovetail.interfaces.Advantages(advantages=…) from `estimate`",
        )
    promised = "returns" in type(estimator).provides(estimator.config)
    for what, values, needed in (
        ("advantages", result.advantages, True),
        ("returns", result.returns, promised),
    ):
        if (values is not None or needed) and (why := _misfit(values, batch)):
            raise PluginBrokenError(
                f"{name()} returned {what} that are {why}",
                hint="return float32: [N] with one value for each sample, or a Ragged that lines up with response_mask",
            )
    for metric, figure in result.metrics.items():
        if isinstance(figure, bool) or not isinstance(figure, int | float | np.number):
            raise PluginBrokenError(
                f"{name()} returned the metric {metric!r} as {type(figure).__name__} {figure!r}",
                hint="return every metric as an int or a float",
            )
    return result


def _misfit(values: object, batch: Batch) -> str | None:
    """Return why a value is not a column of advantages or returns; None if it is valid."""
    if isinstance(values, Ragged):
        if values.dtype != np.float32:
            return f"ragged {values.dtype}"
        mask = batch["response_mask"]
        fits = np.array_equal(values.offsets, mask.offsets)
        return None if fits else f"{len(values.values)} values for {len(mask.values)} tokens"
    if not isinstance(values, np.ndarray):
        return "None" if values is None else f"a {type(values).__name__}"
    if values.dtype != np.float32 or values.shape != (len(batch),):
        return f"{values.dtype} of shape {values.shape} for {len(batch)} samples"
    return None
