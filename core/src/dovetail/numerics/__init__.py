"""Masked statistics, KL estimators, loss aggregation, objectives, random streams. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.numerics.build import build_objective
    from dovetail.numerics.deferred import (
        max_metric,
        mean_metric,
        resolve_metrics,
        share_metric,
    )
    from dovetail.numerics.explained_variance import ExplainedVariance
    from dovetail.numerics.finite import listed, sample_names
    from dovetail.numerics.kl import ESTIMATORS, estimate_kl
    from dovetail.numerics.kl_controller import AdaptiveKl, FixedKl
    from dovetail.numerics.masked import (
        masked_mean,
        masked_moments,
        masked_var,
        weighted_moments,
        whiten,
        whiten_weighted,
    )
    from dovetail.numerics.objective import Objective, ObjectiveTerm
    from dovetail.numerics.policy_objective import PolicyObjective
    from dovetail.numerics.preference_objective import (
        PreferenceObjective,
        preference_scores,
        with_other_scores,
    )
    from dovetail.numerics.rollout_correction import (
        CRITERIA,
        Criterion,
        bounded_weights,
        correct_batch,
        importance_ratios,
        kept_tokens,
        log_ratios,
        normalized_weights,
    )
    from dovetail.numerics.streams import SampleStream
    from dovetail.numerics.tensor_digest import DeferredDigests, tensor_digests
    from dovetail.numerics.value_objective import ValueObjective

_HOME = {
    "AdaptiveKl": "kl_controller",
    "CRITERIA": "rollout_correction",
    "Criterion": "rollout_correction",
    "DeferredDigests": "tensor_digest",
    "ESTIMATORS": "kl",
    "ExplainedVariance": "explained_variance",
    "FixedKl": "kl_controller",
    "Objective": "objective",
    "ObjectiveTerm": "objective",
    "PolicyObjective": "policy_objective",
    "PreferenceObjective": "preference_objective",
    "SampleStream": "streams",
    "ValueObjective": "value_objective",
    "bounded_weights": "rollout_correction",
    "build_objective": "build",
    "correct_batch": "rollout_correction",
    "estimate_kl": "kl",
    "importance_ratios": "rollout_correction",
    "kept_tokens": "rollout_correction",
    "listed": "finite",
    "log_ratios": "rollout_correction",
    "masked_mean": "masked",
    "masked_moments": "masked",
    "masked_var": "masked",
    "max_metric": "deferred",
    "mean_metric": "deferred",
    "normalized_weights": "rollout_correction",
    "preference_scores": "preference_objective",
    "resolve_metrics": "deferred",
    "sample_names": "finite",
    "share_metric": "deferred",
    "tensor_digests": "tensor_digest",
    "weighted_moments": "masked",
    "whiten": "masked",
    "whiten_weighted": "masked",
    "with_other_scores": "preference_objective",
}

__all__ = [
    "CRITERIA",
    "ESTIMATORS",
    "AdaptiveKl",
    "Criterion",
    "DeferredDigests",
    "ExplainedVariance",
    "FixedKl",
    "Objective",
    "ObjectiveTerm",
    "PolicyObjective",
    "PreferenceObjective",
    "SampleStream",
    "ValueObjective",
    "bounded_weights",
    "build_objective",
    "correct_batch",
    "estimate_kl",
    "importance_ratios",
    "kept_tokens",
    "listed",
    "log_ratios",
    "masked_mean",
    "masked_moments",
    "masked_var",
    "max_metric",
    "mean_metric",
    "normalized_weights",
    "preference_scores",
    "resolve_metrics",
    "sample_names",
    "share_metric",
    "tensor_digests",
    "weighted_moments",
    "whiten",
    "whiten_weighted",
    "with_other_scores",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
