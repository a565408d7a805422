"""The conformance kit: subclass the suite of your plugin's kind, name your plugin, and run pytest.

from dovetail_sdk.testing.conformance import AdvantageConformance

class TestMyEstimator(AdvantageConformance):
plugin = MyEstimator
"""

from __future__ import annotations

import importlib

import pytest

_HOME = {
    "plugin": ("PluginConformance",),
    "loss_aggregation": ("LossAggregationConformance",),
    "run_parts": (
        "DatasetConformance",
        "KlControllerConformance",
        "SamplerConformance",
        "TrackerConformance",
        "TrainerConformance",
    ),
    "runtime": ("DispatchModeConformance", "PreflightConformance", "RuntimeConformance"),
    "advantage": ("AdvantageConformance",),
    "policy_loss": ("PolicyLossConformance",),
    "preset": ("PresetConformance",),
    "reward_function": ("RewardFunctionConformance",),
    "reward_manager": ("RewardManagerConformance",),
    "rollout_correction": ("RolloutCorrectionConformance",),
    "rollout": ("RolloutConformance",),
    "sample_filter": ("SampleFilterConformance",),
    "engine": ("EngineConformance",),
    "transport": ("WeightTransportConformance",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

# A failing assert of the kit shows its values in a plugin's own test run, as one in a test file does.
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _HOME))

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - computed from the table above


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
