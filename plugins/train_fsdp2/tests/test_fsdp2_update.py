"""Updates: exactly one optimizer step, for any micro-batches, order and layout."""

import math

import numpy as np
import pytest
import torch
from trained_engines import assert_same_metrics, parameters_of

from dovetail.batch import Batch, Ragged
from dovetail.errors import DispatchError
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.layout import lay_out


def assert_same_gradients(one, other, tolerance=2e-6):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("share", ["always", "never"])
def test_gradients_are_those_of_every_sample_by_itself(
    tiny, make_engine, gradients, batch, new_objective, share
):
    from transformers import AutoModelForCausalLM

    engine = make_engine(tiny, config=Fsdp2Config(share_prompts=share))
    objective = new_objective(old_log_probs_from_current=True)
    found, metrics = gradients(engine, batch, objective)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64).eval()
    total, tokens = 0.0, int(batch["response_mask"].values.sum())
    for i in range(len(batch)):
        prompt, response = batch["prompt_ids"][i], batch["response_ids"][i]
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        logits = model(ids).logits[0, len(prompt) - 1 : ids.shape[1] - 1]
        log_pi = (logits / float(batch["temperature"][i])).log_softmax(-1)[: len(response)]
        log_probs = log_pi[torch.arange(len(response)), torch.from_numpy(response)]
        ratio = (log_probs - log_probs.detach()).exp()
        kept = torch.from_numpy(batch["response_mask"][i].copy())
        total = total - (ratio * float(batch["advantages"][i]))[kept].sum() / tokens
    total.backward()
    expected = {name: p.grad.float() for name, p in model.named_parameters()}
    assert_same_gradients(found, expected)
    assert math.isclose(metrics["actor/loss"], total.item(), rel_tol=1e-4, abs_tol=1e-6)


@pytest.mark.parametrize("budget", [1, 33, 64])
@pytest.mark.parametrize("share", ["always", "never"])
def test_micro_batches_make_no_difference(
    tiny, make_engine, gradients, batch, objective, budget, share
):
    whole = gradients(make_engine(tiny), batch, objective)
    cut = gradients(
        make_engine(tiny, budget=budget, config=Fsdp2Config(share_prompts=share)), batch, objective
    )
    assert_same_gradients(whole[0], cut[0])
    assert_same_metrics(whole[1], cut[1], rel=1e-4)


@pytest.mark.parametrize("budget", [33, 16384])
def test_responses_that_were_forked_of_their_tokens_have_the_gradient_of_the_whole(
    tiny, make_engine, gradients, batch, objective, budget
):
    forked = forked_halfway(batch)
    assert forked["response_mask"].lengths.sum() == batch["response_mask"].lengths.sum()
    whole = gradients(make_engine(tiny), batch, objective)
    cut = gradients(make_engine(tiny, budget=budget), forked, objective)
    assert_same_gradients(whole[0], cut[0])
    for name in ("actor/loss", "actor/entropy"):
        assert math.isclose(whole[1][name], cut[1][name], rel_tol=1e-4, abs_tol=1e-5), name


def forked_halfway(batch):
    """Each response as two sequences: its first half, and the second after the tokens before it."""
    prompts, responses = batch["prompt_ids"], batch["response_ids"]
    halves_N = responses.lengths // 2

    def cut(column):
        parts = [
            part
            for values, half in zip(column, halves_N, strict=True)
            for part in (values[:half], values[half:])
        ]
        return Ragged.from_list(parts, dtype=column.values.dtype)

    begins = [
        ids
        for prompt, response, half in zip(prompts, responses, halves_N, strict=True)
        for ids in (prompt, np.concatenate([prompt, response[:half]]))
    ]
    of_tokens = ("response_ids", "response_mask", "old_log_probs", "ref_log_probs")
    columns = {
        **{name: cut(batch[name]) for name in of_tokens},
        "prompt_ids": Ragged.from_list(begins, dtype=np.int64),
        "sample_id": [f"{name}.q{n}" for name in batch["sample_id"] for n in range(2)],
    }
    return batch.take(np.repeat(np.arange(len(batch)), 2)).with_columns(columns)


def test_a_batch_twice_over_has_the_same_token_mean(tiny, make_engine, gradients, batch, objective):
    engine = make_engine(tiny, budget=64)
    once, twice = (gradients(engine, b, objective) for b in (batch, Batch.concat([batch, batch])))
    assert_same_gradients(once[0], twice[0])
    assert_same_metrics(once[1], twice[1], rel=1e-4)


def test_gradient_checkpointing_makes_no_difference(tiny, make_engine, gradients, batch, objective):
    plain = gradients(make_engine(tiny), batch, objective)
    recomputed = gradients(
        make_engine(tiny, config=Fsdp2Config(gradient_checkpointing=True)), batch, objective
    )
    assert_same_gradients(plain[0], recomputed[0])


def test_a_model_with_dropout_trains_without_it(tmp_path, make_engine, gradients, batch, objective):
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=300, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.9, resid_pdrop=0.9
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for recompute in (False, True):
        engine = make_engine(tmp_path, config=Fsdp2Config(gradient_checkpointing=recompute))
        once, again = (gradients(engine, batch, objective)[0] for _ in range(2))
        assert all(torch.equal(once[name], again[name]) for name in once)


def test_one_step_is_adamw_on_the_clipped_gradient(tiny, make_engine, gradients, batch, objective):
    engine = make_engine(tiny, lr=1e-2, weight_decay=0.1, grad_clip=0.05)
    grads, _ = gradients(engine, batch, objective)
    before = parameters_of(engine)
    metrics = {name: metric.value for name, metric in engine.update(batch, objective).items()}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    assert math.isclose(metrics["actor/grad_norm"], norm, rel_tol=1e-4)
    assert norm > 0.05
    assert metrics["actor/lr"] == 1e-2
    parameters = {name: p.clone().requires_grad_() for name, p in before.items()}
    reference = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.1, eps=1e-8)
    for name, parameter in parameters.items():
        parameter.grad = grads[name] * (0.05 / norm)
    reference.step()
    for name, parameter in engine._runner.model.named_parameters():
        # Adam's first step is the sign of the gradient: leave out gradients that are little more than rounding.
        clear = grads[name].abs() * (0.05 / norm) > 1e-5
        torch.testing.assert_close(parameter[clear], parameters[name][clear], rtol=1e-4, atol=1e-5)


def test_an_update_says_which_share_of_its_tokens_is_padding(tiny, make_engine, batch, objective):
    shares = {}
    for packing in ("never", "always"):
        engine = make_engine(tiny, config=Fsdp2Config(packing=packing, share_prompts="never"))
        shares[packing] = engine.update(batch, objective)["actor/padding_share"].value
    layout = lay_out(batch)
    assert shares == {"never": layout.padding / layout.fed.tokens, "always": 0}
    assert shares["never"] > 0


def test_one_step_of_gradient_descent(tiny, make_engine, gradients, batch, objective):
    engine = make_engine(tiny, name="sgd", lr=0.3, weight_decay=0.1, grad_clip=0.05)
    grads, _ = gradients(engine, batch, objective)
    before = parameters_of(engine)
    norm = engine.update(batch, objective)["actor/grad_norm"].value
    assert norm > 0.05
    for name, parameter in engine._runner.model.named_parameters():
        # The decay is decoupled: it is not clipped with the gradient.
        expected = before[name] * (1 - 0.3 * 0.1) - 0.3 * grads[name] * (0.05 / norm)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_gradients_point_the_same_way(tiny, make_engine, gradients, batch, objective):
    exact, _ = gradients(make_engine(tiny), batch, objective)
    narrow, _ = gradients(make_engine(tiny, dtype="bfloat16"), batch, objective)
    flat = lambda grads: torch.cat([grads[name].flatten() for name in sorted(grads)])  # noqa: E731
    assert torch.nn.functional.cosine_similarity(flat(exact), flat(narrow), dim=0) > 0.99
    assert {g.dtype for g in narrow.values()} == {torch.float32}


def test_an_error_half_way_leaves_no_gradient_behind(
    tiny, make_engine, batch, objective, monkeypatch
):
    engine = make_engine(tiny, budget=33)
    calls, score = [], type(engine._runner).__call__

    def fail_the_second_time(self, layout, outputs):
        calls.append(layout)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return score(self, layout, outputs)

    monkeypatch.setattr(type(engine._runner), "__call__", fail_the_second_time)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.update(batch, objective)
    assert all(p.grad is None for p in engine._runner.model.parameters())


def test_a_mini_batch_without_tokens_is_still_one_step(tiny, make_engine, unscored, objective):
    engine = make_engine(tiny)
    metrics = engine.update(unscored, objective)
    assert engine._optimizer.steps == 1
    assert metrics["actor/grad_norm"].value == 0
    assert metrics["actor/loss"].value == 0


def test_before_start_there_is_a_clear_error(batch, tiny, make_engine):
    engine = make_engine(tiny)
    engine.close()
    with pytest.raises(DispatchError, match="no model yet"):
        engine.forward(batch, frozenset({"log_probs"}))


def test_the_engine_follows_its_schedule(tiny, make_engine, batch, objective):
    engine = make_engine(tiny, lr=1e-3, schedule="linear", total_steps=3)
    rates = [engine.update(batch, objective)["actor/lr"].value for _ in range(3)]
    assert rates == pytest.approx([1e-3, 5e-4, 0.0])
