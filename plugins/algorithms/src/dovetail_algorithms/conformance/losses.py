"""The suites of the policy losses."""

from __future__ import annotations

from dovetail_algorithms.config.losses import (
    CispoConfig,
    ClipCovConfig,
    DppoConfig,
    KlCovConfig,
    PpoClipConfig,
)
from dovetail_algorithms.losses.cispo import Cispo
from dovetail_algorithms.losses.clip_cov import ClipCov
from dovetail_algorithms.losses.dppo import Dppo
from dovetail_algorithms.losses.dro import Dro
from dovetail_algorithms.losses.gmpo import Gmpo
from dovetail_algorithms.losses.gpg import Gpg
from dovetail_algorithms.losses.gspo import Gspo
from dovetail_algorithms.losses.kl_cov import KlCov
from dovetail_algorithms.losses.ppo_clip import PpoClip
from dovetail_algorithms.losses.reinforce import Reinforce
from dovetail_algorithms.losses.sapo import Sapo
from dovetail_sdk.testing.conformance import PolicyLossConformance


class TestPpoClip(PolicyLossConformance):
    """PPO clip."""

    plugin = PpoClip
    smooth = True


class TestPpoClipAsymmetricWithoutDualClip(PolicyLossConformance):
    """PPO clip asymmetric without dual clip."""

    plugin = PpoClip
    config = PpoClipConfig(name="ppo_clip", clip_low=0.2, clip_high=0.28, dual_clip=None)
    smooth = True


class TestGspo(PolicyLossConformance):
    """GSPO."""

    plugin = Gspo
    smooth = True


class TestCispo(PolicyLossConformance):
    """CISPO."""

    plugin = Cispo


class TestCispoBoundedBelow(PolicyLossConformance):
    """CISPO bounded below."""

    plugin = Cispo
    config = CispoConfig(name="cispo", clip_low=0.2, clip_high=0.2)


class TestSapo(PolicyLossConformance):
    """SAPO."""

    plugin = Sapo
    smooth = True


class TestGpgLoss(PolicyLossConformance):
    """GPG loss."""

    plugin = Gpg
    smooth = True


class TestGmpo(PolicyLossConformance):
    """GMPO."""

    plugin = Gmpo
    smooth = True


class TestClipCov(PolicyLossConformance):
    """Clip cov."""

    plugin = ClipCov
    # So that several of few tokens are chosen, and not all that could be.
    config = ClipCovConfig(name="clip_cov", share=0.2, cov_low=-0.5, cov_high=2.0)
    smooth = True


class TestKlCov(PolicyLossConformance):
    """Kl cov."""

    plugin = KlCov
    config = KlCovConfig(name="kl_cov", share=0.2)
    smooth = True


class TestDppoTotalVariation(PolicyLossConformance):
    """DPPO total variation."""

    plugin = Dppo


class TestDppoBinaryKl(PolicyLossConformance):
    """DPPO binary kl."""

    plugin = Dppo
    config = DppoConfig(name="dppo", divergence="binary_kl")


class TestReinforce(PolicyLossConformance):
    """Reinforce."""

    plugin = Reinforce
    smooth = True


class TestDro(PolicyLossConformance):
    """DRO."""

    plugin = Dro
    smooth = True
