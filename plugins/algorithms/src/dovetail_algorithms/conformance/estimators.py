"""The suites of the estimators."""

from __future__ import annotations

from dovetail_algorithms.config.estimators import (
    GaeConfig,
    GdpoConfig,
    GrpoConfig,
    GrpoPasskConfig,
    ReinforcePlusPlusConfig,
)
from dovetail_algorithms.estimators.dr_grpo import DrGrpo
from dovetail_algorithms.estimators.gae import Gae
from dovetail_algorithms.estimators.gdpo import Gdpo
from dovetail_algorithms.estimators.gpg import Gpg
from dovetail_algorithms.estimators.grpo import Grpo
from dovetail_algorithms.estimators.grpo_passk import GrpoPassk
from dovetail_algorithms.estimators.opo import Opo
from dovetail_algorithms.estimators.optimal_token_baseline import (
    OptimalTokenBaseline,
    TirOptimalTokenBaseline,
)
from dovetail_algorithms.estimators.reinforce_plus_plus import ReinforcePlusPlus
from dovetail_algorithms.estimators.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from dovetail_algorithms.estimators.remax import Remax
from dovetail_algorithms.estimators.rloo import Rloo
from dovetail_sdk.testing.conformance import AdvantageConformance


class TestGrpo(AdvantageConformance):
    """GRPO."""

    plugin = Grpo


class TestGrpoWithoutStd(AdvantageConformance):
    """GRPO without the deviation."""

    plugin = Grpo
    config = GrpoConfig(name="grpo", norm_by_std=False)


class TestGrpoWithRawSingletons(AdvantageConformance):
    """GRPO with raw singletons."""

    plugin = Grpo
    config = GrpoConfig(name="grpo", singleton="raw")

    def compares_groups(self) -> bool:
        return False


class TestDrGrpo(AdvantageConformance):
    """Dr GRPO."""

    plugin = DrGrpo


class TestRloo(AdvantageConformance):
    """RLOO."""

    plugin = Rloo


class TestOpo(AdvantageConformance):
    """OPO."""

    plugin = Opo


class TestGpg(AdvantageConformance):
    """GPG."""

    plugin = Gpg


class TestGrpoPassk(AdvantageConformance):
    """GRPO passk."""

    plugin = GrpoPassk


class TestGrpoPasskByStd(AdvantageConformance):
    """GRPO passk by the deviation."""

    plugin = GrpoPassk
    config = GrpoPasskConfig(name="grpo_passk", norm_by_std=True)


class TestGdpo(AdvantageConformance):
    """GDPO."""

    plugin = Gdpo


class TestGdpoWeighted(AdvantageConformance):
    """GDPO weighted."""

    plugin = Gdpo
    config = GdpoConfig(
        name="gdpo", components=("format", "accuracy"), weights=(0.5, 2.0), norm_by_std=False
    )


class TestReinforcePlusPlus(AdvantageConformance):
    """Reinforce plus plus."""

    plugin = ReinforcePlusPlus


class TestReinforcePlusPlusDiscounted(AdvantageConformance):
    """Reinforce plus plus discounted."""

    plugin = ReinforcePlusPlus
    config = ReinforcePlusPlusConfig(name="reinforce_plus_plus", gamma=0.9)


class TestReinforcePlusPlusBaseline(AdvantageConformance):
    """Reinforce plus plus baseline."""

    plugin = ReinforcePlusPlusBaseline


class TestRemax(AdvantageConformance):
    """Remax."""

    plugin = Remax


class TestGae(AdvantageConformance):
    """GAE."""

    plugin = Gae


class TestGaeDiscountedAndNotWhitened(AdvantageConformance):
    """GAE discounted and not whitened."""

    plugin = Gae
    config = GaeConfig(name="gae", gamma=0.9, lam=0.8, whiten=False)


class TestOptimalTokenBaseline(AdvantageConformance):
    """Optimal token baseline."""

    plugin = OptimalTokenBaseline


class TestTirOptimalTokenBaseline(AdvantageConformance):
    """Tir optimal token baseline."""

    plugin = TirOptimalTokenBaseline
