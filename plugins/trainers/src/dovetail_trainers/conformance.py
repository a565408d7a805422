"""The conformance suites of this package's plugins, which `dovetail plugins check` runs."""

from __future__ import annotations

from dovetail.sections import TrainerSection
from dovetail_sdk.testing.conformance import TrainerConformance
from dovetail_trainers.on_policy import OnPolicyTrainer
from dovetail_trainers.streaming import StreamingTrainer
from dovetail_trainers.supervised import SupervisedTrainer

TestOnPolicy = TrainerConformance.of(OnPolicyTrainer, TrainerSection(name="on_policy"))
TestStreaming = TrainerConformance.of(StreamingTrainer)
TestSupervised = TrainerConformance.of(SupervisedTrainer)
