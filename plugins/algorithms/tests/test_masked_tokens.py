"""Tokens that an episode was shown (mask 0) have exactly no effect on the update, under every policy loss and aggregation."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Completion, FinishReason, PluginContext, Prompt, Sample, Score
from dovetail.metrics import values
from dovetail.plugins.index import default_index
from dovetail.sections import PluginSection
from dovetail_algorithms.config.objectives import PolicyConfig
from dovetail_algorithms.objectives.policy import PolicyObjective
from dovetail_rollouts.columns import to_batch
from dovetail_sdk.testing import update_of

LOSSES = sorted({entry.name for entry in default_index().entries("policy_loss")})
AGGREGATIONS = sorted({entry.name for entry in default_index().entries("loss_aggregation")})
OF_SEVERAL = [
    entry.name
    for entry in default_index().entries("loss_aggregation")
    if entry.manifest and "several_sequences" in entry.manifest.capabilities
]
"""Aggregations under which an agent loop may fork its sessions."""
SCALARS = {"kl_coef": 0.5, "entropy_coef": 0.1}

turns = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3)
"""For each turn of an episode, the number of tokens that the policy produced and the number that it was shown afterwards."""


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


def mask_of(row):
    """The mask of a sequence, from the lengths of its turns."""
    return np.concatenate([np.repeat([True, False], pair) for pair in row])


def forked_sample(number, lengths):
    """Return an episode of several sequences, as from a rollout: each later sequence begins with tokens of the previous sequence."""
    sequences, prompt_ids = [], None
    for row in lengths:
        mask_T = mask_of(row)
        ids_T = np.arange(len(mask_T))
        sequences.append(
            Completion(
                request_id="",
                sample=number,
                response_ids=ids_T,
                finish_reason=FinishReason.STOP,
                weight_versions=np.where(mask_T, 0, -1),
                response_mask=mask_T,
                prompt_ids=prompt_ids,
            )
        )
        prompt_ids = np.concatenate([np.arange(3), ids_T])
    return Sample(
        sample_id=f"s{number}",
        prompt=Prompt(index=0, prompt_ids=np.arange(3), raw=""),
        text="",
        completion=sequences[-1],
        earlier=tuple(sequences[:-1]),
        outcome=Score(value=float(number)),
    )


def minibatch(goal, mask, names, seed):
    """A mini-batch with every token's column that the objective reads, and the model's outputs."""
    rng = np.random.default_rng(seed)
    tokens = len(mask.values)
    columns = goal.requires(goal.config) - {"response_mask", "sample_id"}
    drawn = {name: rng.normal(size=tokens).astype(np.float32) for name in sorted(columns)}
    drawn["rollout_is_weights"] = np.abs(drawn["rollout_is_weights"])
    outputs = {
        "log_probs": -rng.exponential(size=tokens).astype(np.float32),
        "entropies": rng.exponential(size=tokens).astype(np.float32),
    }
    columns = {name: mask.with_values(column) for name, column in drawn.items()}
    return Batch({"sample_id": names, "response_mask": mask, **columns}), outputs


def with_other_shown_tokens(batch, outputs, seed):
    """Return copies with other values wherever the mask is 0."""
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
    mask = Ragged.from_list([mask_of(row) for row in lengths], dtype=np.bool_)
    check_shown_tokens(goal, mask, [f"s{row}" for row in range(len(mask))], seed)


@pytest.mark.parametrize("aggregation", OF_SEVERAL)
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=2, deadline=None)
@given(
    trajectories=st.lists(st.lists(turns, min_size=1, max_size=3), min_size=2, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_nor_have_those_of_forked_sequences(loss, aggregation, trajectories, seed):
    """The tokens with which a fork begins, also the policy's own, are its prompt, which has no loss."""
    samples = [forked_sample(number, lengths) for number, lengths in enumerate(trajectories)]
    rows = to_batch(samples, temperature=1.0)
    produced = sum(made for lengths in trajectories for row in lengths for made, _ in row)
    assert rows["response_mask"].values.sum() == produced
    check_shown_tokens(policy(loss, aggregation), rows["response_mask"], rows["sample_id"], seed)


def check_shown_tokens(goal, mask, names, seed):
    """Check that tokens with mask 0 have no gradient, and that no result depends on their values."""
    batch, outputs = minibatch(goal, mask, names, seed)
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
