"""GDPO: every component of the reward normalised in its group (arXiv 2601.05242)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from dovetail.batch import Batch
from dovetail.errors import ColumnError, nearest
from dovetail.interfaces import Groups, PluginConfig
from dovetail_algorithms.config.estimators import GdpoConfig
from dovetail_algorithms.estimators.group_baseline import (
    EPSILON,
    GroupBaseline,
    deviation_spread_N,
    deviations,
)
from dovetail_algorithms.estimators.whitened import whiten_over_tokens


class GdpoEstimator(GroupBaseline):
    """A_i = whiten(Σ_k w_k (r_ik − mean_gk) / (std_gk + 1e-6)), over reward components k (arXiv 2601.05242).

    Each component is normalised in its group before the sum, so that samples with different mixes of rewards stay distinct: a sum of raw
    rewards hides a correct format behind a wrong answer. whiten brings the sums to mean 0 and variance 1 over all of the policy's tokens in
    the batch. Needs at least two samples a prompt, and a reward function that returns components.

    `components` selects and orders the components, `weights` gives their weights, and `norm_by_std: false` omits the division. The score
    itself is not used. A reward function returns components as further keys beside `score`; with the reward manager `hybrid` every scorer
    is a component.

    In a config:

        algorithm:
          advantage: {name: gdpo, components: [format, answer], weights: [0.5, 1.0]}
        reward:
          manager:
            name: hybrid
            scorers:
              format: {function: {name: regex_format, pattern: "<think>.*</think>.*"}, weight: 0.5}
              answer: {function: math}
    """

    name = "gdpo"
    Config = GdpoConfig
    scope = "batch"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"reward_components", "response_mask"})

    def compare(self, columns: Batch, groups: Groups) -> Float64[np.ndarray, "N"]:
        rows = columns["reward_components"]
        names = self.config.components or _all_names(rows)
        weights = self.config.weights or (1.0,) * len(names)
        total_N = np.zeros(len(rows))
        for name, weight in zip(names, weights, strict=True):
            part_N = deviations(_values(rows, name), groups)
            if self.config.norm_by_std:
                part_N = part_N / (deviation_spread_N(part_N, groups) + EPSILON)
            total_N += weight * part_N
        return whiten_over_tokens(total_N, columns["response_mask"], groups, self.context.reduction)


def _all_names(rows: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Return the names of all reward components that any sample has, sorted.

    Raises:
        ColumnError: no sample has a component.
    """
    names = sorted({name for row in rows for name in row or ()})
    if rows and not names:
        raise ColumnError(
            "advantage estimator 'gdpo' needs components of the reward, but no sample has any: "
            "column 'reward_components' is empty",
            hint="let the reward function return components besides its score, or set "
            "algorithm.advantage=grpo",
        )
    return names


def _values(rows: Sequence[Mapping[str, Any] | None], name: str) -> Float64[np.ndarray, "N"]:
    """Return one reward component of every sample, float64 [N].

    Raises:
        ColumnError: a sample lacks the component, or a value is not a number.
    """
    try:
        return np.fromiter((row[name] for row in rows), np.float64, len(rows))  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        raise _fault(rows, name) from None


def _fault(rows: Sequence[Mapping[str, Any] | None], name: str) -> ColumnError:
    number, row = next(
        (number, row or {})
        for number, row in enumerate(rows)
        if not row or not isinstance(row.get(name), int | float)
    )
    there = ", ".join(f"{known}={value!r}" for known, value in row.items()) or "none"
    near = nearest(name, row)
    return ColumnError(
        f"advantage estimator 'gdpo' needs the reward component {name!r} of every sample as "
        f"a number, but sample {number} of the batch has these components: {there}",
        hint=(f"did you mean {near!r}? " if near and near != name else "")
        + "In algorithm.advantage.components, list only components that every reward function returns",
    )
