"""Packed micro-batches: values and gradients equal those of every sample by itself; architectures that can't be packed are not."""

import math

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from trained_engines import assert_same_metrics

from dovetail_torch_engines import Sequences, attend, varlen
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.probing import probe_packing

OUTPUTS = frozenset({"log_probs", "entropies", "sum_pi_squared"})
PACKED = Fsdp2Config(packing="always", share_prompts="never")
PADDED = Fsdp2Config(packing="never", share_prompts="never")
SIZE = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def reference(query, key, value, lengths, scale, window):
    """Each sequence and head by itself, with a dense mask, in float64."""
    rows, start = [], 0
    group = query.shape[1] // key.shape[1]
    for length in lengths:
        part = slice(start, start + length)
        start += length
        q, k, v = (x[part].double().transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        seen = torch.ones(length, length).tril().bool()
        if window is not None:
            seen &= torch.ones(length, length).triu(1 - window).bool()
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
        rows.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(rows)


@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6)
    | st.integers(1, 90).flatmap(lambda n: st.lists(st.just(n), min_size=2, max_size=4)),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    sizes=st.sampled_from([(8, 8), (8, 4)]),
    window=st.sampled_from([None, 1, 3, 16, 70]),
)
def test_attention_is_that_of_each_sequence_alone(lengths, heads, sizes, window):
    torch.manual_seed(sum(lengths))
    total = sum(lengths)
    states = [
        torch.randn(total, heads[0], sizes[0]),
        torch.randn(total, heads[1], sizes[0]),
        torch.randn(total, heads[1], sizes[1]),
    ]
    given_back = torch.randn(total, heads[0], sizes[1])
    mine = [x.clone().requires_grad_() for x in states]
    theirs = [x.clone().requires_grad_() for x in states]
    sequences = Sequences(lengths, torch.device("cpu"))
    attended = attend(*mine, sequences, scale=0.3, window=window)
    expected = reference(*theirs, lengths, 0.3, window)
    torch.testing.assert_close(attended, expected.float(), rtol=1e-4, atol=2e-6)
    (attended * given_back).sum().backward()
    (expected * given_back).sum().backward()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_long_sequences_are_attended_to_alone_and_filled_up(monkeypatch):
    filled = []
    causal = varlen._causal

    def note(query, key, value, scale):
        filled.append(query.shape[1])
        return causal(query, key, value, scale)

    monkeypatch.setattr(varlen, "_causal", note)
    monkeypatch.setattr(varlen, "STEP", 8)
    torch.manual_seed(0)
    lengths = [300, 17, 8]
    states = [torch.randn(325, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    sequences = Sequences(lengths, torch.device("cpu"))
    attended = varlen._one_by_one(*states, sequences, 0.3)
    expected = reference(*states, lengths, 0.3, None)
    assert filled == [304, 24, 8]
    torch.testing.assert_close(attended, expected.float(), rtol=1e-4, atol=2e-6)
    mine, theirs = (torch.autograd.grad(x.sum(), states) for x in (attended, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 40, 16384])
def test_scores_equal_every_sample_by_itself(tiny, make_engine, batch, one_by_one, budget):
    scored = make_engine(tiny, budget=budget, config=PACKED).forward(batch, OUTPUTS)
    for name, rows in one_by_one(tiny, batch).items():
        np.testing.assert_allclose(scored[name].values, np.concatenate(rows), atol=2e-5)


@given(
    seed=st.integers(0, 2**16),
    groups=st.integers(1, 4),
    n=st.integers(1, 4),
    masked=st.booleans(),
    budget=st.sampled_from([7, 30, 400]),
)
# The fixtures return functions without state, so that examples may share them.
@settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_gradients_equal_those_of_the_padded_layout(
    tiny, make_engine, new_batch, gradients, objective, seed, groups, n, masked, budget
):
    batch = new_batch(seed, groups, n, masked=masked)
    order = np.random.default_rng(seed).permutation(len(batch))
    padded, metrics = gradients(make_engine(tiny, config=PADDED), batch, objective)
    engine = make_engine(tiny, config=PACKED, budget=budget)
    packed, packed_metrics = gradients(engine, batch.take(order), objective)
    torch.testing.assert_close(padded, packed, rtol=1e-3, atol=3e-6)
    assert metrics.pop("actor/padding_share") >= 0 == packed_metrics.pop("actor/padding_share")
    assert_same_metrics(metrics, packed_metrics, rel=1e-4)


def test_values_of_a_critic_equal_those_of_the_padded_layout(classifier, make_engine, batch):
    values = [
        make_engine(classifier, head="value", config=config, budget=40)
        .forward(batch, frozenset({"values"}))["values"]
        .values
        for config in (PADDED, PACKED)
    ]
    assert np.abs(values[0]).max() > 0.1
    np.testing.assert_allclose(values[0], values[1], atol=2e-6)


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_layers_that_compute_again_do_so_for_packs(
    tiny, make_engine, gradients, batch, objective, recompute
):
    plain, _ = gradients(make_engine(tiny, config=PADDED), batch, objective)
    config = attrs.evolve(PACKED, gradient_checkpointing=recompute)
    again, _ = gradients(make_engine(tiny, config=config), batch, objective)
    torch.testing.assert_close(plain, again, rtol=1e-3, atol=3e-6)


def architectures():
    """A config of every kind, and whether it can be packed exactly."""
    import transformers as t

    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {
        "qwen3": (t.Qwen3Config(**SIZE, **HEADS, head_dim=8), True),
        "qwen3_moe": (
            t.Qwen3MoeConfig(
                **SIZE, **HEADS, head_dim=8,
                num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            ),
            True,
        ),
        "llama": (t.LlamaConfig(**SIZE, **HEADS), True),
        "gpt2": (t.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4), True),
        "mistral": (t.MistralConfig(**SIZE, **HEADS, sliding_window=3), True),
        "qwen2_windows": (
            t.Qwen2Config(
                **SIZE, **HEADS, use_sliding_window=True, sliding_window=4, max_window_layers=1
            ),
            True,
        ),
        "gemma3": (t.Gemma3TextConfig(**SIZE, **HEADS, head_dim=8, sliding_window=4), True),
        "cohere": (t.CohereConfig(**SIZE, **HEADS, **ends), True),
        "gemma2": (t.Gemma2Config(**SIZE, **HEADS, head_dim=8, sliding_window=4), False),
        "llama4": (
            t.Llama4TextConfig(
                **SIZE, **HEADS, head_dim=8, num_local_experts=2, num_experts_per_tok=1,
                attention_chunk_size=4, intermediate_size_mlp=64,
            ),
            False,
        ),
        "lfm2": (t.Lfm2Config(**SIZE, **HEADS, layer_types=["conv", "full_attention"]), False),
        "falcon": (
            t.FalconConfig(
                vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
            ),
            False,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", architectures())
def test_an_architecture_is_packed_exactly_or_not_at_all(
    tmp_path, make_engine, new_batch, gradients, objective, kind
):
    from transformers import AutoModelForCausalLM

    config, packs = architectures()[kind]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    batch = new_batch(seed=3)
    padded = make_engine(tmp_path, config=PADDED, budget=100)
    packed = make_engine(tmp_path, config=PACKED, budget=100)
    assert (packed._runner.packs.why_not is None) is packs, packed._runner.packs.why_not
    one, other = (engine.forward(batch, OUTPUTS) for engine in (padded, packed))
    for name in OUTPUTS:
        np.testing.assert_allclose(one[name].values, other[name].values, atol=2e-5)
    if packs:
        one, other = (gradients(engine, batch, objective)[0] for engine in (padded, packed))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_who_asks_for_another_attention_gets_it(tiny, make_engine):
    runner = make_engine(tiny, attention="eager", config=PACKED)._runner
    assert "'eager'" in runner.packs.why_not
    assert runner.means(PACKED).packing == "never"


def test_a_mask_with_holes_is_no_window(monkeypatch):
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.models.qwen2 import modeling_qwen2

    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZE, **HEADS)).eval()
    assert probe_packing(model).why_not is None
    plain = modeling_qwen2.create_causal_mask

    def with_holes(**given):
        return plain(**given, and_mask_function=lambda batch, head, q, kv: kv != q - 5)

    monkeypatch.setattr(modeling_qwen2, "create_causal_mask", with_holes)
    assert "uses an attention mask" in probe_packing(model).why_not


def test_a_layer_that_mixes_tokens_unseen_is_found_out():
    from transformers import AutoModelForCausalLM, Qwen2Config

    class Mixing(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, states):
            return self.inner(states) + 0.1 * states.cumsum(1)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZE, **HEADS)).eval()
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    assert "other hidden states" in probe_packing(model).why_not
