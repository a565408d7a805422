"""The conformance suites on every estimator and loss."""

from __future__ import annotations

from dovetail_algorithms.config.estimators import GrpoConfig
from dovetail_algorithms.config.losses import PpoClipConfig
from dovetail_algorithms.estimators.dr_grpo import DrGrpo
from dovetail_algorithms.estimators.grpo import Grpo
from dovetail_algorithms.estimators.reinforce_plus_plus import ReinforcePlusPlus
from dovetail_algorithms.estimators.rloo import Rloo
from dovetail_algorithms.losses.ppo_clip import PpoClip
from dovetail_algorithms.losses.reinforce import Reinforce
from dovetail_sdk.testing.conformance import AdvantageConformance, PolicyLossConformance


class TestGrpo(AdvantageConformance):
    plugin = Grpo


class TestGrpoWithoutStd(AdvantageConformance):
    plugin = Grpo
    config = GrpoConfig(name="grpo", norm_by_std=False)


class TestDrGrpo(AdvantageConformance):
    plugin = DrGrpo


class TestRloo(AdvantageConformance):
    plugin = Rloo


class TestReinforcePlusPlus(AdvantageConformance):
    plugin = ReinforcePlusPlus


class TestPpoClip(PolicyLossConformance):
    plugin = PpoClip


class TestPpoClipAsymmetricWithoutDualClip(PolicyLossConformance):
    plugin = PpoClip
    config = PpoClipConfig(name="ppo_clip", clip_low=0.2, clip_high=0.28, dual_clip=None)


class TestReinforce(PolicyLossConformance):
    plugin = Reinforce
