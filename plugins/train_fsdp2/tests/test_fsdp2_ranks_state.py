"""Checkpoints of ranks in real processes, which any number of ranks can read."""

import json

import numpy as np
import pytest
import torch
from trained_engines import stored_tensors

from dovetail.errors import CheckpointError
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection

LORA = LoraSection(rank=4)
SCORES = frozenset({"log_probs", "entropies"})


def stored(directory, parts=("weights", "moments")):
    """Every tensor of a checkpoint, whole."""
    tensors = {n: t for part in parts for n, t in stored_tensors(directory / part).items()}
    return tensors, json.loads((directory / "training.json").read_text())["optimizer"]


def stored_weights(directory):
    """Every tensor of a training state without moments, whole."""
    return stored(directory, ("weights",))


def assert_same_state(one, other):
    assert one[1] == other[1]
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=0)


class Now:
    """An engine in this process, called as a group is."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        from dovetail.dispatch import Future

        method = getattr(self._engine, name)
        return lambda *args: Future.completed(method(*args))


@pytest.fixture
def ranks_of(request, two, four):
    return {1: None, 2: two, 4: four}


@pytest.mark.parametrize(
    ("before", "after", "lora"),
    [
        (4, 2, None),
        (1, 4, None),
        (4, 1, LORA),
        pytest.param(4, 1, None, marks=pytest.mark.nightly),
        pytest.param(2, 4, LORA, marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_is_the_same_on_any_number_of_ranks(
    ranks_of, tiny, on_ranks, make_engine, batch, objective, tmp_path, before, after, lora
):
    def start(count, **settings):
        if count == 1:
            return Now(make_engine(tiny, seed=3, config=Fsdp2Config(lora=lora)))
        return on_ranks(ranks_of[count], tiny, lora=lora, **settings)

    first = start(before)
    for _ in range(2):
        first.update(batch, objective).result()
    first.save(tmp_path / "first").result()
    second = start(after, **({"shard_size": 2} if after == 4 else {}))
    second.load(tmp_path / "first").result()
    second.save(tmp_path / "second").result()
    assert_same_state(stored(tmp_path / "second"), stored(tmp_path / "first"))
    assert stored(tmp_path / "second")[1]["steps"] == 2
    scores = [engine.forward(batch, SCORES).result() for engine in (first, second)]
    for name in SCORES:
        np.testing.assert_allclose(scores[0][name].values, scores[1][name].values, atol=1e-5)


def test_resuming_on_as_many_ranks_is_bit_identical(
    two, tiny, on_ranks, batch, objective, tmp_path
):
    first, second = on_ranks(two, tiny, budget=24), on_ranks(two, tiny, budget=24)
    first.update(batch, objective).result()
    first.save(tmp_path / "first").result()
    metrics = first.update(batch, objective).result()
    first.save(tmp_path / "expected").result()
    # Score first: weights that a forward pass gathered must not be used after the load.
    second.forward(batch, SCORES).result()
    second.load(tmp_path / "first").result()
    assert second.update(batch, objective).result() == metrics
    second.save(tmp_path / "resumed").result()
    assert_same_state(stored(tmp_path / "resumed"), stored(tmp_path / "expected"))


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_two_ranks_follow_four_as_one_process_follows_another(
    two, four, tiny, on_ranks, make_engine, batch, objective, tmp_path, share
):
    leader = on_ranks(four, tiny, optim={"lr": 1e-2})
    leader.update(batch, objective).result()
    leader.write_weights(tmp_path / "written").result()
    followers = {"ranks": on_ranks(two, tiny), "alone": Now(make_engine(tiny, seed=3))}
    scores = []
    for name, follower in followers.items():
        # Score first: weights that a forward pass gathered must not be used after the change.
        follower.forward(batch, SCORES).result()
        follower.average_weights(tmp_path / "written", share).result()
        scores.append(follower.forward(batch, SCORES).result()["log_probs"].values)
        follower.save(tmp_path / name).result()
    assert_same_state(stored_weights(tmp_path / "ranks"), stored_weights(tmp_path / "alone"))
    np.testing.assert_allclose(*scores, atol=1e-5)


def test_shards_of_an_earlier_save_are_not_read(
    two, four, tiny, on_ranks, batch, objective, tmp_path
):
    many, few = on_ranks(four, tiny), on_ranks(two, tiny)
    many.update(batch, objective).result()
    many.save(tmp_path / "state").result()
    for _ in range(2):
        few.update(batch, objective).result()
    few.save(tmp_path / "state").result()
    few.save(tmp_path / "other").result()
    assert_same_state(stored(tmp_path / "state"), stored(tmp_path / "other"))


def test_checkpoints_that_do_not_fit_are_refused_on_all_ranks(two, tiny, on_ranks, tmp_path):
    other = tiny_model_and_tokenizer(tmp_path / "other", vocab_size=300, layers=1)
    on_ranks(two, other).save(tmp_path / "state").result()
    group = on_ranks(two, tiny)
    with pytest.raises(CheckpointError, match="another model"):
        group.load(tmp_path / "state").result()
    with pytest.raises(CheckpointError, match=r"no training\.json"):
        group.load(tmp_path / "nowhere").result()
    with pytest.raises(CheckpointError, match="can't be written"):
        group.save(tiny / "config.json" / "below").result()
    with pytest.raises(CheckpointError, match="can't be exported"):
        group.export(tiny / "config.json" / "below").result()


@pytest.mark.parametrize(
    "optim",
    [
        pytest.param({"name": "muon", "lr": 1e-2, "adamw_lr": 1e-2, "eps": 1e-3}, id="muon"),
        pytest.param({"name": "sgd", "lr": 0.5, "momentum": 0.9}, id="momentum", marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_an_optimizer_does_on_ranks_what_it_does_on_one_and_resumes_on_any_number(
    two, tiny, on_ranks, make_engine, batch, objective, tmp_path, optim
):
    alone, group = Now(make_engine(tiny, seed=3, **optim)), on_ranks(two, tiny, optim=optim)
    for engine, place in ((alone, "one"), (group, "two")):
        for _ in range(2):
            engine.update(batch, objective).result()
        engine.save(tmp_path / place).result()
    (one, _), (other, _) = stored(tmp_path / "one"), stored(tmp_path / "two")
    assert one.keys() == other.keys()
    start = dict(make_engine(tiny)._runner.model.named_parameters())
    # Muon rounds to bfloat16, and scales the smallest singular values of a gradient, which are rounding errors, up to the others.
    moved, apart = (
        torch.cat([(here[name] - there[name]).flatten() for name in start]).norm()
        for here, there in ((one, {n: p.detach() for n, p in start.items()}), (other, one))
    )
    assert apart <= (5e-2 if optim["name"] == "muon" else 1e-4) * moved
    resumed = Now(make_engine(tiny, seed=3, **optim))
    resumed.load(tmp_path / "two").result()
    resumed.save(tmp_path / "again").result()
    assert_same_state(stored(tmp_path / "again"), stored(tmp_path / "two"))


@pytest.mark.nightly
def test_8_bit_moments_on_ranks_are_those_of_one_and_resume_bit_for_bit(
    two, tmp_path_factory, on_ranks, make_engine, batch, objective, tmp_path
):
    """Compiled by torchao on every rank, as in a run."""
    pytest.importorskip("torchao", reason="needs torchao")
    # Wide enough for half a matrix to have blocks of 256.
    tiny = tiny_model_and_tokenizer(
        tmp_path_factory.mktemp("wide"), vocab_size=300, hidden_size=128
    )
    optim = {"name": "adamw_8bit", "lr": 1e-2, "eps": 1e-3}
    alone, group = Now(make_engine(tiny, seed=3, **optim)), on_ranks(two, tiny, optim=optim)
    for engine, place in ((alone, "one"), (group, "two")):
        for _ in range(2):
            engine.update(batch, objective).result()
        engine.save(tmp_path / place).result()
    (one, _), (other, _) = stored(tmp_path / "one"), stored(tmp_path / "two")
    assert any(name.startswith("exp_avg.codes.") for name in other)
    assert one.keys() == other.keys()
    start = dict(make_engine(tiny)._runner.model.named_parameters())
    for name, parameter in start.items():
        moved = (one[name] - parameter.detach()).norm()
        assert (other[name] - one[name]).norm() <= 5e-2 * moved + 1e-6, name
    resumed = on_ranks(two, tiny, optim=optim)
    resumed.load(tmp_path / "two").result()
    for engine, place in ((group, "third"), (resumed, "resumed")):
        engine.update(batch, objective).result()
        engine.save(tmp_path / place).result()
    assert_same_state(stored(tmp_path / "resumed"), stored(tmp_path / "third"))
