"""NaN and infinity: found before any weight changes, and traced to the samples that caused them."""

import numpy as np
import pytest
import torch
from trained_engines import parameters_of

from dovetail.errors import NumericsError
from dovetail.interfaces import PolicyLoss, TokenLosses
from dovetail.plugins import objective_spec
from dovetail.sections import PluginSection


def assert_untouched(engine, before, steps):
    assert engine._optimizer.steps == steps
    torch.testing.assert_close(parameters_of(engine), before, rtol=0, atol=0, equal_nan=True)
    assert all(p.grad is None for p in engine._runner.model.parameters())


def spoilt(batch, name, row, value, *, inside):
    """NaN, or what else, in one token of one sample: one with mask 1, or one with mask 0."""
    column, mask = batch[name], batch["response_mask"]
    values = column.values.copy()
    start = mask.offsets[row]
    token = start + np.flatnonzero(mask[row] == inside)[0]
    values[token] = value
    return batch.with_columns({name: column.with_values(values)})


def row_with_both(batch):
    """A sample that has tokens inside and outside the mask."""
    return next(i for i, mask in enumerate(batch["response_mask"]) if mask.any() and not mask.all())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["old_log_probs", "ref_log_probs"])
def test_a_column_is_looked_at_before_anything_is_computed(
    tiny, make_engine, batch, objective, new_objective, name, value
):
    engine = make_engine(tiny, budget=33)
    goal = new_objective(kl="k3", scalars={"kl_coef": 0.1})
    engine.update(batch, goal)
    before, row = parameters_of(engine), row_with_both(batch)
    with pytest.raises(NumericsError, match=f"'{name}' .* s{row}") as caught:
        engine.update(spoilt(batch, name, row, value, inside=True), goal)
    assert caught.value.sample_ids == (f"s{row}",)
    assert_untouched(engine, before, 1)


@pytest.mark.parametrize("name", ["old_log_probs", "ref_log_probs"])
def test_what_the_mask_leaves_out_does_not_matter(
    tiny, make_engine, gradients, batch, objective, new_objective, name
):
    goal = new_objective(kl="k3", scalars={"kl_coef": 0.1})
    engine = make_engine(tiny)
    clean, _ = gradients(engine, batch, goal)
    other = spoilt(batch, name, row_with_both(batch), np.nan, inside=False)
    dirty, _ = gradients(engine, other, goal)
    assert all(torch.equal(grad, dirty[name]) for name, grad in clean.items())


def test_a_loss_that_overflows_is_traced_to_its_samples(tiny, make_engine, batch, objective):
    engine = make_engine(tiny, budget=33)
    engine.update(batch, objective)
    before, row = parameters_of(engine), row_with_both(batch)
    advantages = batch["advantages"].copy()
    advantages[row] = -3e38
    huge = batch.with_columns({"advantages": advantages})
    goal = with_loss("Square")
    with pytest.raises(NumericsError, match=f"sample s{row}") as caught:
        engine.update(huge, goal)
    assert caught.value.sample_ids == (f"s{row}",)
    assert_untouched(engine, before, 1)


def test_a_nan_without_a_gradient_is_caught(tiny, make_engine, batch, objective):
    """Some of the model's outputs are NaN, in tokens that the loss leaves out."""
    engine = make_engine(tiny, budget=33)
    goal = with_loss("Blind")
    engine.update(batch, goal)
    row = row_with_both(batch)
    token = int(batch["response_ids"][row][0])
    embedding = engine._runner.model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[token, 0] = torch.nan
    before = parameters_of(engine)
    with pytest.raises(NumericsError, match=r"loss .* step 1\b.* output") as caught:
        engine.update(batch, goal)
    assert f"s{row}" in caught.value.sample_ids
    assert_untouched(engine, before, 1)


def test_a_gradient_that_is_not_finite_is_no_step(tiny, make_engine, batch, objective):
    engine = make_engine(tiny)
    goal = with_loss("Root")
    engine.update(batch, objective)
    before = parameters_of(engine)
    with pytest.raises(NumericsError, match=r"gradient norm .* step 1 is (nan|inf)") as it:
        engine.update(batch, goal)
    assert it.value.sample_ids == ()
    assert_untouched(engine, before, 1)


def test_a_critics_returns_are_looked_at_too(tiny, make_engine, batch):
    engine = make_engine(tiny, head="value")
    values = batch["response_mask"].with_values(
        np.zeros(len(batch["response_mask"].values), np.float32)
    )
    row = row_with_both(batch)
    returns = np.zeros(len(batch), np.float32)
    returns[row] = np.inf
    goal = objective_spec("value")
    with pytest.raises(NumericsError, match=f"'returns' .* s{row}"):
        engine.update(batch.with_columns({"values": values, "returns": returns}), goal)


def test_samples_without_a_name_go_by_their_place(tiny, make_engine, batch, objective):
    advantages = np.full(len(batch), np.nan, np.float32)
    poisoned = batch.drop(["sample_id"]).with_columns({"advantages": advantages})
    with pytest.raises(NumericsError, match=r"row \d, row \d(.*) and \d more") as caught:
        make_engine(tiny).update(poisoned, objective)
    filled = [i for i, mask in enumerate(batch["response_mask"]) if mask.any()]
    assert caught.value.sample_ids == tuple(f"row {i}" for i in filled)


def with_loss(attribute):
    loss = PluginSection(path=__file__, attribute=attribute)
    return objective_spec("policy", policy_loss=loss, old_log_probs_from_current=True)


class Square(PolicyLoss):
    """−A max((log π − log π_old)², 10³): overflows where A is large."""

    name = "square"
    api = ">=1.0,<2"

    @classmethod
    def requires(cls, config):
        return frozenset({"advantages", "old_log_probs"})

    def token_losses(self, inputs):
        away_T = inputs.log_probs_T - inputs.columns["old_log_probs"]
        return TokenLosses(losses_T=-inputs.columns["advantages"] * away_T.square().clamp(min=1e3))


class Blind(PolicyLoss):
    """Has no loss where log π is NaN."""

    name = "blind"
    api = ">=1.0,<2"

    def token_losses(self, inputs):
        return TokenLosses(losses_T=inputs.log_probs_T.detach().nan_to_num(0) * 0)


class Root(PolicyLoss):
    """√(log π − sg(log π)): 0, with an infinite gradient."""

    name = "root"
    api = ">=1.0,<2"

    def token_losses(self, inputs):
        log_probs_T = inputs.log_probs_T
        return TokenLosses(losses_T=(log_probs_T - log_probs_T.detach()).sqrt())
