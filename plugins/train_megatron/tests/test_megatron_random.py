"""A model's draws from torch's generators depend on the run's seed and the rank's place in the layout."""

import numpy as np
import pytest

LOG_PROBS = frozenset({"log_probs"})


@pytest.fixture
def scores(two, on_ranks, tiny, batch):
    """The scores that a model with dropout gives to a sample on each of two ranks, before and after an update."""

    def course(seed, objective=None, **layout):
        engine = on_ranks(two, tiny, engine="WithDropout", seed=seed, **layout)
        alike = batch.take(np.array([0, 0]))
        found = [engine.forward(alike, LOG_PROBS).result()["log_probs"]]
        if objective is not None:
            engine.update(batch, objective).result()
            found.append(engine.forward(alike, LOG_PROBS).result()["log_probs"])
        engine.close()
        return found

    return course


def test_a_model_with_dropout_follows_the_seed_and_ranks_with_other_samples_draw_apart(
    scores, objective
):
    first, again, other = (scores(seed, objective) for seed in (3, 3, 4))
    for one, same, differs in zip(first, again, other, strict=True):
        assert np.array_equal(one.values, same.values)
        assert not np.array_equal(one.values, differs.values)
        assert not np.array_equal(one[0], one[1])
    assert not np.array_equal(first[0].values, first[1].values)


def test_a_resumed_engine_draws_on(two, on_ranks, tiny, batch, objective, tmp_path):
    engine = on_ranks(two, tiny, engine="WithDropout")
    engine.update(batch, objective).result()
    engine.save(tmp_path).result()
    expected = engine.forward(batch, LOG_PROBS).result()["log_probs"].values
    engine.close()
    resumed = on_ranks(two, tiny, engine="WithDropout", seed=4)
    resumed.load(tmp_path).result()
    assert np.array_equal(resumed.forward(batch, LOG_PROBS).result()["log_probs"].values, expected)
