"""The conformance suites of this package's plugins, which `dovetail plugins check` runs."""

from __future__ import annotations

from dovetail_sdk.testing.conformance import TrainerConformance
from dovetail_trainers.on_policy import OnPolicyTrainer
from dovetail_trainers.supervised import SupervisedTrainer


class TestOnPolicy(TrainerConformance):
    """Collect, learn, publish."""

    plugin = OnPolicyTrainer


class TestSupervised(TrainerConformance):
    """Collect, learn."""

    plugin = SupervisedTrainer
