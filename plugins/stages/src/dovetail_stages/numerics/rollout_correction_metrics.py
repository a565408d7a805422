"""The metrics of a rollout correction, `rollout_corr/…`: how far the two policies are apart, and what the correction did.

The metrics merge over micro-batches and ranks, and may still be tensors. Tokens whose log r is not finite are counted
in `non_finite` and left out of the other metrics. Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from jaxtyping import Bool, Float
from torch import Tensor

from dovetail.interfaces import CorrectionInputs
from dovetail.metrics import EffectiveShare, Mean, Metric, Min, Std, Sum
from dovetail_stages.numerics.deferred import max_metric, mean_metric
from dovetail_stages.numerics.loss_aggregation import sum_by_sample
from dovetail_stages.numerics.rollout_correction import LOG_RATIO_BOUND, divergences, log_ratios

PREFIX = "rollout_corr/"


def divergence_metrics(inputs: CorrectionInputs) -> dict[str, Metric]:
    """Return metrics of how far the training policy is from the rollout policy, before any correction.

    With r = π_train / π_rollout, these are means over the masked-in tokens:

    - `kl`: −log r
    - `k3_kl`: r − 1 − log r
    - `chi2_token`: r² − 1
    - `prob_diff_mean`: |π_train − π_rollout|; usually below 0.005, and above 0.01 a sign of a precision problem or worse

    These are means over the samples with masked-in tokens:

    - `training_ppl`, `rollout_ppl`: exp(−mean log π), with π_train or π_rollout as π
    - `training_log_ppl`, `rollout_log_ppl`: the logarithms of these perplexities
    - `log_ppl_diff`: log training_ppl − log rollout_ppl
    - `log_ppl_abs_diff`: the absolute value of this difference
    - `chi2_seq`: (Π r)² − 1

    `prob_diff_max` is the maximum of |π_train − π_rollout|. `non_finite` counts masked-in tokens without a finite log r.

    Args:
        inputs: the samples' log-probabilities.
    """
    log_ratio_T = log_ratios(inputs)
    valid_T = inputs.mask_T & log_ratio_T.isfinite()
    tokens = valid_T.count_nonzero()
    # Set to 0 on tokens that do not count, so that plain sums are sums over the tokens that count.
    log_ratio_T = log_ratio_T.where(valid_T, 0)
    train_T = inputs.train_log_probs_T.detach().where(valid_T, 0)
    rollout_T = inputs.rollout_log_probs_T.detach().where(valid_T, 0)
    gap_T = (train_T.exp() - rollout_T.exp()).abs()

    counts_N = sum_by_sample(valid_T.to(train_T.dtype), inputs.offsets_N1)
    present_N, lengths_N = counts_N > 0, counts_N.clamp(min=1)
    log_ratio_N = sum_by_sample(log_ratio_T, inputs.offsets_N1)
    # The logarithm of the perplexity is minus the mean log-probability.
    train_N = -sum_by_sample(train_T, inputs.offsets_N1) / lengths_N
    rollout_N = -sum_by_sample(rollout_T, inputs.offsets_N1) / lengths_N
    apart_N = -log_ratio_N / lengths_N
    samples = present_N.count_nonzero()

    by_token = {
        "kl": -log_ratio_T.sum(),
        "k3_kl": divergences(log_ratio_T, "k3").sum(),
        "chi2_token": _chi2(log_ratio_T).sum(),
        "prob_diff_mean": gap_T.sum(),
    }
    by_sample = {
        "training_ppl": train_N.clamp(max=LOG_RATIO_BOUND).exp(),
        "rollout_ppl": rollout_N.clamp(max=LOG_RATIO_BOUND).exp(),
        "training_log_ppl": train_N,
        "rollout_log_ppl": rollout_N,
        "log_ppl_diff": apart_N,
        "log_ppl_abs_diff": apart_N.abs(),
        "chi2_seq": _chi2(log_ratio_N),
    }
    metrics: dict[str, Metric] = {
        **{name: Mean(_figure(sum_), _figure(tokens)) for name, sum_ in by_token.items()},
        **{name: mean_metric(each_N, present_N, samples) for name, each_N in by_sample.items()},
        "prob_diff_max": max_metric(gap_T, valid_T),
        "non_finite": Sum(_figure(inputs.mask_T.count_nonzero() - tokens)),
    }
    return {PREFIX + name: metric for name, metric in metrics.items()}


def weight_metrics(
    ratio_T: Float[Tensor, "T"],
    weights_T: Float[Tensor, "T"],
    keep_T: Bool[Tensor, "T"],
    *,
    lower: float | None,
    upper: float | None,
) -> dict[str, Metric]:
    """Return metrics of the importance weights, over the tokens that keep their loss.

    `weight_mean`, `weight_std`, `weight_min` and `weight_max` are of the applied weights. `weight_ess` is
    their effective sample size divided by their number n, (Σ w)² / (n · Σ w²). `ratio_min` and `ratio_max` are of the ratios before
    any bound. `out_of_bounds_high` and `out_of_bounds_low` are the shares of ratios beyond a bound.

    Args:
        ratio_T: float32 [T], before bounds.
        weights_T: float32 [T], as applied.
        keep_T: bool [T], True on the masked-in tokens that keep their loss.
        lower: the lower bound; None for 1 / upper, or for no bound if `upper` is None too.
        upper: the upper bound; None for no bound.
    """
    valid_T = keep_T & ratio_T.isfinite()
    tokens = valid_T.count_nonzero()
    chosen_T = weights_T.detach().where(valid_T, 0)
    total = chosen_T.sum()
    mean = total / tokens.clamp(min=1)
    deviations_T = (chosen_T - mean).where(valid_T, 0)
    metrics: dict[str, Metric] = {
        "weight_mean": Mean(_figure(total), _figure(tokens)),
        "weight_std": Std(_figure(tokens), _figure(mean), _figure(deviations_T.square().sum())),
        "weight_min": _min_metric(chosen_T, valid_T),
        "weight_max": max_metric(chosen_T, valid_T),
        "weight_ess": EffectiveShare(
            _figure(total), _figure(chosen_T.square().sum()), _figure(tokens)
        ),
        "ratio_min": _min_metric(ratio_T, valid_T),
        "ratio_max": max_metric(ratio_T, valid_T),
    }
    if upper is not None:
        metrics["out_of_bounds_high"] = mean_metric(ratio_T > upper, valid_T, tokens)
    lowest = lower if lower is not None else None if upper is None else 1 / upper
    if lowest is not None:
        metrics["out_of_bounds_low"] = mean_metric(ratio_T < lowest, valid_T, tokens)
    return {PREFIX + name: metric for name, metric in metrics.items()}


def rejection_metrics(
    inputs: CorrectionInputs, kept: Mapping[str, Bool[Tensor, "T"]], keep_T: Bool[Tensor, "T"]
) -> dict[str, Metric]:
    """Return the shares of tokens and of samples that were rejected, and for each criterion the share of tokens that it rejects.

    `masked_token` is the share of masked-in tokens that lose their loss. `masked_seq` is the share of samples that lose
    a token. `masked_token/<criterion>` is the share of tokens that this criterion rejects, whatever other criteria do.

    Args:
        inputs: the samples' log-probabilities.
        kept: for each criterion's name, bool [T]: the masked-in tokens that meet the criterion.
        keep_T: bool [T], the masked-in tokens that meet all criteria.
    """
    mask_T = inputs.mask_T
    tokens = mask_T.count_nonzero()
    present_N, losing_N = (
        sum_by_sample(chosen_T.float(), inputs.offsets_N1) > 0
        for chosen_T in (mask_T, mask_T & ~keep_T)
    )
    metrics: dict[str, Metric] = {
        "masked_token": mean_metric(~keep_T, mask_T, tokens),
        "masked_seq": mean_metric(losing_N, present_N),
        **{
            f"masked_token/{name}": mean_metric(~kept_T, mask_T, tokens)
            for name, kept_T in kept.items()
        },
    }
    return {PREFIX + name: metric for name, metric in metrics.items()}


def _chi2(log_ratio_K: Float[Tensor, "K"]) -> Float[Tensor, "K"]:
    return (2 * log_ratio_K.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).expm1()


def _min_metric(values_T: Float[Tensor, "T"], mask_T: Bool[Tensor, "T"]) -> Min:
    return Min(_figure(-cast("Any", max_metric(-values_T, mask_T).value)))


def _figure(value: Tensor) -> Any:
    """Return a metric's value as a tensor without gradient; `resolve_metrics` turns the tensor into a number later."""
    return value.detach()
