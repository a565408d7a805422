"""Scoring: equal to scoring every sample by itself, for any layout, budget, order and architecture."""

import numpy as np
import pytest
import torch

from dovetail.batch import Ragged
from dovetail.errors import ColumnError
from dovetail_train_fsdp2 import head
from dovetail_train_fsdp2.config import Fsdp2Config

OUTPUTS = frozenset({"log_probs", "entropies", "sum_pi_squared"})
SHARING = ["always", "never", "auto"]


def assert_equal_to(oracle, scored, tolerance=2e-5):
    for name, rows in oracle.items():
        assert scored[name].values.dtype == np.float32
        np.testing.assert_allclose(
            scored[name].values, np.concatenate(rows), rtol=0, atol=tolerance, err_msg=name
        )


@pytest.mark.parametrize("share", SHARING)
@pytest.mark.parametrize("budget", [1, 40, 16384])
def test_scores_equal_every_sample_by_itself(tiny, make_engine, batch, one_by_one, share, budget):
    engine = make_engine(tiny, budget=budget, config=Fsdp2Config(share_prompts=share))
    assert_equal_to(one_by_one(tiny, batch), engine.forward(batch, OUTPUTS))


@pytest.mark.parametrize("share", SHARING)
def test_equal_lengths_without_masks_or_temperature(
    tiny, make_engine, new_batch, one_by_one, share
):
    batch = new_batch(equal=True, masked=False, temperature=1.0)
    engine = make_engine(tiny, config=Fsdp2Config(share_prompts=share))
    assert_equal_to(one_by_one(tiny, batch), engine.forward(batch, OUTPUTS))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_attention_gives_the_same(tiny, make_engine, batch, one_by_one, attention):
    engine = make_engine(tiny, attention=attention, config=Fsdp2Config(share_prompts="always"))
    assert_equal_to(one_by_one(tiny, batch), engine.forward(batch, OUTPUTS))


def test_only_what_is_asked_for_comes_back(tiny, make_engine, batch):
    assert make_engine(tiny).forward(batch, frozenset({"entropies"})).names == ("entropies",)


def architectures(tmp_path):
    """A model of every kind that differs in what the engine may do: name, config, shares prompts, plain head."""
    from transformers import Gemma2Config, GPT2Config, LlamaConfig, MistralConfig

    size = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "llama": (LlamaConfig(**size, **heads), True, True),
        "gpt2": (GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4), True, True),
        "mistral": (MistralConfig(**size, **heads, sliding_window=3), False, True),
        "gemma2": (
            Gemma2Config(
                **size, **heads, head_dim=8, sliding_window=4, final_logit_softcapping=0.5
            ),
            False,
            False,
        ),
    }


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma2"])
def test_any_causal_language_model_scores_right(tmp_path, make_engine, batch, one_by_one, kind):
    from transformers import AutoModelForCausalLM

    config, shares, plain = architectures(tmp_path)[kind]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = make_engine(tmp_path, config=Fsdp2Config(share_prompts="always"), budget=60)
    assert engine._runner.can_share_prompts == shares
    assert engine._runner._plain_head == plain
    assert_equal_to(one_by_one(tmp_path, batch), engine.forward(batch, OUTPUTS))


def test_an_untied_output_layer_scores_right(untied, make_engine, batch, one_by_one):
    assert_equal_to(one_by_one(untied, batch), make_engine(untied).forward(batch, OUTPUTS))


def test_bfloat16_compute_stays_near_float32(tiny, make_engine, batch, one_by_one):
    engine = make_engine(tiny, dtype="bfloat16", config=Fsdp2Config(share_prompts="always"))
    assert_equal_to(one_by_one(tiny, batch), engine.forward(batch, OUTPUTS), tolerance=0.05)
    assert {p.dtype for p in engine._runner.model.parameters()} == {torch.float32}


def test_no_response_token_at_all_gives_empty_columns(tiny, make_engine, batch):
    none = Ragged.from_list([[]] * len(batch), dtype=np.int64)
    empty = batch.select(["prompt_ids", "temperature"]).with_columns(
        {"response_ids": none, "response_mask": none.with_values(none.values.astype(bool))}
    )
    assert len(make_engine(tiny).forward(empty, OUTPUTS)["log_probs"].values) == 0


@pytest.mark.parametrize("kept", [0, 2**24])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("upstream", [("log_probs",), ("entropies",), ("log_probs", "entropies")])
def test_the_chunked_head_has_the_gradient_of_the_whole(monkeypatch, kept, bias, upstream):
    monkeypatch.setattr(head, "KEPT_ELEMENTS", kept)
    monkeypatch.setattr(head, "CHUNK_ROWS_AT_LEAST", 3)
    monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", 1)
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 5), torch.randn(7, 5)
    offset = torch.randn(7) if bias else None
    targets, temperature = torch.randint(0, 7, (10,)), torch.rand(10) + 0.5
    given = {name: torch.randn(10) for name in upstream}

    def gradients(function, dtype):
        leaves = [
            None if x is None else x.detach().clone().to(dtype).requires_grad_()
            for x in (hidden, weight, offset)
        ]
        scores = function(*leaves)
        sum((scores[name] * given[name]).sum() for name in upstream).backward()
        return scores, [leaf.grad for leaf in leaves if leaf is not None]

    def chunked(h, w, b):
        return head.score_tokens(
            h, w, b, targets, temperature,
            outputs=frozenset({*upstream, "sum_pi_squared"}), dtype=torch.float32,
        )  # fmt: skip

    def whole(h, w, b):
        log_pi = ((h @ w.t() + (0 if b is None else b)) / temperature[:, None]).log_softmax(-1)
        return {
            "log_probs": log_pi[torch.arange(10), targets],
            "entropies": -(log_pi.exp() * log_pi).sum(-1),
            "sum_pi_squared": log_pi.exp().square().sum(-1),
        }

    scores, grads = gradients(chunked, torch.float32)
    expected_scores, expected_grads = gradients(whole, torch.float64)
    assert not scores["sum_pi_squared"].requires_grad
    for name in scores:
        torch.testing.assert_close(
            scores[name].double(), expected_scores[name], rtol=1e-5, atol=1e-5
        )
    for grad, expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_second_backward_pass_through_the_head_gives_the_same(monkeypatch):
    torch.manual_seed(0)
    hidden = torch.randn(4, 5, requires_grad=True)
    score = head.score_tokens(
        hidden, torch.randn(7, 5), None, torch.tensor([0, 1, 2, 3]), None,
        outputs=frozenset({"log_probs"}), dtype=torch.float32,
    )["log_probs"].sum()  # fmt: skip
    (first,) = torch.autograd.grad(score, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(score, hidden)
    torch.testing.assert_close(first, second)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    scores = head.score_tokens(
        hidden, torch.tensor([[1.0], [-1.0]]), None, torch.tensor([0, 0]), None,
        outputs=frozenset({"log_probs", "entropies"}), dtype=torch.float32,
    )  # fmt: skip
    assert scores["log_probs"].tolist() == [0.0, -2e4]
    assert scores["entropies"].tolist() == [0.0, 0.0]
    (scores["log_probs"].sum() + scores["entropies"].sum()).backward()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda b: b.drop(["temperature"]), "temperature"),
        (lambda b: b.with_columns({"temperature": np.zeros(len(b), np.float32)}), "temperature 0"),
        (
            lambda b: b.with_columns(
                {"prompt_ids": Ragged.from_list([[]] * len(b), dtype=np.int64)}
            ),
            "empty prompt",
        ),
        (lambda b: b.with_columns({"response_mask": b["prompt_ids"]}), "differ in length"),
    ],
)
def test_a_batch_that_can_not_be_scored_is_refused(tiny, make_engine, batch, wrong, message):
    with pytest.raises(ColumnError, match=message):
        make_engine(tiny).forward(wrong(batch), frozenset({"log_probs"}))
