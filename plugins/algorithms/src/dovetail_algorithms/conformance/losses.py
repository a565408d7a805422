"""Conformance suites of the policy losses."""

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

TestPpoClip = PolicyLossConformance.of(PpoClipLoss, smooth=True)
TestPpoClipAsymmetricWithoutDualClip = PolicyLossConformance.of(
    PpoClipLoss,
    PpoClipConfig(name="ppo_clip", clip_low=0.2, clip_high=0.28, dual_clip=None),
    smooth=True,
)
TestGspo = PolicyLossConformance.of(GspoLoss, smooth=True)
TestCispo = PolicyLossConformance.of(CispoLoss)
TestCispoBoundedBelow = PolicyLossConformance.of(
    CispoLoss, CispoConfig(name="cispo", clip_low=0.2, clip_high=0.2)
)
TestSapo = PolicyLossConformance.of(SapoLoss, smooth=True)
TestGpgLoss = PolicyLossConformance.of(GpgLoss, smooth=True)
TestGmpo = PolicyLossConformance.of(GmpoLoss, smooth=True)
# These settings select several of a test batch's few tokens, but not every token within the bounds.
TestClipCov = PolicyLossConformance.of(
    ClipCovLoss,
    ClipCovConfig(name="clip_cov", share=0.2, cov_low=-0.5, cov_high=2.0),
    smooth=True,
)
TestKlCov = PolicyLossConformance.of(KlCovLoss, KlCovConfig(name="kl_cov", share=0.2), smooth=True)
TestDppoTotalVariation = PolicyLossConformance.of(DppoLoss)
TestDppoBinaryKl = PolicyLossConformance.of(
    DppoLoss, DppoConfig(name="dppo", divergence="binary_kl")
)
TestReinforce = PolicyLossConformance.of(ReinforceLoss, smooth=True)
TestDro = PolicyLossConformance.of(DroLoss, smooth=True)
