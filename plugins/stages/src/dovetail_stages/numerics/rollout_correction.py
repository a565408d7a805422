"""Rollout correction: importance weights and rejection from r = π_train / π_rollout, over packed tokens.

Samples of another policy are weighted by r, or left out if r is far from 1. No function passes a gradient: the weights are constants
in the loss. log r is clamped to ±20 before exp. Masked tokens have no
influence, whatever they hold. A masked-in token whose log r is not finite gets the weight NaN, which stops the
update, and passes no criterion. Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import attrs
import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError, ConfigError, nearest
from dovetail.interfaces import CorrectionInputs, LocalReduction, Reduction, RolloutCorrection
from dovetail.metrics import Metric
from dovetail_stages.numerics.deferred import resolve_metrics
from dovetail_stages.numerics.finite import require_finite
from dovetail_stages.numerics.loss_aggregation import sum_by_sample
from dovetail_stages.numerics.plugin_results import check_correction

LOG_RATIO_BOUND = 20.0
"""Bound on |log r| before exp."""

Level = Literal["token", "seq_sum", "seq_mean", "seq_max"]
Divergence = Literal["k1", "k2", "k3"]

CRITERIA: tuple[str, ...] = tuple(
    f"{level}_{divergence}"
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for divergence in ("k1", "k2", "k3")
)
"""Names of the rejection criteria, such as `seq_mean_k3`: the level, then the divergence."""


@attrs.frozen(kw_only=True)
class Criterion:
    """A condition that a token must meet to keep its loss.

    With the importance ratio r = π_train / π_rollout, the divergence of a token is k1 = −log r, k2 = ½ (log r)² or
    k3 = r − 1 − log r. The level `token` judges each token alone. The other levels judge a sample by its masked-in tokens' sum
    (`seq_sum`), mean (`seq_mean`) or worst divergence (`seq_max`), and reject the whole sample.
    """

    level: Level
    divergence: Divergence
    upper: float
    """Largest divergence that is kept. For k1 instead the largest 1 / r = π_rollout / π_train: log(lower) ≤ k1 ≤ log(upper) is required."""
    lower: float | None = None
    """Smallest 1 / r that is kept, for k1 only; None stands for 1 / upper."""

    @classmethod
    def named(cls, name: str, *, upper: float, lower: float | None = None) -> Criterion:
        """Return the criterion of a name in `CRITERIA`.

        Raises:
            ConfigError: `CRITERIA` has no such name.
        """
        if name not in CRITERIA:
            close = nearest(name, CRITERIA)
            raise ConfigError(
                f"there is no rejection criterion {name!r}; expected one of {', '.join(CRITERIA)}",
                hint=f"did you mean {close!r}?" if close else None,
            )
        level, _, divergence = name.rpartition("_")
        return cls(
            level=cast("Level", level),
            divergence=cast("Divergence", divergence),
            upper=upper,
            lower=lower,
        )

    @property
    def name(self) -> str:
        """The criterion's name in `CRITERIA`."""
        return f"{self.level}_{self.divergence}"

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and largest divergence that is kept: log(lower) and log(upper) for k1, −∞ and `upper` for k2 and k3."""
        if self.divergence != "k1":
            return -math.inf, self.upper
        lower = 1 / self.upper if self.lower is None else self.lower
        return math.log(lower), math.log(self.upper)


def log_ratios(inputs: CorrectionInputs) -> Float[Tensor, "T"]:
    """Return the log-ratio log π_train − log π_rollout, float32 [T] without gradient; 0 where masked, NaN where not finite."""
    difference_T = (inputs.train_log_probs_T - inputs.rollout_log_probs_T).detach()
    difference_T = difference_T.where(difference_T.isfinite(), torch.nan)
    return difference_T.where(inputs.mask_T, 0)


def over_tokens(
    values_N: Shaped[Tensor, "N"], offsets_N1: Int64[Tensor, "N1"], tokens: int
) -> Shaped[Tensor, "T"]:
    """Return each sample's value repeated over its tokens, [T]; `tokens` is T."""
    return values_N.repeat_interleave(offsets_N1.diff(), output_size=tokens)


def importance_ratios(
    log_ratio_T: Float[Tensor, "T"],
    offsets_N1: Int64[Tensor, "N1"],
    level: Literal["token", "sequence"],
) -> Float[Tensor, "T"]:
    """Return each token's importance ratio, before any bound.

    Args:
        log_ratio_T: float32 [T], as `log_ratios` gives it.
        offsets_N1: int64 [N + 1], where each sample begins.
        level: `token`: exp(log r_t); `sequence`: exp(Σ log r) over the sample, for all of its tokens.

    Returns:
        float32 [T], from e⁻²⁰ to e²⁰; NaN where log r is NaN.
    """
    if level == "sequence":
        sums_N = sum_by_sample(log_ratio_T, offsets_N1)
        log_ratio_T = over_tokens(sums_N, offsets_N1, log_ratio_T.shape[0])
    return log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def bounded_weights(
    ratio_T: Float[Tensor, "T"],
    *,
    lower: float | None = None,
    upper: float | None = 2.0,
    outside: Literal["truncate", "zero"] = "truncate",
) -> Float[Tensor, "T"]:
    """Return importance weights: the ratios, changed where they are beyond a bound.

    Args:
        ratio_T: float32 [T].
        lower: smallest ratio that stays unchanged; None for no bound.
        upper: largest ratio that stays unchanged; None for no bound.
        outside: the change: `truncate` replaces a ratio beyond a bound by the bound (truncated importance
            sampling), `zero` by 0 (IcePop, arXiv 2510.18855).

    Returns:
        float32 [T]; NaN stays NaN.
    """
    if outside == "truncate":
        return ratio_T if lower is None and upper is None else ratio_T.clamp(min=lower, max=upper)
    beyond_T = torch.zeros_like(ratio_T, dtype=torch.bool)
    if lower is not None:
        beyond_T |= ratio_T < lower
    if upper is not None:
        beyond_T |= ratio_T > upper
    return ratio_T.masked_fill(beyond_T, 0)


def normalized_weights(
    weights_T: Float[Tensor, "T"], mask_T: Bool[Tensor, "T"], reduction: Reduction | None = None
) -> Float[Tensor, "T"]:
    """Return weights scaled to a mean of 1 over the masked-in tokens of all ranks.

    Args:
        weights_T: float32 [T].
        mask_T: bool [T].
        reduction: the sum over the ranks that share the batch; by default this rank alone.

    Returns:
        float32 [T]; unchanged if all are 0.
    """
    total = weights_T.where(mask_T, 0).sum(dtype=torch.float64)
    own = np.array([total.item(), mask_T.sum().item()], np.float64)
    total_weight, tokens = (reduction or LocalReduction()).sum(own).tolist()
    return weights_T * (tokens / total_weight) if total_weight else weights_T


def divergences(log_ratio_T: Float[Tensor, "T"], divergence: Divergence) -> Float[Tensor, "T"]:
    """Return each token's k1 = −log r, k2 = ½ (log r)² or k3 = r − 1 − log r, float32 [T]; r = π_train / π_rollout, log r clamped to ±20."""
    if divergence == "k1":
        return -log_ratio_T
    if divergence == "k2":
        return 0.5 * log_ratio_T.square()
    bounded_T = log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return bounded_T.expm1() - bounded_T


def kept_tokens(
    log_ratio_T: Float[Tensor, "T"],
    mask_T: Bool[Tensor, "T"],
    offsets_N1: Int64[Tensor, "N1"],
    criterion: Criterion,
) -> Bool[Tensor, "T"]:
    """Return which masked-in tokens meet a criterion.

    Args:
        log_ratio_T: float32 [T], as `log_ratios` gives it.
        mask_T: bool [T], True on tokens that the policy produced.
        offsets_N1: int64 [N + 1], where each sample begins.
        criterion: the criterion.

    Returns:
        bool [T]; False on masked tokens and where log r is NaN. At the `seq_` levels one NaN rejects the whole sample.
    """
    tokens = log_ratio_T.shape[0]
    lowest, highest = criterion.bounds
    values_T = divergences(log_ratio_T, criterion.divergence).where(mask_T, 0)
    if criterion.level == "token":
        return mask_T & (values_T >= lowest) & (values_T <= highest)
    if criterion.level == "seq_max":
        # One token beyond either bound rejects the sample.
        within_T = (values_T >= lowest) & (values_T <= highest)
        outliers_N = sum_by_sample((mask_T & ~within_T).to(values_T.dtype), offsets_N1)
        return mask_T & over_tokens(outliers_N == 0, offsets_N1, tokens)
    values_N = sum_by_sample(values_T, offsets_N1)
    if criterion.level == "seq_mean":
        values_N = values_N / sum_by_sample(mask_T.to(values_T.dtype), offsets_N1).clamp(min=1)
    within_N = (values_N >= lowest) & (values_N <= highest)
    return mask_T & over_tokens(within_N, offsets_N1, tokens)


def correct_batch(correction: RolloutCorrection, batch: Batch) -> tuple[Batch, dict[str, Metric]]:
    """Correct a whole batch before its first update, from the ratio of `old_log_probs` to `rollout_log_probs`.

    Args:
        correction: the rollout correction.
        batch: a batch with `old_log_probs`, `rollout_log_probs` and `response_mask`; an existing `loss_mask` is used in
            place of `response_mask`, so that tokens without a loss enter no ratio.

    Returns:
        The batch and the metrics as numbers. The batch has `rollout_is_weights` (float32) if the correction weights
        tokens, and `loss_mask` (bool) if it can reject tokens.

    Raises:
        ColumnError: a column is missing, or does not line up with `response_mask`.
        NumericsError: a masked-in log-probability is NaN or infinite; carries the samples' ids.
        PluginBrokenError: the correction did not return a valid Correction over these tokens.
    """
    who = f"the rollout correction {type(correction).name!r}"
    batch.require(("old_log_probs", "rollout_log_probs", "response_mask"), who)
    mask = cast("Ragged", batch["loss_mask" if "loss_mask" in batch else "response_mask"])
    reduction = LocalReduction()
    masked = batch.with_columns({"response_mask": mask})
    require_finite(masked, ("old_log_probs", "rollout_log_probs"), reduction, who)
    mask_T = torch.from_numpy(mask.values.copy())
    inputs = CorrectionInputs(
        train_log_probs_T=_log_probs(batch, "old_log_probs", mask),
        rollout_log_probs_T=_log_probs(batch, "rollout_log_probs", mask),
        mask_T=mask_T,
        offsets_N1=torch.from_numpy(mask.offsets.copy()),
    )
    done = correction.correct(inputs, reduction)
    check_correction(done, inputs.train_log_probs_T, correction)
    columns: dict[str, Ragged] = {}
    if done.weights_T is not None:
        columns["rollout_is_weights"] = mask.with_values(done.weights_T.float().numpy())
    if done.keep_T is not None or "loss_mask" in correction.provides(correction.config):
        keep_T = mask_T if done.keep_T is None else done.keep_T & mask_T
        columns["loss_mask"] = mask.with_values(keep_T.numpy())
    return batch.with_columns(columns), resolve_metrics([done.metrics])


def _log_probs(batch: Batch, name: str, mask: Ragged) -> Float[Tensor, "T"]:
    """Return a copy of a column, float32 [T]: arrays from other processes are read-only, and torch has no read-only tensors."""
    column = cast("Ragged", batch[name])
    if not np.array_equal(column.offsets, mask.offsets):
        raise ColumnError(
            f"column {name!r} does not line up with response_mask: it has {len(column.values)} values over "
            f"{len(column)} samples; the mask has {len(mask.values)} values",
            hint="give one value for each response token",
        )
    return torch.from_numpy(column.values.astype(np.float32))
