"""Decoupled presets: r = π_old / π_rollout makes up for the engines' difference, π / π_old is the loss's own ratio.

Three policies: the rollout's, the old one (the trainer's before its updates, from a pass of its own or, with one update
a rollout, from the update itself), and the current one.
"""

from __future__ import annotations

from dovetail_algorithms.config.corrections import (
    DecoupledGeoRsConfig,
    DecoupledGeoRsSeqTisConfig,
    DecoupledGeoRsTokenTisConfig,
    DecoupledK3RsConfig,
    DecoupledK3RsSeqTisConfig,
    DecoupledK3RsTokenTisConfig,
    DecoupledSeqIsConfig,
    DecoupledSeqIsRsConfig,
    DecoupledTokenIcepopConfig,
    DecoupledTokenIsConfig,
)
from dovetail_algorithms.corrections.by_ratio import CorrectionByRatio


class DecoupledTokenIs(CorrectionByRatio):
    """Truncated importance sampling (Ionides, 2008) a token: w_t = min(r_t, 2)."""

    name = "decoupled_token_is"
    Config = DecoupledTokenIsConfig


class DecoupledSeqIs(CorrectionByRatio):
    """Truncated importance sampling a sample: w = min(Π_t r_t, 2) for each of its tokens; unbiased before truncation."""

    name = "decoupled_seq_is"
    Config = DecoupledSeqIsConfig


class DecoupledTokenIcepop(CorrectionByRatio):
    """IcePop (arXiv 2510.18855): w_t = r_t where 0.5 ≤ r_t ≤ 5, otherwise 0."""

    name = "decoupled_token_icepop"
    Config = DecoupledTokenIcepopConfig


class DecoupledSeqIsRs(CorrectionByRatio):
    """w = min(Π_t r_t, 2), and only samples with 0.5 ≤ Π_t 1/r_t ≤ 2."""

    name = "decoupled_seq_is_rs"
    Config = DecoupledSeqIsRsConfig


class DecoupledGeoRs(CorrectionByRatio):
    """Only samples with 0.999 ≤ exp(mean_t −log r_t) ≤ 1.001, whose geometric mean ratio, as GSPO's (arXiv 2507.18071), favours no length."""

    name = "decoupled_geo_rs"
    Config = DecoupledGeoRsConfig


class DecoupledGeoRsTokenTis(CorrectionByRatio):
    """Only samples with 0.999 ≤ exp(mean_t −log r_t) ≤ 1.001, and w_t = min(r_t, 2)."""

    name = "decoupled_geo_rs_token_tis"
    Config = DecoupledGeoRsTokenTisConfig


class DecoupledGeoRsSeqTis(CorrectionByRatio):
    """Only samples with 0.999 ≤ exp(mean_t −log r_t) ≤ 1.001, and w = min(Π_t r_t, 2)."""

    name = "decoupled_geo_rs_seq_tis"
    Config = DecoupledGeoRsSeqTisConfig


class DecoupledK3Rs(CorrectionByRatio):
    """Only samples with mean_t (r_t − 1 − log r_t) ≤ 0.01 (k3 of joschu.net/blog/kl-approx.html), which no errors of either sign cancel in."""

    name = "decoupled_k3_rs"
    Config = DecoupledK3RsConfig


class DecoupledK3RsTokenTis(CorrectionByRatio):
    """Only samples with mean_t (r_t − 1 − log r_t) ≤ 0.01, and w_t = min(r_t, 2)."""

    name = "decoupled_k3_rs_token_tis"
    Config = DecoupledK3RsTokenTisConfig


class DecoupledK3RsSeqTis(CorrectionByRatio):
    """Only samples with mean_t (r_t − 1 − log r_t) ≤ 0.01, and w = min(Π_t r_t, 2)."""

    name = "decoupled_k3_rs_seq_tis"
    Config = DecoupledK3RsSeqTisConfig
