"""What an episode was shown, tokens with mask 0, takes no part in the update: exactly, under every policy loss and aggregation."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import PluginContext
from dovetail.metrics import values
from dovetail.plugins.index import default_index
from dovetail.sections import PluginSection
from dovetail_algorithms.config.objectives import PolicyConfig
from dovetail_algorithms.objectives.policy import PolicyObjective
from dovetail_sdk.testing import update_of

LOSSES = sorted({entry.name for entry in default_index().entries("policy_loss")})
AGGREGATIONS = sorted({entry.name for entry in default_index().entries("loss_aggregation")})
SCALARS = {"kl_coef": 0.5, "entropy_coef": 0.1}

turns = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3)
"""Tokens that the policy produced in each turn of an episode, and those that it was shown after it."""


def policy(loss, aggregation):
    config = PolicyConfig(
        name="policy",
        policy_loss=PluginSection(name=loss),
        loss_aggregation=PluginSection(name=aggregation),
        kl="k3",
        entropy=True,
        weighted=True,
    )
    return PolicyObjective(config, PluginContext(seed=3))


def episodes(goal, lengths, seed):
    """A mini-batch of episodes with every token's column that the objective reads, and the model's outputs."""
    rng = np.random.default_rng(seed)
    rows = [np.concatenate([np.repeat([True, False], pair) for pair in row]) for row in lengths]
    mask = Ragged.from_list(rows, dtype=np.bool_)
    tokens = len(mask.values)
    columns = goal.requires(goal.config) - {"response_mask", "sample_id"}
    drawn = {name: rng.normal(size=tokens).astype(np.float32) for name in sorted(columns)}
    drawn["rollout_is_weights"] = np.abs(drawn["rollout_is_weights"])
    outputs = {
        "log_probs": -rng.exponential(size=tokens).astype(np.float32),
        "entropies": rng.exponential(size=tokens).astype(np.float32),
    }
    names = [f"s{row}" for row in range(len(rows))]
    columns = {name: mask.with_values(column) for name, column in drawn.items()}
    return Batch({"sample_id": names, "response_mask": mask, **columns}), outputs


def with_other_shown_tokens(batch, outputs, seed):
    """The same, with other values of everything where the mask is 0."""
    rng = np.random.default_rng(seed + 1)
    mask_T = batch["response_mask"].values

    def other(values_T):
        return np.where(mask_T, values_T, 50 * rng.normal(size=len(mask_T))).astype(np.float32)

    columns = {
        name: batch[name].with_values(other(batch[name].values))
        for name in batch.names
        if name not in ("sample_id", "response_mask")
    }
    return batch.with_columns(columns), {name: other(column) for name, column in outputs.items()}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=4, deadline=None)
@given(lengths=st.lists(turns, min_size=1, max_size=5), seed=st.integers(0, 2**16))
def test_tokens_that_were_shown_have_no_gradient_and_no_influence(loss, aggregation, lengths, seed):
    goal = policy(loss, aggregation)
    batch, outputs = episodes(goal, lengths, seed)
    mask_T = batch["response_mask"].values
    found = update_of(goal, batch, outputs, scalars=SCALARS)
    other = update_of(goal, *with_other_shown_tokens(batch, outputs, seed), scalars=SCALARS)
    assert found.finite
    assert found.loss == other.loss
    assert values(found.metrics) == values(other.metrics)
    for name, gradient_T in found.gradients.items():
        assert not gradient_T[~mask_T].any(), name
        np.testing.assert_array_equal(gradient_T, other.gradients[name])
    assert found.gradients["entropies"][mask_T].any()
