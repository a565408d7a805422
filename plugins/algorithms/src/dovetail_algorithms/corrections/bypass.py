"""Bypass presets: the rollout policy is the old one, so r = π / π_rollout, made anew in every micro-batch, corrects all at once.

Two policies only, and no pass for old_log_probs. With a clipped loss, whose own ratio then is r, weights do nothing
and the presets have none; the `pg` presets are for losses without a ratio, such as `reinforce`.
"""

from __future__ import annotations

from dovetail_algorithms.config.corrections import (
    BypassPgGeoRsConfig,
    BypassPgGeoRsSeqTisConfig,
    BypassPgGeoRsTokenTisConfig,
    BypassPgIsConfig,
    BypassPgTokenIcepopConfig,
    BypassPpoClipConfig,
    BypassPpoClipGeoRsConfig,
    BypassPpoClipK3RsConfig,
)
from dovetail_algorithms.corrections.by_ratio import CorrectionByRatio


class BypassPpoClip(CorrectionByRatio):
    """The clipped loss's own ratio is π / π_rollout; nothing else is done."""

    name = "bypass_ppo_clip"
    Config = BypassPpoClipConfig


class BypassPpoClipGeoRs(CorrectionByRatio):
    """π / π_rollout in the clipped loss, and only samples with 0.999 ≤ exp(mean_t −log r_t) ≤ 1.001.

    A rejected token has no policy loss and still counts in the loss's denominator, which is fixed before the update;
    under a decoupled correction it does not count.
    """

    name = "bypass_ppo_clip_geo_rs"
    Config = BypassPpoClipGeoRsConfig


class BypassPpoClipK3Rs(CorrectionByRatio):
    """π / π_rollout in the clipped loss, and only samples with mean_t (r_t − 1 − log r_t) ≤ 0.01.

    A rejected token has no policy loss and still counts in the loss's denominator, which is fixed before the update;
    under a decoupled correction it does not count.
    """

    name = "bypass_ppo_clip_k3_rs"
    Config = BypassPpoClipK3RsConfig


class BypassPgIs(CorrectionByRatio):
    """The policy gradient, weighed by w = min(Π_t r_t, 2) a sample.

    For a loss without a ratio of its own.

    In a config:

        algorithm:
          policy_loss: reinforce
    """

    name = "bypass_pg_is"
    Config = BypassPgIsConfig


class BypassPgTokenIcepop(CorrectionByRatio):
    """The policy gradient with IcePop (arXiv 2510.18855): w_t = r_t where 0.5 ≤ r_t ≤ 5, otherwise 0.

    For a loss without a ratio of its own.

    In a config:

        algorithm:
          policy_loss: reinforce
    """

    name = "bypass_pg_token_icepop"
    Config = BypassPgTokenIcepopConfig


class BypassPgGeoRs(CorrectionByRatio):
    """The policy gradient of samples with 0.999 ≤ exp(mean_t −log r_t) ≤ 1.001.

    A rejected token has no policy loss and still counts in the loss's denominator, which is fixed before the update;
    under a decoupled correction it does not count.

    For a loss without a ratio of its own.

    In a config:

        algorithm:
          policy_loss: reinforce
    """

    name = "bypass_pg_geo_rs"
    Config = BypassPgGeoRsConfig


class BypassPgGeoRsTokenTis(CorrectionByRatio):
    """The policy gradient of samples with 0.999 ≤ exp(mean_t −log r_t) ≤ 1.001, weighed by w_t = min(r_t, 2).

    A rejected token has no policy loss and still counts in the loss's denominator, which is fixed before the update;
    under a decoupled correction it does not count.

    For a loss without a ratio of its own.

    In a config:

        algorithm:
          policy_loss: reinforce
    """

    name = "bypass_pg_geo_rs_token_tis"
    Config = BypassPgGeoRsTokenTisConfig


class BypassPgGeoRsSeqTis(CorrectionByRatio):
    """The policy gradient of samples with 0.999 ≤ exp(mean_t −log r_t) ≤ 1.001, weighed by w = min(Π_t r_t, 2).

    A rejected token has no policy loss and still counts in the loss's denominator, which is fixed before the update;
    under a decoupled correction it does not count.

    For a loss without a ratio of its own.

    In a config:

        algorithm:
          policy_loss: reinforce
    """

    name = "bypass_pg_geo_rs_seq_tis"
    Config = BypassPgGeoRsSeqTisConfig
