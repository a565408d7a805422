"""The interfaces that plugins implement, each with a version of its own. Names load on first use; type checkers read the stub."""

from __future__ import annotations

import importlib

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
    "reward_calls": ("RewardCall", "RewardFunctions", "failure_from"),
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
_ELSEWHERE = {
    "PluginSection": ("dovetail.config.fields", "PluginSection"),
    "PresetSection": ("dovetail.config.fields", "PresetSection"),
    "configured_functions": ("dovetail.scoring.functions", "configured_functions"),
    "load_plugin_class": ("dovetail.plugins.load", "load_class"),
    "make_plugin": ("dovetail.plugins.load", "make"),
}
"""What plugins need besides, and where it lives: what their Config extends, what rebuilds another plugin from its PluginRef as a
worker does, and what makes the reward functions that a section selects."""
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted([*_MODULE_OF, *_ELSEWHERE])  # noqa: PLE0605 - computed from the tables above


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    if name in _ELSEWHERE:
        module, real = _ELSEWHERE[name]
        return getattr(importlib.import_module(module), real)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
