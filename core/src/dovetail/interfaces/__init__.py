"""The interfaces that plugins implement, each with a version of its own. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.config.fields import PluginSection as PluginSection
    from dovetail.config.fields import PresetSection as PresetSection
    from dovetail.plugins import load as _load

    load_plugin_class = _load.load_class
    make_plugin = _load.make

_HOME = {
    "plugin": ("LocalReduction", "Plugin", "PluginContext", "Reduction"),
    "rollout": (
        "ROLLOUT_API",
        "BaseRollout",
        "Completion",
        "FinishReason",
        "PauseMode",
        "RolloutRequest",
        "SamplingParams",
    ),
    "engine": ("ENGINE_API", "OUTPUTS", "TrainEngine"),
    "reward": (
        "REWARD_FUNCTION_API",
        "REWARD_MANAGER_API",
        "Failure",
        "FailureKind",
        "Outcome",
        "RewardFunction",
        "RewardManager",
        "RewardSample",
        "RewardUnit",
        "RunningTime",
        "Score",
    ),
    "reward_answers": ("finite_float", "outcome_from", "outcomes_from"),
    "reward_calls": ("RewardCall", "RewardFunctions", "configured_functions", "failure_from"),
    "advantage": ("ADVANTAGE_API", "AdvantageEstimator", "Advantages", "Groups"),
    "policy_loss": (
        "LOSS_AGGREGATION_API",
        "POLICY_LOSS_API",
        "LossAggregation",
        "LossInputs",
        "PolicyLoss",
        "TokenLosses",
    ),
    "objective": (
        "AnyObjectiveSpec",
        "KlTerm",
        "ObjectiveSpec",
        "PreferenceObjectiveSpec",
        "ValueObjectiveSpec",
    ),
    "rollout_correction": (
        "ROLLOUT_CORRECTION_API",
        "Correction",
        "CorrectionInputs",
        "CorrectionMode",
        "RolloutCorrection",
    ),
    "sample_filter": ("SAMPLE_FILTER_API", "SampleFilter"),
    "preset": ("PRESET_API", "Preset"),
    "kl_controller": ("KL_CONTROLLER_API", "KlController"),
    "tracker": ("TRACKER_API", "Tracker"),
    "data": ("DATASET_API", "SAMPLER_API", "DatasetSource", "Prompt", "Sampler"),
    "trainer": ("TRAINER_API", "Trainer"),
    "runtime": ("RUNTIME_API", "PluginRef", "Runtime", "WorkerSpec"),
    "task_workers": ("Task", "TaskSpec", "TaskWorker", "load_target"),
    "transport": (
        "WEIGHT_TRANSPORT_API",
        "AdapterSpec",
        "TensorSpec",
        "WeightManifest",
        "WeightReceiver",
        "WeightSender",
        "WeightTransport",
    ),
    "transport_checks": ("Bucket", "bucketed", "gather_the_rest", "matched", "received_whole"),
    "preflight": ("PREFLIGHT_API", "Finding", "PreflightRule"),
    "dispatch_mode": ("DISPATCH_MODE_API", "Call", "DispatchMode"),
}
_SECTIONS = ("PluginSection", "PresetSection")
"""What the Config of a plugin, or of a preset, extends; they live with the config."""
_LOADING = {"load_plugin_class": "load_class", "make_plugin": "make"}
"""What a plugin needs to rebuild another one from its PluginRef, as a worker does."""
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted([*_MODULE_OF, *_LOADING, *_SECTIONS])  # noqa: PLE0605 - computed from the table above


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    if name in _SECTIONS:
        return getattr(importlib.import_module("dovetail.config.fields"), name)
    if name in _LOADING:
        return getattr(importlib.import_module("dovetail.plugins.load"), _LOADING[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
