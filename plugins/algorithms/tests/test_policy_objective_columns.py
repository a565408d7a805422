"""The columns that a policy loss gets besides log-probabilities, and the rollout correction within an update."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import (
    Correction,
    LocalReduction,
    PluginContext,
    PolicyLoss,
    RolloutCorrection,
    TokenLosses,
)
from dovetail.metrics import values
from dovetail.plugins import objective_spec
from dovetail.sections import PluginSection
from dovetail_algorithms.config.objectives import PolicyConfig
from dovetail_algorithms.objectives.policy import PolicyObjective
from dovetail_sdk.testing import update_of
from dovetail_stages import build_objective, mean_metric
from dovetail_stages.numerics.loss_aggregation import SeqMeanTokenMean, TokenMean

LENGTHS = [3, 0, 5, 1, 4]
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])


class Plain(PolicyLoss):
    """−A log π: reads no column of an older policy."""

    name = "plain"
    api = ">=1.0,<2"

    @classmethod
    def requires(cls, config):
        return frozenset({"advantages", "log_probs", "response_mask"})

    def token_losses(self, inputs):
        return TokenLosses(losses_T=-inputs.columns["advantages"] * inputs.log_probs_T)


class Ratio(PolicyLoss):
    """−A π / π_old."""

    name = "ratio"
    api = ">=1.0,<2"

    @classmethod
    def requires(cls, config):
        return frozenset({"advantages", "old_log_probs"})

    def token_losses(self, inputs):
        ratio_T = (inputs.log_probs_T - inputs.columns["old_log_probs"]).exp()
        return TokenLosses(losses_T=-inputs.columns["advantages"] * ratio_T)


class Anchored(PolicyLoss):
    """−A π / π_rollout."""

    name = "anchored"
    api = ">=1.0,<2"

    @classmethod
    def requires(cls, config):
        return frozenset({"advantages", "rollout_log_probs"})

    def token_losses(self, inputs):
        ratio_T = (inputs.log_probs_T - inputs.columns["rollout_log_probs"]).exp()
        return TokenLosses(losses_T=-inputs.columns["advantages"] * ratio_T)


class Curious(PolicyLoss):
    """−H · c, where `prepare` computes c: the old log-probabilities minus their mean over the mini-batch."""

    name = "curious"
    api = ">=1.0,<2"

    @classmethod
    def requires(cls, config):
        return frozenset({"entropies"})

    @classmethod
    def prepares(cls, config):
        return frozenset({"old_log_probs"})

    def prepare(self, mini_batch, reduction):
        old, mask = mini_batch["old_log_probs"], mini_batch["response_mask"].values
        total, count = reduction.sum(np.array([old.values[mask].sum(), mask.sum()], np.float64))
        centred = (old.values - total / count).astype(np.float32)
        return {"centred": old.with_values(centred)}

    def token_losses(self, inputs):
        assert inputs.columns.keys() == {"entropies", "centred"}
        return TokenLosses(losses_T=-inputs.columns["entropies"] * inputs.columns["centred"])


class Truncated(RolloutCorrection):
    """A correction with the weight min(r, 2), which rejects tokens with r < ½."""

    name = "truncated"
    api = ">=1.0,<2"

    @classmethod
    def mode(cls, config):
        return config.attribute or "decoupled"

    def correct(self, inputs, reduction):
        assert not inputs.train_log_probs_T.requires_grad
        ratio_T = (inputs.train_log_probs_T - inputs.rollout_log_probs_T).exp()
        return Correction(
            weights_T=ratio_T.clamp(max=2),
            keep_T=ratio_T >= 0.5,
            metrics={"rollout_corr/ratio": mean_metric(ratio_T, inputs.mask_T)},
        )


class Bypass(Truncated):
    """The correction `Truncated` in bypass mode."""

    @classmethod
    def mode(cls, config):
        return "bypass"


SCALARS = {"kl_coef": 0.5, "entropy_coef": 0.1}


def objective(loss=Plain, aggregation=TokenMean, mode=None, **settings):
    class Made(PolicyObjective):
        @classmethod
        def parts(cls, config, context, needs=True):
            correction = None
            if mode is not None:
                correction = Truncated(Truncated.Config(attribute=mode), PluginContext())
            of = (loss, aggregation)
            return *(plugin(plugin.Config(), PluginContext()) for plugin in of), correction

    return Made(PolicyConfig(name="policy", **settings), PluginContext())


def mini_batch(seed=0):
    rng = np.random.default_rng(seed)
    column = lambda: Ragged(rng.normal(size=OFFSETS[-1]).astype(np.float32), OFFSETS)  # noqa: E731
    names = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "log_probs", "entropies")
    return Batch(
        {
            "sample_id": list("abcde"),
            "response_mask": Ragged(rng.random(OFFSETS[-1]) < 0.7, OFFSETS),
            "advantages": rng.normal(size=len(LENGTHS)).astype(np.float32),
            "rollout_is_weights": Ragged(
                rng.uniform(0, 2, OFFSETS[-1]).astype(np.float32), OFFSETS
            ),
            **{name: column() for name in names},
        }
    )


def run(goal, batch, parts=((0, 1, 2, 3, 4),)):
    """Return loss, gradients by log-probabilities and entropies, and metrics, with the samples cut into micro-batches."""
    outputs = {name: batch[name].values for name in ("log_probs", "entropies")}
    read = batch.select(sorted(goal.requires(goal.config)))
    found = update_of(goal, read, outputs, parts=parts, scalars=SCALARS)
    assert found.finite
    return found.loss, found.gradients, values(found.metrics)


def flat(batch, name):
    column = batch[name]
    return (column.values if isinstance(column, Ragged) else np.repeat(column, LENGTHS)).astype(
        float
    )


def test_a_loss_gets_the_current_entropies_with_gradient():
    goal, batch = objective(Curious), mini_batch()
    assert {output.name for output in goal.outputs(goal.config)} == {"log_probs", "entropies"}
    assert goal.requires(goal.config) == {"response_mask", "old_log_probs", "sample_id"}
    loss, grads, metrics = run(goal, batch)
    mask = batch["response_mask"].values
    centred = flat(batch, "old_log_probs") - flat(batch, "old_log_probs")[mask].mean()
    expected = np.where(mask, -centred / mask.sum(), 0)
    np.testing.assert_allclose(grads["entropies"], expected, atol=1e-6)
    assert math.isclose(loss, (expected * flat(batch, "entropies")).sum(), rel_tol=1e-4)
    # The entropy is only an input of the loss here; no entropy bonus is configured, which would log the metric.
    assert "actor/entropy" not in metrics


@pytest.mark.parametrize("parts", [((4, 2), (1, 0, 3)), tuple((i,) for i in range(5))])
@pytest.mark.parametrize("loss", [Curious, Plain, Ratio])
@pytest.mark.parametrize("mode", [None, "decoupled", "bypass"])
def test_nothing_depends_on_the_cut(loss, mode, parts):
    goal = objective(loss, SeqMeanTokenMean, mode, weighted=mode is None, entropy=True)
    whole, cut = run(goal, mini_batch()), run(goal, mini_batch(), parts)
    assert math.isclose(whole[0], cut[0], rel_tol=1e-5)
    for name, grad in whole[1].items():
        np.testing.assert_allclose(cut[1][name], grad, rtol=1e-5, atol=1e-7)
    assert whole[2].keys() == cut[2].keys()
    for name, value in whole[2].items():
        assert math.isclose(value, cut[2][name], rel_tol=1e-5), name


def test_a_loss_prepares_its_columns_over_the_whole_mini_batch_and_all_ranks():
    class Doubled:
        """A reduction over two ranks that hold the same samples."""

        def sum(self, values_):
            return values_ * 2

    goal, batch = objective(Curious), mini_batch()
    one, other = (goal.prepare(batch, reduction) for reduction in (LocalReduction(), Doubled()))
    np.testing.assert_allclose(
        one["prepared.centred"].values, other["prepared.centred"].values, atol=1e-6
    )
    # The prefix keeps prepared columns from replacing the batch's own columns.
    assert set(one.names) - set(batch.names) == {"prepared.centred"}


def test_a_prepared_column_must_be_ragged():
    class Wrong(Curious):
        def prepare(self, mini_batch, reduction):
            return {"centred": np.zeros(5)}

    with pytest.raises(ColumnError, match="'centred' from `prepare` as ndarray"):
        objective(Wrong).prepare(mini_batch(), LocalReduction())


def test_weights_made_before_the_update_multiply_the_policy_loss_alone():
    batch = mini_batch()
    goal = objective(weighted=True, kl="k2", entropy=True)
    assert {"rollout_is_weights", "ref_log_probs"} <= goal.requires(goal.config)
    _, grads, _ = run(goal, batch)
    mask = batch["response_mask"].values
    away = flat(batch, "log_probs") - flat(batch, "ref_log_probs")
    pg = -flat(batch, "advantages") * flat(batch, "rollout_is_weights")
    expected = np.where(mask, pg + 0.5 * away, 0) / mask.sum()
    np.testing.assert_allclose(grads["log_probs"], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(grads["entropies"], np.where(mask, -0.1, 0) / mask.sum(), rtol=1e-5)


@given(
    seed=st.integers(0, 1000),
    loss=st.sampled_from([Plain, Ratio, Anchored]),
    mode=st.sampled_from(["decoupled", "bypass", "disabled"]),
)
def test_the_correction_is_its_definition(seed, loss, mode):
    batch = mini_batch(seed)
    goal = objective(loss, mode=mode, kl="k2")
    _, grads, metrics = run(goal, batch)
    mask, log_probs = batch["response_mask"].values, flat(batch, "log_probs")
    ratio = np.exp(log_probs - flat(batch, "rollout_log_probs"))
    pg = -flat(batch, "advantages")
    if loss is Ratio:
        pg = pg * np.exp(log_probs - flat(batch, "old_log_probs"))
    if loss is Anchored:
        pg = pg * ratio
    elif mode == "decoupled" or (mode == "bypass" and loss is Plain):
        pg = pg * np.minimum(ratio, 2)
    if mode != "disabled":
        pg = np.where(ratio >= 0.5, pg, 0)
    expected = np.where(mask, pg + 0.5 * (log_probs - flat(batch, "ref_log_probs")), 0)
    # Rejected tokens still count in the denominator.
    count = max(mask.sum(), 1)
    np.testing.assert_allclose(grads["log_probs"], expected / count, rtol=1e-3, atol=1e-5)
    assert ("rollout_corr/ratio" in metrics) == (mode != "disabled" and mask.any())
    assert ("rollout_log_probs" in goal.requires(goal.config)) == (
        mode != "disabled" or loss is Anchored
    )


def test_the_correction_does_not_look_at_masked_tokens():
    batch = mini_batch()
    mask = batch["response_mask"].values
    rollout = batch["rollout_log_probs"]
    spoilt = batch.with_columns(
        {
            "rollout_log_probs": rollout.with_values(
                np.where(mask, rollout.values, -np.inf).astype("f4")
            )
        }
    )
    goal = objective(mode="decoupled")
    one, other = run(goal, batch), run(goal, spoilt)
    np.testing.assert_array_equal(one[1]["log_probs"], other[1]["log_probs"])
    assert one[2] == other[2]


def test_a_file_is_found_from_any_directory(monkeypatch, tmp_path):
    file = Path(__file__)
    monkeypatch.chdir(file.parent)
    loss = PluginSection(path=file.name, attribute="Plain")
    spec = objective_spec("policy", policy_loss=loss)
    monkeypatch.chdir(tmp_path)
    assert "advantages" in spec.requires
    assert build_objective(spec).config.policy_loss.path == str(file.resolve())


def test_it_is_all_built_from_files_too():
    spec = objective_spec(
        "policy",
        policy_loss=PluginSection(path=__file__, attribute="Plain"),
        correction=PluginSection(path=__file__, attribute="Bypass"),
    )
    goal = build_objective(spec)
    assert spec.requires == {"response_mask", "advantages", "rollout_log_probs"}
    direct = run(objective(mode="bypass"), mini_batch())
    built = run(goal, mini_batch())
    assert built[0] == direct[0]
    np.testing.assert_array_equal(built[1]["log_probs"], direct[1]["log_probs"])
