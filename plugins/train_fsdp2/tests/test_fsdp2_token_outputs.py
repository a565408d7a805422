"""Outputs of several words for each token: equal to transformers in float64, for any layout, packing and division among ranks.

Legend: T response tokens, K words of each, V vocabulary.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.batch import Ragged
from dovetail.errors import ColumnError, ConfigError
from dovetail.interfaces import OUTPUTS
from dovetail.plugins import objective_spec
from dovetail.sections import PluginSection
from dovetail_train_fsdp2.config import Fsdp2Config

VOCABULARY, K = 300, 5
AT = OUTPUTS["log_probs_at"].sized(K, reads={"words"})
TOP = (OUTPUTS["top_ids"].sized(K), OUTPUTS["top_log_probs"].sized(K))
LAYOUTS = [
    {"packing": "never"},
    {"packing": "always", "share_prompts": "never"},
    {"packing": "always", "share_prompts": "always"},
]


@pytest.fixture
def worded(batch):
    """The batch with words of every token, the token itself among some, and weights of them."""
    rng = np.random.default_rng(3)
    mask, responses = batch["response_mask"], batch["response_ids"]
    words_TK = np.stack([rng.permutation(VOCABULARY)[:K] for _ in range(mask.total)])
    words_TK[::3, 2] = responses.values[::3]
    weights_TK = rng.random(words_TK.shape).astype(np.float32)
    return batch.with_columns(
        {
            "words": mask.with_values(words_TK.astype(np.int32)),
            "word_weights": mask.with_values(weights_TK),
        }
    )


@pytest.fixture
def goal():
    path = str(Path(__file__).parent / "at_words.py")
    return objective_spec(PluginSection(path=path, attribute="AtWords"))


def log_pi_of(model, batch):
    """log π, float64 [T, V], sample by sample."""
    rows = []
    columns = ("prompt_ids", "response_ids", "temperature")
    for prompt, response, temperature in zip(*(batch[name] for name in columns), strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        logits = model(ids).logits[0, len(prompt) - 1 : ids.shape[1] - 1][: len(response)]
        rows.append((logits / float(temperature)).log_softmax(-1))
    return torch.cat(rows)


def exact_model(path):
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager"
    ).eval()


def assert_scores(scored, path, batch):
    with torch.no_grad():
        log_pi_TV = log_pi_of(exact_model(path), batch)
    mask_T1 = batch["response_mask"].values[:, None]
    words_TK = torch.from_numpy(batch["words"].values.astype(np.int64))
    top_TK, ids_TK = log_pi_TV.topk(K)
    assert scored["top_ids"].dtype == np.int32
    np.testing.assert_array_equal(scored["top_ids"].values, ids_TK.numpy() * mask_T1)
    np.testing.assert_allclose(scored["top_log_probs"].values, top_TK.numpy() * mask_T1, atol=2e-5)
    at_TK = log_pi_TV.gather(-1, words_TK).numpy()
    np.testing.assert_allclose(scored["log_probs_at"].values, at_TK * mask_T1, atol=2e-5)


@pytest.mark.parametrize("plain_head", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_words_and_their_log_probabilities_are_the_models(
    tiny, make_engine, worded, layout, plain_head
):
    engine = make_engine(tiny, config=Fsdp2Config(**layout), budget=64)
    engine._runner._plain_head = engine._runner.can_share_prompts = plain_head
    scored = engine.forward(worded, frozenset({"log_probs", AT, *TOP}))
    assert_scores(scored, tiny, worded)


@pytest.mark.parametrize("plain_head", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_at_words_is_that_of_the_plain_formula(
    tiny, make_engine, worded, goal, gradients, layout, plain_head
):
    model = exact_model(tiny)
    log_pi_TV = log_pi_of(model, worded)
    mask_T = torch.from_numpy(worded["response_mask"].values)
    words_TK = torch.from_numpy(worded["words"].values.astype(np.int64))
    weights_TK = torch.from_numpy(worded["word_weights"].values)
    chosen_T = log_pi_TV.gather(-1, torch.from_numpy(worded["response_ids"].values)[:, None])[:, 0]
    losses_T = -(weights_TK * log_pi_TV.gather(-1, words_TK)).sum(-1) - chosen_T
    loss = (losses_T * mask_T).sum() / mask_T.sum()
    loss.backward()

    engine = make_engine(tiny, config=Fsdp2Config(**layout), budget=64)
    engine._runner._plain_head = engine._runner.can_share_prompts = plain_head
    found, metrics = gradients(engine, worded, goal)
    assert metrics["actor/nll"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name].double(), parameter.grad, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("degree", [1, 2])
def test_two_ranks_give_the_words_and_the_update_of_one(
    two, tiny, on_ranks, make_engine, worded, goal, tmp_path, degree
):
    sgd = {"name": "sgd", "lr": 0.5}
    group = on_ranks(two, tiny, optim=sgd, sequence_parallel_size=degree)
    order = np.random.default_rng(1).permutation(len(worded))
    moved = worded.take(order)
    assert_scores(group.forward(moved, frozenset({AT, *TOP})).result(), tiny, moved)

    alone = make_engine(tiny, **sgd)
    one = alone.update(worded, goal)
    both = group.update(worded, goal).result()
    assert both["actor/nll"].value == pytest.approx(one["actor/nll"].value, rel=1e-5)
    after = alone.forward(worded, frozenset({AT}))["log_probs_at"].values
    together = group.forward(worded, frozenset({AT})).result()["log_probs_at"].values
    np.testing.assert_allclose(together, after, atol=2e-5)


def test_columns_that_hold_no_words_are_refused(tiny, make_engine, worded):
    engine = make_engine(tiny)
    words = worded["words"]
    shifted = Ragged.from_list([row[1:] for row in words], np.int32, inner=(K,))
    for column, said in (
        (words.with_values(words.values + VOCABULARY), "token id .* 300"),
        (words.with_values(words.values.astype(np.float32)), "float32.*expected integers"),
        (words.with_values(words.values[:, :2]), r"int32 \[T, 2\]; expected integers \[T, 5\]"),
        (shifted, "differ in length"),
    ):
        with pytest.raises(ColumnError, match=said):
            engine.forward(worded.with_columns({"words": column}), frozenset({AT}))
    with pytest.raises(ColumnError, match="words"):
        engine.forward(worded.drop(["words"]), frozenset({AT}))


def test_more_words_than_there_are_and_no_number_of_words_are_refused(tiny, make_engine, worded):
    engine = make_engine(tiny)
    with pytest.raises(ConfigError, match=r"301 token ids .* 300"):
        engine.forward(worded, frozenset({OUTPUTS["top_ids"].sized(301)}))
    with pytest.raises(ConfigError, match=r"'top_ids' as int32 \[\?\] for each token"):
        engine.forward(worded, frozenset({"top_ids"}))
