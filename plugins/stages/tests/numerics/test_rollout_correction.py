"""Rollout correction against plain loops: ratios, bounds, every rejection criterion, metrics, and how they merge."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError, ConfigError, NumericsError
from dovetail.interfaces import (
    Correction,
    CorrectionInputs,
    PluginContext,
    RolloutCorrection,
)
from dovetail.metrics import EffectiveShare, Std, merge_metrics, values
from dovetail.sections import PluginSection
from dovetail_sdk.testing.ranks import on_ranks
from dovetail_sdk.testing.shapes import checked
from dovetail_stages import (
    Criterion,
    bounded_weights,
    divergence_metrics,
    importance_ratios,
    kept_tokens,
    log_ratios,
    normalized_weights,
    rejection_metrics,
    resolve_metrics,
    weight_metrics,
)
from dovetail_stages.numerics.rollout_correction import CRITERIA, correct_batch


@pytest.fixture(scope="module", autouse=True)
def correction_shapes():
    with checked(Correction, CorrectionInputs):
        yield


# A token: log π_train, log π_rollout, and whether the policy produced the token. Tokens of tools may stand anywhere.
log_prob = st.floats(-40, 0, width=32)
token = st.tuples(log_prob, log_prob, st.booleans())
near = st.tuples(st.floats(-3, 0, width=32), st.floats(-0.5, 0.5, width=32), st.booleans()).map(
    lambda t: (t[0], min(t[0] + t[1], 0.0), t[2])
)
samples = st.lists(st.lists(near | token, max_size=6), max_size=5)


def pack(rows):
    flat = [entry for row in rows for entry in row]
    return CorrectionInputs(
        train_log_probs_T=torch.tensor([t for t, _, _ in flat], dtype=torch.float64),
        rollout_log_probs_T=torch.tensor([r for _, r, _ in flat], dtype=torch.float64),
        mask_T=torch.tensor([m for _, _, m in flat], dtype=torch.bool),
        offsets_N1=torch.tensor(np.cumsum([0, *(len(row) for row in rows)])),
    )


def kept_ratios(row):
    """Log r of the masked-in tokens."""
    return [train - rollout for train, rollout, counts in row if counts]


def flat(rows_of_values):
    return [value for row in rows_of_values for value in row]


def figures(*parts):
    return values(resolve_metrics(parts))


# -- weights ---------------------------------------------------------------------------------------


@given(samples)
def test_token_ratios(rows):
    inputs = pack(rows)
    got = importance_ratios(log_ratios(inputs), inputs.offsets_N1, "token")
    for ratio, (train, rollout, counts) in zip(got.tolist(), flat(rows), strict=True):
        expected = math.exp(min(max(train - rollout, -20), 20)) if counts else 1.0
        assert ratio == pytest.approx(expected, rel=1e-9)


@given(samples)
def test_sequence_ratios(rows):
    inputs = pack(rows)
    got = importance_ratios(log_ratios(inputs), inputs.offsets_N1, "sequence")
    expected = [[math.exp(min(max(sum(kept_ratios(row)), -20), 20))] * len(row) for row in rows]
    np.testing.assert_allclose(got.numpy(), flat(expected), rtol=1e-9)


@pytest.mark.parametrize("lower", [None, 0.5])
@pytest.mark.parametrize("upper", [None, 2.0])
def test_bounds_truncate_or_zero(lower, upper):
    ratios = [0.0, 0.1, 0.5, 0.7, 1.0, 2.0, 2.1, 9.0]
    low, high = -math.inf if lower is None else lower, math.inf if upper is None else upper
    ratio_T = torch.tensor(ratios, dtype=torch.float64)
    truncated = bounded_weights(ratio_T, lower=lower, upper=upper, outside="truncate")
    assert truncated.tolist() == [min(max(r, low), high) for r in ratios]
    zeroed = bounded_weights(ratio_T, lower=lower, upper=upper, outside="zero")
    assert zeroed.tolist() == [r if low <= r <= high else 0.0 for r in ratios]


@pytest.mark.parametrize("outside", ["truncate", "zero"])
@pytest.mark.parametrize("train", [math.nan, math.inf, -math.inf])
def test_a_ratio_that_is_not_finite_never_becomes_a_finite_weight(train, outside):
    inputs = pack([[(train, -1.0, True), (-1.0, -1.0, True)], [(train, -1.0, False)]])
    for level, bad in (("token", [True, False, False]), ("sequence", [True, True, False])):
        ratio_T = importance_ratios(log_ratios(inputs), inputs.offsets_N1, level)
        weights_T = bounded_weights(ratio_T, lower=0.5, upper=2.0, outside=outside)
        assert weights_T.isnan().tolist() == bad
    assert normalized_weights(weights_T, inputs.mask_T).isnan().all()


@given(samples)
def test_normalised_weights_have_mean_one(rows):
    inputs = pack(rows)
    weights_T = bounded_weights(importance_ratios(log_ratios(inputs), inputs.offsets_N1, "token"))
    got = normalized_weights(weights_T, inputs.mask_T)
    if inputs.mask_T.any():
        assert float(got[inputs.mask_T].mean()) == pytest.approx(1.0)
        ratio = got[inputs.mask_T] / weights_T[inputs.mask_T]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)


def test_weights_of_zero_stay_zero_when_normalised():
    none = torch.zeros(3)
    assert torch.equal(normalized_weights(none, torch.ones(3, dtype=torch.bool)), none)
    assert not len(normalized_weights(torch.zeros(0), torch.zeros(0, dtype=torch.bool)))


def test_normalisation_is_over_all_ranks():
    weights_T = torch.tensor([1.0, 3.0, 2.0, 0.5, 8.0])
    mask_T = torch.tensor([True, True, False, True, True])
    parts = [slice(0, 2), slice(2, 5)]
    got = on_ranks(
        2, lambda rank, r: normalized_weights(weights_T[parts[rank]], mask_T[parts[rank]], r)
    )
    torch.testing.assert_close(torch.cat(got), normalized_weights(weights_T, mask_T))


# -- rejection -------------------------------------------------------------------------------------


def divergence(log_ratio, kind):
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio**2
    bounded = min(max(log_ratio, -20), 20)
    return math.exp(bounded) - 1 - bounded


def kept(row, name, lower, upper):
    """Which tokens of one sample keep their loss, by a plain loop."""
    level, _, kind = name.rpartition("_")
    low, high = (math.log(lower), math.log(upper)) if kind == "k1" else (-math.inf, upper)
    each = [divergence(log_ratio, kind) for log_ratio in kept_ratios(row)]
    if level == "token":
        within = iter([low <= d <= high for d in each])
        return [counts and next(within) for _, _, counts in row]
    if level == "seq_max":
        whole = all(low <= d <= high for d in each)
    else:
        total = sum(each) / (len(each) or 1) if level == "seq_mean" else sum(each)
        whole = low <= total <= high
    return [counts and whole for _, _, counts in row]


@pytest.mark.parametrize("name", CRITERIA)
@given(rows=samples, tight=st.booleans())
def test_every_criterion_equals_its_definition(name, rows, tight):
    bounds = {"lower": 0.8, "upper": 1.2} if tight else {"lower": 0.5, "upper": 2.0}
    inputs = pack(rows)
    criterion = Criterion.named(
        name, upper=bounds["upper"], lower=bounds["lower"] if name.endswith("k1") else None
    )
    assert criterion.name == name
    got = kept_tokens(log_ratios(inputs), inputs.mask_T, inputs.offsets_N1, criterion)
    assert got.tolist() == flat(kept(row, name, **bounds) for row in rows)


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_passes_no_criterion(name, wrong):
    inputs = pack([[(-1.0, wrong, True), (-1.0, -1.0, True)], [(-1.0, -1.0, True)]])
    criterion = Criterion.named(name, upper=1e30)
    got = kept_tokens(log_ratios(inputs), inputs.mask_T, inputs.offsets_N1, criterion)
    assert got.tolist() == [False, name.startswith("token"), True]


def test_k1_bounds_are_ratios_of_the_rollout_to_the_training_policy():
    criterion = Criterion.named("token_k1", lower=0.5, upper=4.0)
    # k1 is −log r: if the training policy is three times as likely, the ratio π_rollout / π_train is 1/3, below 0.5.
    inputs = pack([[(math.log(0.3), math.log(0.1), True), (math.log(0.1), math.log(0.3), True)]])
    got = kept_tokens(log_ratios(inputs), inputs.mask_T, inputs.offsets_N1, criterion)
    assert got.tolist() == [False, True]


def test_without_a_lower_bound_k1_is_bounded_by_the_reciprocal():
    assert Criterion.named("token_k1", upper=2.0).bounds == pytest.approx(
        (math.log(0.5), math.log(2.0))
    )


def test_an_unknown_criterion_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="seq_mean_k1"):
        Criterion.named("sequence_mean_k1", upper=2.0)


# -- metrics ---------------------------------------------------------------------------------------


def test_divergence_metrics_equal_their_definitions():
    rng = np.random.default_rng(0)
    rows = [
        [(-rng.random() * 2, -rng.random() * 2, rng.random() < 0.7) for _ in range(length)]
        for length in (4, 0, 9, 1, 6)
    ]
    got = figures(divergence_metrics(pack(rows)))
    chosen = [[(t, r) for t, r, counts in row if counts] for row in rows]
    pairs, present = flat(chosen), [row for row in chosen if row]
    log_r = [t - r for t, r in pairs]
    train = [-np.mean([t for t, _ in row]) for row in present]
    rollout = [-np.mean([r for _, r in row]) for row in present]
    gaps = [abs(math.exp(t) - math.exp(r)) for t, r in pairs]
    expected = {
        "kl": -np.mean(log_r),
        "k3_kl": np.mean([math.exp(x) - 1 - x for x in log_r]),
        "chi2_token": np.mean([math.exp(x) ** 2 - 1 for x in log_r]),
        "chi2_seq": np.mean([math.exp(sum(t - r for t, r in row)) ** 2 - 1 for row in present]),
        "training_ppl": np.mean(np.exp(train)),
        "rollout_ppl": np.mean(np.exp(rollout)),
        "training_log_ppl": np.mean(train),
        "rollout_log_ppl": np.mean(rollout),
        "log_ppl_diff": np.mean(np.subtract(train, rollout)),
        "log_ppl_abs_diff": np.mean(np.abs(np.subtract(train, rollout))),
        "prob_diff_mean": np.mean(gaps),
        "prob_diff_max": max(gaps),
        "non_finite": 0,
    }
    assert got == pytest.approx({f"rollout_corr/{name}": x for name, x in expected.items()})


def test_weight_metrics_equal_their_definitions():
    ratios = np.array([0.2, 0.6, 1.0, 3.0, 2.5, 1.7, 9.0])
    keep = np.array([True, True, True, True, False, True, True])
    weights = np.minimum(ratios, 2.0) * keep
    got = figures(
        weight_metrics(
            torch.tensor(ratios), torch.tensor(weights), torch.tensor(keep), lower=None, upper=2.0
        )
    )
    w, r = weights[keep], ratios[keep]
    expected = {
        "weight_mean": w.mean(),
        "weight_std": w.std(ddof=1),
        "weight_min": w.min(),
        "weight_max": w.max(),
        "weight_ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
        "ratio_min": r.min(),
        "ratio_max": r.max(),
        "out_of_bounds_high": np.mean(r > 2.0),
        "out_of_bounds_low": np.mean(r < 0.5),
    }
    assert got == pytest.approx({f"rollout_corr/{name}": x for name, x in expected.items()})


def test_tokens_that_are_not_finite_are_counted_and_left_out():
    rows = [[(-1.0, -math.inf, True), (-1.0, -1.5, True)], [(math.nan, -1.0, True)]]
    got = figures(divergence_metrics(pack(rows)))
    assert got["rollout_corr/non_finite"] == 2
    assert got["rollout_corr/kl"] == pytest.approx(-0.5)
    assert got["rollout_corr/log_ppl_diff"] == pytest.approx(-0.5)
    assert all(map(math.isfinite, got.values()))


@settings(max_examples=30)
@given(samples, st.randoms(use_true_random=False))
def test_metrics_do_not_depend_on_the_split_or_the_order(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)

    def metrics(some):
        inputs = pack(some)
        log_ratio_T = log_ratios(inputs)
        keep_T = kept_tokens(
            log_ratio_T, inputs.mask_T, inputs.offsets_N1, Criterion.named("token_k1", upper=1.5)
        )
        ratio_T = importance_ratios(log_ratio_T, inputs.offsets_N1, "token")
        weights_T = bounded_weights(ratio_T).masked_fill(~keep_T, 0)
        return {
            **divergence_metrics(inputs),
            **weight_metrics(ratio_T, weights_T, keep_T, lower=None, upper=2.0),
            **rejection_metrics(inputs, {"token_k1": keep_T}, keep_T),
        }

    whole = figures(metrics(rows))
    parts = figures(*(metrics([rows[i]]) for i in order), metrics([]))
    assert parts == pytest.approx(whole, rel=1e-6, abs=1e-7)


@given(st.lists(st.lists(st.floats(-10, 1e6), max_size=5), min_size=1, max_size=4))
def test_standard_deviation_and_effective_share_merge(parts):
    def made(xs):
        x = np.array(xs)
        squares = float(np.square(x - x.mean()).sum()) if len(x) else 0.0
        return {
            "std": Std(len(x), float(x.mean()) if len(x) else 0.0, squares),
            "ess": EffectiveShare(float(x.sum()), float((x**2).sum()), len(x)),
        }

    merged, all_ = merge_metrics(made(xs) for xs in parts), np.array(flat(parts))
    if not len(all_):
        assert math.isnan(merged["std"].value)
        assert math.isnan(merged["ess"].value)
        return
    deviation = all_.std(ddof=1) if len(all_) > 1 else 0.0
    assert merged["std"].value == pytest.approx(deviation, rel=1e-6, abs=1e-6)
    if (all_**2).sum():
        share = all_.sum() ** 2 / (len(all_) * (all_**2).sum())
        assert merged["ess"].value == pytest.approx(share, rel=1e-6, abs=1e-9)


def test_extremes_of_nothing_are_no_figures():
    none = torch.zeros(2, dtype=torch.bool)
    got = figures(weight_metrics(torch.ones(2), torch.zeros(2), none, lower=None, upper=2.0))
    assert got == {}


# -- a whole batch ---------------------------------------------------------------------------------


class KeepLikely(RolloutCorrection):
    """Weights tokens by 2, and keeps tokens to which the training policy gives more than −2 nats."""

    name = "keep_likely"
    api = ">=1.0,<2"

    @classmethod
    def mode(cls, config):
        return "decoupled"

    def correct(self, inputs, reduction):
        return Correction(
            weights_T=torch.full_like(inputs.train_log_probs_T, 2.0),
            keep_T=inputs.train_log_probs_T > -2,
        )


def a_batch(**columns):
    mask = Ragged.from_list([[True, False, True], [], [True]], dtype=np.bool_)
    rows = {
        "sample_id": ["a", "b", "c"],
        "response_mask": mask,
        "old_log_probs": mask.with_values(np.array([-1, -9, -3, -1], np.float32)),
        "rollout_log_probs": mask.with_values(np.full(4, -1, np.float32)),
    }
    return Batch(rows | columns)


def correct(batch):
    correction = KeepLikely(PluginSection(), PluginContext())
    return correct_batch(correction, batch)[0]


def test_a_batch_gets_weights_and_a_narrower_mask():
    done = correct(a_batch())
    assert done["rollout_is_weights"].dtype == np.float32
    assert done["loss_mask"].to_list() == [[True, False, False], [], [True]]
    assert done["response_mask"].to_list() == [[True, False, True], [], [True]]


@pytest.mark.parametrize("column", ["old_log_probs", "rollout_log_probs"])
def test_numbers_that_are_not_finite_stop_a_batch_and_name_the_sample(column):
    batch = a_batch()
    broken = batch[column].values.copy()
    broken[[1, 3]] = np.nan, -np.inf
    with pytest.raises(NumericsError, match=column) as error:
        correct(batch.with_columns({column: batch[column].with_values(broken)}))
    assert error.value.sample_ids == ("c",)  # the first sample's NaN is masked out


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(ColumnError, match="rollout_log_probs"):
        correct(a_batch().drop(["rollout_log_probs"]))
    short = Ragged.from_list([[-1.0], [], [-1.0]], dtype=np.float32)
    with pytest.raises(ColumnError, match="line up"):
        correct(a_batch(rollout_log_probs=short))
