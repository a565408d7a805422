"""Sequence parallelism: two and four ranks give the values, gradients and weights of one process."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from trained_engines import assert_same_training, updated

from dovetail.dispatch import Mesh
from dovetail.errors import ConfigError
from dovetail.plugins import objective_spec
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection
from dovetail_train_fsdp2.layout import MicroBatchLayout, PackedSequences
from dovetail_train_fsdp2.ulysses import SequenceParallel

SGD = {"name": "sgd", "lr": 0.5, "weight_decay": 0.1}
OUTPUTS = frozenset({"log_probs", "entropies"})
LORA = LoraSection(rank=4)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        {"budget": 1},
        {"budget": 4096, "lora": LORA},
        {"gradient_checkpointing": True, "share_prompts": "always"},
    ],
)
def test_two_ranks_share_sequences_as_one(
    two, tiny, on_ranks, make_engine, batch, objective, tmp_path, settings
):
    config = Fsdp2Config(lora=settings.get("lora"))
    alone = make_engine(tiny, config=config, seed=3, **SGD)
    one = updated(alone, batch, objective, tmp_path / "one")
    group = on_ranks(two, tiny, optim=SGD, sequence_parallel_size=2, **settings)
    assert_same_training(updated(group, batch, objective, tmp_path / "two"), one)


@pytest.mark.parametrize(("degree", "budget"), [(2, 24), (4, 64)])
def test_four_ranks_share_sequences_as_one(
    four, tiny, on_ranks, make_engine, batch, objective, tmp_path, degree, budget
):
    # With four ranks, each of the model's two key and value heads is repeated.
    one = updated(make_engine(tiny, seed=3, **SGD), batch, objective, tmp_path / "one")
    group = on_ranks(four, tiny, optim=SGD, budget=budget, sequence_parallel_size=degree)
    assert_same_training(updated(group, batch, objective, tmp_path / "four"), one)


def test_scores_come_back_whole_and_in_the_callers_order(two, tiny, on_ranks, batch, one_by_one):
    group = on_ranks(two, tiny, sequence_parallel_size=2)
    order = np.random.default_rng(1).permutation(len(batch))
    scored = group.forward(batch.take(order), OUTPUTS).result()
    for name, rows in one_by_one(tiny, batch.take(order)).items():
        if name in OUTPUTS:
            np.testing.assert_allclose(scored[name].values, np.concatenate(rows), atol=2e-5)


def test_windows_and_bfloat16_hold_across_ranks(two, on_ranks, make_engine, batch, tmp_path):
    from transformers import AutoModelForCausalLM, MistralConfig

    torch.manual_seed(0)
    size = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = MistralConfig(**size, num_attention_heads=4, num_key_value_heads=2, sliding_window=3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    alone = make_engine(tmp_path, config=Fsdp2Config(packing="never")).forward(batch, OUTPUTS)
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.03)):
        group = on_ranks(two, tmp_path, sequence_parallel_size=2, dtype=dtype)
        scored = group.forward(batch, OUTPUTS).result()
        for name in OUTPUTS:
            np.testing.assert_allclose(scored[name].values, alone[name].values, atol=tolerance)


def test_a_critic_shares_sequences_as_one(two, classifier, on_ranks, make_engine, valued, tmp_path):
    goal = objective_spec("value")
    clipped = {"head": "value", "grad_clip": 0.1}
    one = updated(make_engine(classifier, **clipped, **SGD), valued, goal, tmp_path / "one")
    group = on_ranks(two, classifier, role="critic", optim=SGD, sequence_parallel_size=2, **clipped)
    assert_same_training(updated(group, valued, goal, tmp_path / "two"), one)


def test_a_degree_that_does_not_divide_the_heads(two, tmp_path, on_ranks):
    path = tiny_model_and_tokenizer(tmp_path, hidden_size=24, heads=3, kv_heads=1, layers=1)
    with pytest.raises(
        ConfigError, match=r"sequence_parallel_size=2 (.*)3 attention heads(.|\n)*1, 3"
    ):
        on_ranks(two, path, sequence_parallel_size=2)


def test_an_architecture_that_can_not_be_packed_shares_nothing(two, tmp_path, on_ranks):
    from transformers import AutoModelForCausalLM, Gemma2Config

    size = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = Gemma2Config(**size, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'softcap'"):
        on_ranks(two, tmp_path, sequence_parallel_size=2, mesh=Mesh(dp=1, cp=2))


class Place(SequenceParallel):
    """One of some ranks, without the others."""

    def __init__(self, size, index):
        self.size, self.index = size, index


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.lists(st.integers(0, 53), max_size=20),
)
def test_the_parts_of_all_ranks_are_the_whole(size, lengths, sources):
    count = sum(lengths)
    sources = np.array([s for s in sources if s < count], np.int64)
    layout = MicroBatchLayout(
        fed=PackedSequences(
            ids_F=np.arange(count) + 1,
            positions_F=np.concatenate([np.arange(n) for n in lengths]),
            lengths_S=np.array(lengths),
        ),
        source_R=sources,
        targets_R=sources + 100,
        temperature_R=sources.astype(np.float32),
        token_R=np.arange(len(sources)),
        tokens=len(sources),
    )
    parts = [Place(size, index).part(layout) for index in range(size)]
    ids = np.concatenate([part.layout.fed.ids_F for part in parts])
    assert ids[:count].tolist() == layout.fed.ids_F.tolist()
    assert not ids[count:].any()
    assert len({len(part.layout.fed.ids_F) for part in parts}) == 1
    assert {part.layout.fed.lengths_S.sum() for part in parts} == {len(ids)}
    for name, offset in (("targets_R", 100), ("temperature_R", 0)):
        found = np.concatenate([getattr(part.layout, name) for part in parts])
        np.testing.assert_array_equal(found[parts[0].share.place_R], sources + offset)
    held = np.concatenate([p.layout.fed.ids_F[p.layout.source_R] for p in parts])
    np.testing.assert_array_equal(held[parts[0].share.place_R], sources + 1)
