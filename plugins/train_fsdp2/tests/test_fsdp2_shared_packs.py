"""Packs that hold each prompt once: values and gradients equal those of every sample with its own prompt."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from trained_engines import assert_same_metrics

from dovetail_torch_engines import Sequences
from dovetail_train_fsdp2 import partial
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection
from dovetail_train_fsdp2.shared_prompts import attend_shared

OUTPUTS = frozenset({"log_probs", "entropies", "sum_pi_squared"})
SHARED = Fsdp2Config(packing="always", share_prompts="always")
PADDED = Fsdp2Config(packing="never", share_prompts="never")


@pytest.fixture
def plain_products(monkeypatch):
    """What runs on a device that has no kernel for it."""

    def dense(q, k, v, _, causal, *, scale):
        return partial._dense(q, k, v, causal, scale)

    def dense_backward(g, q, k, v, o, lse, _, causal, *, scale):
        return partial._dense_backward(g, q, k, v, o, lse[..., None], causal, scale)

    class Kernels:
        _scaled_dot_product_flash_attention_for_cpu = staticmethod(dense)
        _scaled_dot_product_flash_attention_for_cpu_backward = staticmethod(dense_backward)

    monkeypatch.setattr(partial, "aten", Kernels)


def reference(query, key, value, groups, scale):
    """Every token with a dense mask over the whole pack, in float64. Groups: prompt's length, responses' lengths."""
    prompts = [prompt for prompt, _ in groups]
    sequence = [i for i, n in enumerate(prompts) for _ in range(n)]
    prompt = list(sequence)
    number = len(groups)
    for i, (_, responses) in enumerate(groups):
        for length in responses:
            sequence += [number] * length
            prompt += [i] * length
            number += 1
    sequence, prompt = torch.tensor(sequence), torch.tensor(prompt)
    own = sequence[:, None] == sequence
    of_prompt = (prompt[:, None] == prompt) & (torch.arange(len(prompt)) < sum(prompts))
    seen = (own | of_prompt) & torch.ones(len(prompt), len(prompt)).tril().bool()
    share = query.shape[1] // key.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


groups = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 90), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


def check(groups, heads, value_size):
    """Values and gradients against the reference."""
    prompts = [prompt for prompt, _ in groups]
    responses = [length for _, lengths in groups for length in lengths if length]
    total = sum(prompts) + sum(responses)
    torch.manual_seed(total)
    states = [
        torch.randn(total, heads[0], 8) * 2,
        torch.randn(total, heads[1], 8),
        torch.randn(total, heads[1], value_size),
    ]
    given_back = torch.randn(total, heads[0], value_size)
    mine, theirs = ([x.clone().requires_grad_() for x in states] for _ in range(2))
    cpu = torch.device("cpu")
    attended = attend_shared(
        *mine,
        Sequences(prompts + responses, cpu),
        Sequences(prompts, cpu),
        Sequences([sum(lengths) for _, lengths in groups], cpu),
        scale=0.5,
    )
    expected = reference(*theirs, groups, 0.5)
    torch.testing.assert_close(attended, expected.float(), rtol=1e-4, atol=2e-6)
    (attended * given_back).sum().backward()
    (expected * given_back).sum().backward()
    # Gradients are float32 sums over up to 300 tokens of both signs, whose small results have the rounding errors of large terms.
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=4e-5)


given_groups = given(groups, st.sampled_from([(4, 4), (4, 2), (3, 1)]), st.sampled_from([8, 4]))


@given_groups
def test_attention_is_that_of_every_sample_with_its_prompt(groups, heads, value_size):
    check(groups, heads, value_size)


@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given_groups
def test_so_it_is_by_plain_products(plain_products, groups, heads, value_size):
    check(groups, heads, value_size)


@pytest.mark.parametrize("budget", [1, 40, 16384])
def test_scores_equal_every_sample_by_itself(tiny, make_engine, batch, one_by_one, budget):
    scored = make_engine(tiny, budget=budget, config=SHARED).forward(batch, OUTPUTS)
    for name, rows in one_by_one(tiny, batch).items():
        np.testing.assert_allclose(scored[name].values, np.concatenate(rows), atol=2e-5)


@given(
    seed=st.integers(0, 2**16),
    groups=st.integers(1, 4),
    n=st.integers(1, 4),
    budget=st.sampled_from([7, 30, 400]),
)
# The fixtures return functions without state, so that examples may share them.
@settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_gradients_equal_those_of_the_padded_layout(
    tiny, make_engine, new_batch, gradients, objective, seed, groups, n, budget
):
    batch = new_batch(seed, groups, n)
    order = np.random.default_rng(seed).permutation(len(batch))
    padded, metrics = gradients(make_engine(tiny, config=PADDED), batch, objective)
    engine = make_engine(tiny, config=SHARED, budget=budget)
    shared, shared_metrics = gradients(engine, batch.take(order), objective)
    torch.testing.assert_close(padded, shared, rtol=1e-3, atol=3e-6)
    assert metrics.pop("actor/padding_share") >= 0 == shared_metrics.pop("actor/padding_share")
    assert_same_metrics(metrics, shared_metrics, rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{"gradient_checkpointing": True}, {"gradient_checkpointing": "selective"}, {"lora": True}],
)
def test_it_holds_under_recomputation_and_adapters(
    tiny, make_engine, gradients, batch, objective, settings
):
    if "lora" in settings:
        settings = {"lora": LoraSection(rank=2)}
    ways = (
        {"packing": "always", "share_prompts": "always"},
        {"packing": "never", "share_prompts": "never"},
    )
    shared, padded = (
        gradients(make_engine(tiny, config=Fsdp2Config(**settings, **way)), batch, objective)[0]
        for way in ways
    )
    torch.testing.assert_close(padded, shared, rtol=1e-3, atol=3e-6)


def test_bfloat16_compute_stays_near_float32(tiny, make_engine, batch, one_by_one):
    scored = make_engine(tiny, dtype="bfloat16", config=SHARED).forward(batch, OUTPUTS)
    for name, rows in one_by_one(tiny, batch).items():
        np.testing.assert_allclose(scored[name].values, np.concatenate(rows), atol=0.05)


def test_windows_and_shared_prompts_exclude_each_other(tmp_path, make_engine, batch):
    from transformers import AutoModelForCausalLM, MistralConfig

    size = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = MistralConfig(**size, num_attention_heads=4, num_key_value_heads=2, sliding_window=3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    means = make_engine(tmp_path, config=SHARED)._runner.means(SHARED)
    assert means.packing == "always"
    assert means.share_packed == "never"
