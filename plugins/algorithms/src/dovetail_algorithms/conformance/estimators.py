"""Conformance suites of the advantage estimators."""

from __future__ import annotations

from dovetail_algorithms.config.estimators import (
    GaeConfig,
    GdpoConfig,
    GrpoConfig,
    GrpoPasskConfig,
    PrimeConfig,
    ReinforcePlusPlusConfig,
    WinRateConfig,
)
from dovetail_algorithms.estimators.bi_level_gae import BiLevelGaeEstimator
from dovetail_algorithms.estimators.dr_grpo import DrGrpoEstimator
from dovetail_algorithms.estimators.gae import GaeEstimator
from dovetail_algorithms.estimators.gdpo import GdpoEstimator
from dovetail_algorithms.estimators.gigpo import GigpoEstimator
from dovetail_algorithms.estimators.gpg import GpgEstimator
from dovetail_algorithms.estimators.grpo import GrpoEstimator
from dovetail_algorithms.estimators.grpo_passk import GrpoPasskEstimator
from dovetail_algorithms.estimators.mt_grpo import MtGrpoEstimator
from dovetail_algorithms.estimators.opo import OpoEstimator
from dovetail_algorithms.estimators.optimal_token_baseline import (
    OptimalTokenBaselineEstimator,
    TirOptimalTokenBaselineEstimator,
)
from dovetail_algorithms.estimators.prime import PrimeEstimator
from dovetail_algorithms.estimators.reinforce_plus_plus import ReinforcePlusPlusEstimator
from dovetail_algorithms.estimators.reinforce_plus_plus_baseline import (
    ReinforcePlusPlusBaselineEstimator,
)
from dovetail_algorithms.estimators.remax import RemaxEstimator
from dovetail_algorithms.estimators.rloo import RlooEstimator
from dovetail_algorithms.estimators.score import ScoreEstimator
from dovetail_algorithms.estimators.win_rate import WinRateEstimator
from dovetail_sdk.testing.conformance import AdvantageConformance

TestGrpo = AdvantageConformance.of(GrpoEstimator)
TestGrpoWithoutStd = AdvantageConformance.of(
    GrpoEstimator, GrpoConfig(name="grpo", norm_by_std=False)
)


class TestGrpoWithRawSingletons(AdvantageConformance):
    """The estimator `grpo` with `singleton: raw`."""

    plugin = GrpoEstimator
    config = GrpoConfig(name="grpo", singleton="raw")

    def compares_groups(self) -> bool:
        return False


TestDrGrpo = AdvantageConformance.of(DrGrpoEstimator)
TestRloo = AdvantageConformance.of(RlooEstimator)
TestOpo = AdvantageConformance.of(OpoEstimator)
TestGpg = AdvantageConformance.of(GpgEstimator)
TestGrpoPassk = AdvantageConformance.of(GrpoPasskEstimator)
TestGrpoPasskByStd = AdvantageConformance.of(
    GrpoPasskEstimator, GrpoPasskConfig(name="grpo_passk", norm_by_std=True)
)
TestGdpo = AdvantageConformance.of(GdpoEstimator)
TestGdpoWeighted = AdvantageConformance.of(
    GdpoEstimator,
    GdpoConfig(
        name="gdpo", components=("format", "accuracy"), weights=(0.5, 2.0), norm_by_std=False
    ),
)
TestReinforcePlusPlus = AdvantageConformance.of(ReinforcePlusPlusEstimator)
TestReinforcePlusPlusDiscounted = AdvantageConformance.of(
    ReinforcePlusPlusEstimator, ReinforcePlusPlusConfig(name="reinforce_plus_plus", gamma=0.9)
)
TestReinforcePlusPlusBaseline = AdvantageConformance.of(ReinforcePlusPlusBaselineEstimator)
TestScore = AdvantageConformance.of(ScoreEstimator)
TestRemax = AdvantageConformance.of(RemaxEstimator)
TestGae = AdvantageConformance.of(GaeEstimator)
TestGaeDiscountedAndNotWhitened = AdvantageConformance.of(
    GaeEstimator, GaeConfig(name="gae", gamma=0.9, lam=0.8, whiten=False)
)
TestGaeOverTurns = AdvantageConformance.of(GaeEstimator, GaeConfig(name="gae", turn_gamma=0.9))
TestBiLevelGae = AdvantageConformance.of(BiLevelGaeEstimator)
TestMtGrpo = AdvantageConformance.of(MtGrpoEstimator)
TestGigpo = AdvantageConformance.of(GigpoEstimator)
TestOptimalTokenBaseline = AdvantageConformance.of(OptimalTokenBaselineEstimator)
TestTirOptimalTokenBaseline = AdvantageConformance.of(TirOptimalTokenBaselineEstimator)
TestPrime = AdvantageConformance.of(PrimeEstimator)
TestPrimeDiscounted = AdvantageConformance.of(PrimeEstimator, PrimeConfig(name="prime", gamma=0.9))
TestWinRate = AdvantageConformance.of(WinRateEstimator)
TestWinRateByBradleyTerry = AdvantageConformance.of(
    WinRateEstimator, WinRateConfig(name="win_rate", comparison="bradley_terry")
)
