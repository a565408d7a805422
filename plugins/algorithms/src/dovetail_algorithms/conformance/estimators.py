"""The suites of the estimators."""

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
from dovetail_algorithms.estimators.dr_grpo import DrGrpoEstimator
from dovetail_algorithms.estimators.gae import GaeEstimator
from dovetail_algorithms.estimators.gdpo import GdpoEstimator
from dovetail_algorithms.estimators.gpg import GpgEstimator
from dovetail_algorithms.estimators.grpo import GrpoEstimator
from dovetail_algorithms.estimators.grpo_passk import GrpoPasskEstimator
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
from dovetail_algorithms.estimators.win_rate import WinRateEstimator
from dovetail_sdk.testing.conformance import AdvantageConformance


class TestGrpo(AdvantageConformance):
    """GRPO."""

    plugin = GrpoEstimator


class TestGrpoWithoutStd(AdvantageConformance):
    """GRPO without the deviation."""

    plugin = GrpoEstimator
    config = GrpoConfig(name="grpo", norm_by_std=False)


class TestGrpoWithRawSingletons(AdvantageConformance):
    """GRPO with raw singletons."""

    plugin = GrpoEstimator
    config = GrpoConfig(name="grpo", singleton="raw")

    def compares_groups(self) -> bool:
        return False


class TestDrGrpo(AdvantageConformance):
    """Dr GRPO."""

    plugin = DrGrpoEstimator


class TestRloo(AdvantageConformance):
    """RLOO."""

    plugin = RlooEstimator


class TestOpo(AdvantageConformance):
    """OPO."""

    plugin = OpoEstimator


class TestGpg(AdvantageConformance):
    """GPG."""

    plugin = GpgEstimator


class TestGrpoPassk(AdvantageConformance):
    """GRPO passk."""

    plugin = GrpoPasskEstimator


class TestGrpoPasskByStd(AdvantageConformance):
    """GRPO passk by the deviation."""

    plugin = GrpoPasskEstimator
    config = GrpoPasskConfig(name="grpo_passk", norm_by_std=True)


class TestGdpo(AdvantageConformance):
    """GDPO."""

    plugin = GdpoEstimator


class TestGdpoWeighted(AdvantageConformance):
    """GDPO weighted."""

    plugin = GdpoEstimator
    config = GdpoConfig(
        name="gdpo", components=("format", "accuracy"), weights=(0.5, 2.0), norm_by_std=False
    )


class TestReinforcePlusPlus(AdvantageConformance):
    """Reinforce plus plus."""

    plugin = ReinforcePlusPlusEstimator


class TestReinforcePlusPlusDiscounted(AdvantageConformance):
    """Reinforce plus plus discounted."""

    plugin = ReinforcePlusPlusEstimator
    config = ReinforcePlusPlusConfig(name="reinforce_plus_plus", gamma=0.9)


class TestReinforcePlusPlusBaseline(AdvantageConformance):
    """Reinforce plus plus baseline."""

    plugin = ReinforcePlusPlusBaselineEstimator


class TestRemax(AdvantageConformance):
    """Remax."""

    plugin = RemaxEstimator


class TestGae(AdvantageConformance):
    """GAE."""

    plugin = GaeEstimator


class TestGaeDiscountedAndNotWhitened(AdvantageConformance):
    """GAE discounted and not whitened."""

    plugin = GaeEstimator
    config = GaeConfig(name="gae", gamma=0.9, lam=0.8, whiten=False)


class TestOptimalTokenBaseline(AdvantageConformance):
    """Optimal token baseline."""

    plugin = OptimalTokenBaselineEstimator


class TestTirOptimalTokenBaseline(AdvantageConformance):
    """Tir optimal token baseline."""

    plugin = TirOptimalTokenBaselineEstimator


class TestPrime(AdvantageConformance):
    """Undiscounted."""

    plugin = PrimeEstimator


class TestPrimeDiscounted(AdvantageConformance):
    """Discounted process rewards."""

    plugin = PrimeEstimator
    config = PrimeConfig(name="prime", gamma=0.9)


class TestWinRate(AdvantageConformance):
    """Shares of wins."""

    plugin = WinRateEstimator


class TestWinRateByBradleyTerry(AdvantageConformance):
    """σ of differences."""

    plugin = WinRateEstimator
    config = WinRateConfig(name="win_rate", comparison="bradley_terry")
