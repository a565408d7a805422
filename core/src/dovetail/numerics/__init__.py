"""Masked statistics, KL estimators, loss aggregation, objectives, random streams. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.numerics.deferred import max_metric, mean_metric, resolve_metrics
    from dovetail.numerics.kl import ESTIMATORS, estimate_kl
    from dovetail.numerics.kl_controller import AdaptiveKl, FixedKl
    from dovetail.numerics.masked import masked_mean, masked_moments, masked_var, whiten
    from dovetail.numerics.objective import Objective, ObjectiveTerm, build_objective
    from dovetail.numerics.streams import SampleStream

_HOME = {
    "AdaptiveKl": "kl_controller",
    "ESTIMATORS": "kl",
    "FixedKl": "kl_controller",
    "Objective": "objective",
    "ObjectiveTerm": "objective",
    "SampleStream": "streams",
    "build_objective": "objective",
    "estimate_kl": "kl",
    "masked_mean": "masked",
    "masked_moments": "masked",
    "masked_var": "masked",
    "max_metric": "deferred",
    "mean_metric": "deferred",
    "resolve_metrics": "deferred",
    "whiten": "masked",
}

__all__ = [
    "ESTIMATORS",
    "AdaptiveKl",
    "FixedKl",
    "Objective",
    "ObjectiveTerm",
    "SampleStream",
    "build_objective",
    "estimate_kl",
    "masked_mean",
    "masked_moments",
    "masked_var",
    "max_metric",
    "mean_metric",
    "resolve_metrics",
    "whiten",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
