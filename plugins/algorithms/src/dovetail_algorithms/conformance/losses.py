"""The suites of the policy losses."""

from __future__ import annotations

from dovetail_algorithms.config.losses import (
    CispoConfig,
    ClipCovConfig,
    DppoConfig,
    KlCovConfig,
    PpoClipConfig,
)
from dovetail_algorithms.losses.cispo import CispoLoss
from dovetail_algorithms.losses.clip_cov import ClipCovLoss
from dovetail_algorithms.losses.dppo import DppoLoss
from dovetail_algorithms.losses.dro import DroLoss
from dovetail_algorithms.losses.gmpo import GmpoLoss
from dovetail_algorithms.losses.gpg import GpgLoss
from dovetail_algorithms.losses.gspo import GspoLoss
from dovetail_algorithms.losses.kl_cov import KlCovLoss
from dovetail_algorithms.losses.ppo_clip import PpoClipLoss
from dovetail_algorithms.losses.reinforce import ReinforceLoss
from dovetail_algorithms.losses.sapo import SapoLoss
from dovetail_sdk.testing.conformance import PolicyLossConformance


class TestPpoClip(PolicyLossConformance):
    """PPO clip."""

    plugin = PpoClipLoss
    smooth = True


class TestPpoClipAsymmetricWithoutDualClip(PolicyLossConformance):
    """PPO clip asymmetric without dual clip."""

    plugin = PpoClipLoss
    config = PpoClipConfig(name="ppo_clip", clip_low=0.2, clip_high=0.28, dual_clip=None)
    smooth = True


class TestGspo(PolicyLossConformance):
    """GSPO."""

    plugin = GspoLoss
    smooth = True


class TestCispo(PolicyLossConformance):
    """CISPO."""

    plugin = CispoLoss


class TestCispoBoundedBelow(PolicyLossConformance):
    """CISPO bounded below."""

    plugin = CispoLoss
    config = CispoConfig(name="cispo", clip_low=0.2, clip_high=0.2)


class TestSapo(PolicyLossConformance):
    """SAPO."""

    plugin = SapoLoss
    smooth = True


class TestGpgLoss(PolicyLossConformance):
    """GPG loss."""

    plugin = GpgLoss
    smooth = True


class TestGmpo(PolicyLossConformance):
    """GMPO."""

    plugin = GmpoLoss
    smooth = True


class TestClipCov(PolicyLossConformance):
    """Clip cov."""

    plugin = ClipCovLoss
    # So that several of few tokens are chosen, and not all that could be.
    config = ClipCovConfig(name="clip_cov", share=0.2, cov_low=-0.5, cov_high=2.0)
    smooth = True


class TestKlCov(PolicyLossConformance):
    """Kl cov."""

    plugin = KlCovLoss
    config = KlCovConfig(name="kl_cov", share=0.2)
    smooth = True


class TestDppoTotalVariation(PolicyLossConformance):
    """DPPO total variation."""

    plugin = DppoLoss


class TestDppoBinaryKl(PolicyLossConformance):
    """DPPO binary kl."""

    plugin = DppoLoss
    config = DppoConfig(name="dppo", divergence="binary_kl")


class TestReinforce(PolicyLossConformance):
    """Reinforce."""

    plugin = ReinforceLoss
    smooth = True


class TestDro(PolicyLossConformance):
    """DRO."""

    plugin = DroLoss
    smooth = True
