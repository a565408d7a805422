"""A model's draws from torch's generators depend on the run's seed, the role and the rank."""

import numpy as np
import pytest
import torch
from torch.nn.functional import dropout

LOG_PROBS = frozenset({"log_probs"})


@pytest.fixture
def start(tiny, make_engine):
    """Start engines whose model drops out half of what it embeds."""

    def with_dropout(**settings):
        engine = make_engine(tiny, **settings)
        embedding = engine._runner.trunk.get_input_embeddings()
        embedding.register_forward_hook(lambda module, inputs, states_BTH: dropout(states_BTH))
        return engine

    return with_dropout


def course(engine, batch, objective):
    """Scores before and after an update."""
    before = engine.forward(batch, LOG_PROBS)["log_probs"].values
    engine.update(batch, objective)
    return np.concatenate([before, engine.forward(batch, LOG_PROBS)["log_probs"].values])


def test_a_model_with_dropout_follows_the_seed_and_the_role(start, batch, objective):
    first, again, other, reference = (
        course(start(seed=seed, role=role), batch, objective)
        for seed, role in [(1, "actor"), (1, "actor"), (2, "actor"), (1, "ref")]
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, reference)


def test_engines_of_one_process_draw_apart_from_each_other_and_from_the_process(
    start, batch, objective
):
    alone = course(start(seed=1), batch, objective)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    engine, other = start(seed=1), start(seed=1, role="ref")
    before = engine.forward(batch, LOG_PROBS)["log_probs"].values
    other.forward(batch, LOG_PROBS)
    engine.update(batch, objective)
    assert torch.equal(torch.rand(3), expected)
    after = engine.forward(batch, LOG_PROBS)["log_probs"].values
    assert np.array_equal(np.concatenate([before, after]), alone)


def test_a_resumed_engine_draws_on(start, batch, objective, tmp_path):
    engine = start(seed=1)
    engine.update(batch, objective)
    engine.save(tmp_path)
    expected = course(engine, batch, objective)
    resumed = start(seed=2)
    resumed.load(tmp_path)
    assert np.array_equal(course(resumed, batch, objective), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_draw_different_masks_which_follow_the_seed(two, tiny, on_ranks, batch):
    alike = batch.take(np.array([0, 0]))
    found = [
        on_ranks(two, tiny, dropout=True, seed=seed).forward(alike, LOG_PROBS).result()["log_probs"]
        for seed in (3, 3, 4)
    ]
    assert np.array_equal(found[0].values, found[1].values)
    assert not np.array_equal(found[0].values, found[2].values)
    for ranks in found:
        assert not np.array_equal(ranks[0], ranks[1])
