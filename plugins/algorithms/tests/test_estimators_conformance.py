"""The conformance suite on every estimator."""

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
    plugin = Grpo


class TestGrpoWithoutStd(AdvantageConformance):
    plugin = Grpo
    config = GrpoConfig(name="grpo", norm_by_std=False)


class TestGrpoWithRawSingletons(AdvantageConformance):
    plugin = Grpo
    config = GrpoConfig(name="grpo", singleton="raw")

    def compares_groups(self):
        return False


class TestDrGrpo(AdvantageConformance):
    plugin = DrGrpo


class TestRloo(AdvantageConformance):
    plugin = Rloo


class TestOpo(AdvantageConformance):
    plugin = Opo


class TestGpg(AdvantageConformance):
    plugin = Gpg


class TestGrpoPassk(AdvantageConformance):
    plugin = GrpoPassk


class TestGrpoPasskByStd(AdvantageConformance):
    plugin = GrpoPassk
    config = GrpoPasskConfig(name="grpo_passk", norm_by_std=True)


class TestGdpo(AdvantageConformance):
    plugin = Gdpo


class TestGdpoWeighted(AdvantageConformance):
    plugin = Gdpo
    config = GdpoConfig(
        name="gdpo", components=("format", "accuracy"), weights=(0.5, 2.0), norm_by_std=False
    )


class TestReinforcePlusPlus(AdvantageConformance):
    plugin = ReinforcePlusPlus


class TestReinforcePlusPlusDiscounted(AdvantageConformance):
    plugin = ReinforcePlusPlus
    config = ReinforcePlusPlusConfig(name="reinforce_plus_plus", gamma=0.9)


class TestReinforcePlusPlusBaseline(AdvantageConformance):
    plugin = ReinforcePlusPlusBaseline


class TestRemax(AdvantageConformance):
    plugin = Remax


class TestGae(AdvantageConformance):
    plugin = Gae


class TestGaeDiscountedAndNotWhitened(AdvantageConformance):
    plugin = Gae
    config = GaeConfig(name="gae", gamma=0.9, lam=0.8, whiten=False)


class TestOptimalTokenBaseline(AdvantageConformance):
    plugin = OptimalTokenBaseline


class TestTirOptimalTokenBaseline(AdvantageConformance):
    plugin = TirOptimalTokenBaseline
