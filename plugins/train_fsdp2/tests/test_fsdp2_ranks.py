"""Updates on ranks in real processes: one, two and four ranks compute the same with any sharding."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trained_engines import assert_same_training, exported, parameters_of, updated

from dovetail.dispatch import Mesh
from dovetail.errors import ColumnError, ConfigError, NumericsError, PlanError
from dovetail.interfaces import PolicyLoss, TokenLosses
from dovetail.plugins import objective_spec
from dovetail.sections import PluginSection
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection

SGD = {"name": "sgd", "lr": 0.5, "weight_decay": 0.1}
VALUE = objective_spec("value")
LORA = LoraSection(rank=4)
DORA = LoraSection(rank=4, dora=True, rank_stabilised=True)


@pytest.fixture(scope="module")
def expected(tiny, tmp_path_factory):
    """What one process without shards does, by what it trains; made once."""
    return {}


@pytest.fixture
def alone(tiny, make_engine, batch, objective, tmp_path, expected):
    def of(lora):
        if lora not in expected:
            engine = make_engine(tiny, config=Fsdp2Config(lora=lora), seed=3, **SGD)
            start = parameters_of(engine)
            expected[lora] = updated(engine, batch, objective, tmp_path / "alone")
            moved = engine._runner.model.named_parameters()
            assert max((p.detach() - start[n]).abs().max() for n, p in moved) > 1e-3
        return expected[lora]

    return of


@pytest.mark.parametrize(
    ("lora", "settings"),
    [
        pytest.param(None, {"reshard_after_forward": True}, marks=pytest.mark.nightly),
        (None, {"shard_size": 1, "budget": 4096}),
        (None, {"budget": 1, "reduce_gradients": "every_micro_batch"}),
        (LORA, {"budget": 40, "gradient_checkpointing": "selective"}),
        (DORA, {"budget": 40, "gradient_checkpointing": True}),
    ],
)
def test_two_ranks_do_as_one(
    two, tiny, on_ranks, alone, batch, objective, tmp_path, lora, settings
):
    group = on_ranks(two, tiny, optim=SGD, lora=lora, **settings)
    assert_same_training(updated(group, batch, objective, tmp_path), alone(lora))


@pytest.mark.parametrize(
    ("lora", "settings"),
    [
        (None, {"shard_size": 2, "reshard_after_forward": True, "budget": 24}),
        (None, {"cpu_offload": True, "reduce_gradients": "every_micro_batch"}),
        pytest.param(None, {"budget": 24}, marks=pytest.mark.nightly),
        pytest.param(LORA, {"shard_size": 2, "budget": 24}, marks=pytest.mark.nightly),
    ],
)
def test_four_ranks_do_as_one(
    four, tiny, on_ranks, alone, batch, objective, tmp_path, lora, settings
):
    group = on_ranks(four, tiny, optim=SGD, lora=lora, **settings)
    assert_same_training(updated(group, batch, objective, tmp_path), alone(lora))


def test_the_order_and_the_partition_of_samples_make_no_difference(
    four, tiny, on_ranks, alone, batch, objective, tmp_path
):
    group = on_ranks(four, tiny, optim=SGD)
    order = np.random.default_rng(1).permutation(len(batch))
    assert_same_training(updated(group, batch.take(order), objective, tmp_path), alone(None))
    outputs = frozenset({"log_probs", "entropies"})
    straight = group.forward(batch, outputs).result()
    shuffled = group.forward(batch.take(order), outputs).result()
    for name in outputs:
        for at, row in enumerate(order):
            np.testing.assert_allclose(shuffled[name][at], straight[name][row], atol=1e-5)


def test_ranks_without_samples_count_for_nothing(
    four, tiny, on_ranks, make_engine, batch, objective, tmp_path
):
    few = batch.slice(4, 6)
    assert few["response_mask"].values.any()
    one = updated(make_engine(tiny, seed=3, **SGD), few, objective, tmp_path / "one", steps=1)
    group = on_ranks(four, tiny, optim=SGD, budget=1)
    assert_same_training(updated(group, few, objective, tmp_path / "four", steps=1), one)


@pytest.mark.parametrize("together", [1, 2])
def test_a_mini_batch_without_tokens_is_still_one_step(
    two, tiny, on_ranks, unscored, objective, together
):
    group = on_ranks(two, tiny, optim=SGD, sequence_parallel_size=together)
    metrics = group.update(unscored, objective).result()
    assert metrics["actor/grad_norm"].value == 0
    assert metrics["actor/loss"].value == 0


@pytest.mark.parametrize("shard_size", [None, 2])
def test_a_critic_on_ranks_does_as_one(
    four, classifier, on_ranks, make_engine, valued, tmp_path, shard_size
):
    one = updated(
        make_engine(classifier, head="value", grad_clip=0.1, **SGD), valued, VALUE, tmp_path / "one"
    )
    group = on_ranks(
        four, classifier, role="critic", head="value", grad_clip=0.1, optim=SGD, shard_size=shard_size
    )  # fmt: skip
    assert_same_training(updated(group, valued, VALUE, tmp_path / "four"), one)
    assert {"score.weight", "score.bias"} < one[1].keys()


def test_adamw_on_shards_follows_adamw_in_one_piece(
    two, tiny, on_ranks, make_engine, batch, objective, tmp_path
):
    # With a small eps, Adam's first step is the sign of the gradient, even of one that is little more than rounding.
    settings = {"lr": 1e-2, "eps": 1e-3}
    one = updated(make_engine(tiny, seed=3, **settings), batch, objective, tmp_path / "one")
    group = on_ranks(two, tiny, optim=settings)
    assert_same_training(updated(group, batch, objective, tmp_path / "two"), one)


def test_bfloat16_keeps_float32_masters(two, tiny, on_ranks, alone, batch, objective, tmp_path):
    group = on_ranks(two, tiny, optim=SGD, dtype="bfloat16")
    metrics = [group.update(batch, objective).result() for _ in range(3)]
    group.save(tmp_path).result()
    exact, weights = alone(None)
    for mine, theirs in zip(metrics, exact, strict=True):
        assert mine["actor/grad_norm"].value == pytest.approx(theirs["actor/grad_norm"], rel=0.05)
    shards = [load_file(file) for file in sorted((tmp_path / "weights").glob("*.safetensors"))]
    found = torch.cat([shard["model.embed_tokens.weight"] for shard in shards])
    assert found.dtype == torch.float32
    assert (found.bfloat16().float() != found).any()
    assert (found - weights["model.embed_tokens.weight"]).abs().max() < 0.02


def test_several_models_live_in_one_process(
    two, tiny, on_ranks, alone, batch, objective, new_objective, tmp_path
):
    actor, ref = on_ranks(two, tiny, optim=SGD), on_ranks(two, tiny, role="ref")
    outputs = frozenset({"log_probs"})
    before = ref.forward(batch, outputs).result()["log_probs"].values
    assert_same_training(updated(actor, batch, objective, tmp_path), alone(None))
    np.testing.assert_array_equal(ref.forward(batch, outputs).result()["log_probs"].values, before)
    assert np.abs(actor.forward(batch, outputs).result()["log_probs"].values - before).max() > 1e-3


def test_the_adapters_base_is_the_reference(two, tiny, on_ranks, batch, objective):
    plain = on_ranks(two, tiny).forward(batch, frozenset({"log_probs"})).result()["log_probs"]
    group = on_ranks(two, tiny, lora=LORA, optim=SGD)
    for _ in range(2):
        group.update(batch, objective).result()
    after = group.forward(batch, frozenset({"log_probs", "ref_log_probs"})).result()
    np.testing.assert_array_equal(after["ref_log_probs"].values, plain.values)
    assert np.abs(after["log_probs"].values - plain.values).max() > 1e-3


def test_a_number_that_is_not_finite_on_one_rank_stops_all(
    two, tiny, on_ranks, batch, objective, tmp_path
):
    group = on_ranks(two, tiny, budget=24, optim=SGD)
    group.update(batch, objective).result()
    before = exported(group, tmp_path / "before")
    row = next(i for i, mask in enumerate(batch["response_mask"]) if mask.sum() > 1)
    poisoned = batch["advantages"].copy()
    poisoned[row] = np.nan
    with pytest.raises(NumericsError, match=f"'advantages' .* s{row}") as it:
        group.update(batch.with_columns({"advantages": poisoned}), objective).result()
    assert it.value.sample_ids == (f"s{row}",)
    poisoned[row] = 3e38
    overflowing = PluginSection(path=__file__, attribute="Huge")
    goal = objective_spec("policy", policy_loss=overflowing, old_log_probs_from_current=True)
    with pytest.raises(NumericsError, match=f"sample s{row}") as it:
        group.update(batch.with_columns({"advantages": poisoned}), goal).result()
    assert it.value.sample_ids == (f"s{row}",)
    after = exported(group, tmp_path / "after")
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    group.update(batch, objective).result()


def test_what_is_wrong_on_one_rank_is_raised_on_all_and_none_waits(
    two, tiny, on_ranks, batch, objective
):
    group = on_ranks(two, tiny, optim=SGD)
    temperature = batch["temperature"].copy()
    temperature[3] = 0
    cold = batch.with_columns({"temperature": temperature})
    for call in (
        lambda: group.update(cold, objective),
        lambda: group.forward(cold, frozenset({"log_probs"})),
    ):
        with pytest.raises(ColumnError, match="temperature 0"):
            call().result()
    group.update(batch, objective).result()


def test_sizes_that_do_not_divide_the_ranks(two, tiny, on_ranks):
    with pytest.raises(PlanError, match=r"shard_size=3 .* 2 ranks(.|\n)*1, 2"):
        on_ranks(two, tiny, shard_size=3)
    with pytest.raises(ConfigError, match=r"sequence_parallel_size is 2, but(.*)cp=1"):
        on_ranks(two, tiny, sequence_parallel_size=2, mesh=Mesh(dp=2))


class Huge(PolicyLoss):
    """−A · 10³, with a gradient of 0: overflows where A is large."""

    name = "huge"
    api = ">=1.0,<2"

    @classmethod
    def requires(cls, config):
        return frozenset({"advantages"})

    def token_losses(self, inputs):
        flat_T = inputs.log_probs_T * 0 + 1e3
        return TokenLosses(losses_T=-inputs.columns["advantages"] * flat_T)
