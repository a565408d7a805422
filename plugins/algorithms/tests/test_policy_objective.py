"""Objectives of a policy: the same loss, gradient and metrics however a mini-batch is cut."""

import math
import pickle

import numpy as np
import pytest
import torch

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError, ConfigError, NumericsError
from dovetail.interfaces import LocalReduction, PluginContext, PolicyLoss, TokenLosses
from dovetail.metrics import Last, Max, Mean, values
from dovetail.plugins import objective_spec
from dovetail.sections import PluginSection
from dovetail_algorithms.config.objectives import PolicyConfig
from dovetail_algorithms.objectives.policy import PolicyObjective
from dovetail_sdk.testing import spec_of, update_of
from dovetail_stages import (
    build_objective,
    max_metric,
    mean_metric,
    prepare_mini_batch,
    resolve_metrics,
)
from dovetail_stages.config import SeqMeanTokenSumNormConfig
from dovetail_stages.numerics.loss_aggregation import TokenMean, TokenSum


class Ratio(PolicyLoss):
    """−A · exp(log π − log π_old), a minimal loss that needs both columns."""

    name = "ratio"
    api = ">=1.0,<2"

    @classmethod
    def requires(cls, config):
        return frozenset({"advantages", "old_log_probs"})

    def token_losses(self, inputs):
        ratio_T = (inputs.log_probs_T - inputs.columns["old_log_probs"]).exp()
        metrics = {
            "actor/ratio_mean": mean_metric(ratio_T, inputs.mask_T),
            "actor/ratio_max": max_metric(ratio_T, inputs.mask_T),
        }
        return TokenLosses(losses_T=-inputs.columns["advantages"] * ratio_T, metrics=metrics)


LENGTHS = [3, 0, 5, 1, 4]


def objective(aggregation=TokenMean, config=None, **settings):
    class Made(PolicyObjective):
        @classmethod
        def parts(cls, config_, context, needs=True):
            made = aggregation(config or aggregation.Config(), PluginContext())
            return Ratio(Ratio.Config(), PluginContext()), made, None

    return Made(PolicyConfig(name="policy", **settings), PluginContext())


def prepared(goal, batch, reduction=None):
    return prepare_mini_batch(goal, spec_of(goal), batch, reduction or LocalReduction())


def mini_batch(seed=0):
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    tokens = offsets[-1]
    column = lambda: Ragged(rng.normal(size=tokens).astype(np.float32), offsets)  # noqa: E731
    return Batch(
        {
            "response_mask": Ragged(rng.random(tokens) < 0.7, offsets),
            "advantages": rng.normal(size=len(LENGTHS)).astype(np.float32),
            "old_log_probs": column(),
            "ref_log_probs": column(),
            "log_probs": column(),
            "entropies": column(),
        }
    )


def run(goal, batch, parts):
    """Return loss, gradient by the log-probabilities and metrics, with the samples cut into micro-batches."""
    outputs = {name: batch[name].values for name in ("log_probs", "entropies")}
    found = update_of(goal, batch, outputs, parts=parts, scalars=SCALARS)
    return found.loss, found.gradients["log_probs"], values(found.metrics)


SETTINGS = {"kl": "k3", "entropy": True}
SCALARS = {"kl_coef": 0.5, "entropy_coef": 0.1}


def test_the_loss_is_its_definition():
    batch = mini_batch()
    loss, grad, metrics = run(objective(**SETTINGS), batch, [range(5)])
    mask = batch["response_mask"].values
    get = lambda name: batch[name].values.astype(np.float64)[mask]  # noqa: E731
    advantages = np.repeat(batch["advantages"], LENGTHS)[mask].astype(np.float64)
    ratio = np.exp(get("log_probs") - get("old_log_probs"))
    d = get("log_probs") - get("ref_log_probs")
    pg, kl = np.mean(-advantages * ratio), np.mean(np.exp(-d) + d - 1)
    entropy = get("entropies").mean()
    assert math.isclose(loss, pg + 0.5 * kl - 0.1 * entropy, rel_tol=1e-5)
    expected = (-advantages * ratio + 0.5 * (1 - np.exp(-d))) / mask.sum()
    np.testing.assert_allclose(grad[mask], expected, rtol=1e-4, atol=1e-7)
    assert np.all(grad[~mask] == 0)
    for name, value in {
        "actor/loss": loss,
        "actor/pg_loss": pg,
        "actor/kl": kl,
        "actor/kl_loss": kl,
        "actor/entropy": entropy,
        "actor/ratio_mean": ratio.mean(),
        "actor/ratio_max": ratio.max(),
    }.items():
        assert math.isclose(metrics[name], value, rel_tol=1e-5), name


def test_old_log_probs_from_current_need_no_column_and_make_every_ratio_1():
    goal = objective(old_log_probs_from_current=True)
    assert "old_log_probs" not in goal.requires(goal.config)
    _, grad, metrics = run(goal, mini_batch().drop(["old_log_probs"]), [range(5)])
    assert metrics["actor/ratio_mean"] == metrics["actor/ratio_max"] == 1.0
    assert np.abs(grad).max() > 0


def test_a_mini_batch_without_a_single_token_has_loss_0():
    batch = mini_batch()
    empty = batch.with_columns(
        {"response_mask": batch["response_mask"].with_values(np.zeros(13, bool))}
    )
    loss, grad, metrics = run(objective(**SETTINGS), empty, [range(5)])
    assert loss == 0
    assert np.all(grad == 0)
    assert "actor/kl" not in metrics


def test_two_ranks_weigh_their_metrics_by_their_samples():
    batch = mini_batch()
    goal = objective()
    whole = goal.denominators(batch, LocalReduction())

    class Sum:
        def __init__(self, other):
            self.other = other

        def sum(self, values_):
            return values_ + self.other

    first, second = batch.slice(0, 2), batch.slice(2, 5)
    other = goal.denominators(second, LocalReduction())
    assert goal.denominators(first, Sum(np.array([other["loss"], other["samples"]]))) == whole
    constant = objective(TokenSum)
    assert constant.denominators(first, Sum(np.array([1.0, 3.0]))) == {"loss": 1.0, "samples": 5.0}


def test_a_missing_column_is_named_with_who_needs_it():
    with pytest.raises(ColumnError, match="ref_log_probs"):
        prepared(objective(**SETTINGS), mini_batch().drop(["ref_log_probs"]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_column_that_is_not_finite_names_its_samples(value):
    batch = mini_batch().with_columns({"sample_id": list("abcde")})
    old = batch["old_log_probs"]
    mask = batch["response_mask"].values
    row = old.row_index[np.flatnonzero(mask)[-1]]
    values_ = old.values.copy()
    values_[np.flatnonzero(mask)[-1]] = value
    poisoned = batch.with_columns({"old_log_probs": old.with_values(values_)})
    with pytest.raises(NumericsError, match=r"'old_log_probs' is.*in sample") as caught:
        prepared(objective(), poisoned)
    assert caught.value.sample_ids == ("abcde"[row],)
    advantages = np.array([value, 0, 0, 0, value], np.float32)
    poisoned = poisoned.with_columns({"advantages": advantages})
    with pytest.raises(NumericsError, match="'advantages', 'old_log_probs' are not finite"):
        prepared(objective(), poisoned)


def test_ranks_stop_together():
    class Both:
        def sum(self, values_):
            return values_ + 1

    with pytest.raises(NumericsError, match="another rank's part") as caught:
        prepared(objective(), mini_batch(), Both())
    assert caught.value.sample_ids == ()


def test_a_column_that_does_not_line_up_is_refused():
    batch = mini_batch()
    batch = batch.with_columns({"advantages": Ragged.from_list([[1.0]] * 5)})
    with pytest.raises(ColumnError, match=r"'advantages' does.*with response_mask"):
        run(objective(), batch, [range(5)])


def test_read_only_arrays_from_another_process_are_fine():
    batch = mini_batch()
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    received = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert (
        run(objective(**SETTINGS), received, [range(5)])[0]
        == run(objective(**SETTINGS), batch, [range(5)])[0]
    )


def test_metrics_are_fetched_and_merged_whatever_holds_tensors():
    parts = [
        {
            "a": Mean(torch.tensor(2.0), torch.tensor(2)),
            "b": Max(torch.tensor(1.0)),
            "c": Last(7.0),
        },
        {
            "a": Mean(torch.tensor(4.0), torch.tensor(1)),
            "b": Max(torch.tensor(3.0)),
            "c": Last(8.0),
        },
    ]
    assert resolve_metrics(parts) == {"a": Mean(6.0, 3.0), "b": Max(3.0), "c": Last(8.0)}


def test_a_scalar_changes_without_building_the_objective_again():
    def spec(coef):
        aggregation = SeqMeanTokenSumNormConfig(name="seq_mean_token_sum_norm", length=4)
        return objective_spec(
            "policy",
            scalars={"kl_coef": coef},
            policy_loss=PluginSection(name="reinforce"),
            loss_aggregation=aggregation,
            kl="k2",
        )

    one, other = spec(0.1), spec(0.2)
    assert build_objective(one) is build_objective(other)
    assert build_objective(one, seed=1) is not build_objective(other)
    assert one.requires == {"response_mask", "advantages", "ref_log_probs"}
    assert one.scalars == {"kl_coef": 0.1, "entropy_coef": 0.0}
    denominators = build_objective(one).denominators(mini_batch(), LocalReduction())
    assert denominators["loss"] % 4 == 0


def test_an_unknown_scalar_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'kl_coeff' is.*objective 'policy'") as it:
        objective_spec("policy", scalars={"kl_coeff": 0.1})
    assert "'kl_coef'" in it.value.hint
