"""Samples with images: log-probabilities and gradients equal those of transformers' own forward pass."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trained_engines import updated
from transformers import AutoModelForImageTextToText
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from dovetail.batch import Batch, Ragged
from dovetail.errors import ConfigError, DataError, ModelError
from dovetail.interfaces import OUTPUTS
from dovetail.plugins import objective_spec
from dovetail.sections import ModelSection
from dovetail_datasets import open_image
from dovetail_datasets.images import keep
from dovetail_datasets.media.processor import ImagePrompts
from dovetail_datasets.tokenizer import load_tokenizer
from dovetail_sdk.testing import square, tiny_vision_model
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.layout import lay_out
from dovetail_train_fsdp2.vision import vision_parameters

SIZES = ((56, 56), (84, 140))


@pytest.fixture(scope="module", params=["qwen2_5_vl", "llava"])
def model(tmp_path_factory, request):
    return made(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return made(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


def made(directory, family):
    """A model on disk, and a batch for it: groups with one image, with two and with none."""
    tiny_vision_model(directory, family=family)
    section = ModelSection(path=str(directory), dtype="float32")
    prompts = ImagePrompts(section, load_tokenizer(section))
    kept = [
        keep(directory / "media", square((200, 90 * number, 30), *size))
        for number, size in enumerate(SIZES)
    ]
    mark, rng = prompts.placeholder, np.random.default_rng(0)
    rows = [(f"a{mark}b", kept[:1]), (f"{mark} and {mark}", kept[::-1]), ("text alone", [])]
    ids, media, responses = [], [], []
    for text, images in rows:
        pictures = [open_image(reference.read(), "it") for reference in images]
        for _ in range(2):
            ids.append(prompts.ids(text, pictures))
            media.append([reference.as_json() for reference in images])
            responses.append(rng.integers(10, 400, int(rng.integers(3, 9))))
    # A policy may produce the token that stands for an image in prompts.
    responses[0][1] = responses[2][0] = prompts.image_token
    response_ids = Ragged.from_list(responses, dtype=np.int64)
    tokens = len(response_ids.values)
    batch = Batch(
        {
            "prompt_ids": Ragged.from_list(ids, dtype=np.int64),
            "media": media,
            "response_ids": response_ids,
            "response_mask": response_ids.with_values(np.ones(tokens, dtype=np.bool_)),
            "temperature": np.ones(len(ids), dtype=np.float32),
            "advantages": rng.normal(size=len(ids)).astype(np.float32),
            "sample_id": [f"s{i}" for i in range(len(ids))],
        }
    )
    return SimpleNamespace(path=directory, batch=batch, kept=kept)


def plain(path, batch):
    """The model, and the log-probabilities of each sample's response: prompt first, then response over its cache."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(path)
    rows = []
    for prompt, media, response in zip(
        batch["prompt_ids"], batch["media"], batch["response_ids"], strict=True
    ):
        ids, inputs = torch.from_numpy(np.array(prompt))[None], {}
        if media:
            pictures = [open_image(Path(one["path"]).read_bytes(), "it") for one in media]
            inputs = dict(processor(images=pictures, return_tensors="pt"))
            if hasattr(model.base_model, "get_rope_index"):
                inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
        elif hasattr(model.base_model, "get_rope_index"):
            model.base_model.rope_deltas = None
        first = model(input_ids=ids, use_cache=True, **inputs)
        answer = torch.from_numpy(np.array(response))[None]
        rest = model(input_ids=answer, past_key_values=first.past_key_values, use_cache=True)
        logits = torch.cat([first.logits[0, -1:], rest.logits[0, :-1]])
        rows.append(logits.log_softmax(-1).gather(1, answer[0][:, None])[:, 0])
    return model, rows


@pytest.mark.parametrize("budget", [16384, 40])
def test_log_probabilities_are_those_of_a_plain_forward_pass(make_engine, model, budget):
    engine = make_engine(model.path, budget=budget)
    found = engine.forward(model.batch, frozenset({"log_probs"}))["log_probs"]
    with torch.no_grad():
        _, rows = plain(model.path, model.batch)
    for ours, theirs in zip(found, rows, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


def test_gradients_reach_the_vision_tower_and_are_those_of_plain_autograd(
    make_engine, model, gradients, new_objective
):
    engine = make_engine(model.path)
    seen, _ = gradients(engine, model.batch, new_objective(old_log_probs_from_current=True))
    oracle, rows = plain(model.path, model.batch)
    tokens = len(model.batch["response_ids"].values)
    advantages = model.batch["advantages"].tolist()
    # The old log-probabilities equal the current ones: the ratio is 1, and its gradient that of the log-probability.
    loss = -sum(a * row.sum() for a, row in zip(advantages, rows, strict=True)) / tokens
    loss.backward()
    expected = {n: p.grad for n, p in oracle.named_parameters() if p.grad is not None}
    assert any("vision" in name or "visual" in name for name in expected)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-3, atol=1e-6 * largest, msg=name)


def test_a_frozen_vision_tower_stays_as_it_is(make_engine, qwen, new_objective):
    engine = make_engine(qwen.path, config=Fsdp2Config(freeze_vision=True), name="sgd", lr=0.5)
    trunk = engine._runner.trunk
    before = {name: p.detach().clone() for name, p in trunk.named_parameters()}
    engine.update(qwen.batch, new_objective(old_log_probs_from_current=True))
    moved = {n for n, p in trunk.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert moved
    assert not {name for name in moved if "visual" in name}


@pytest.mark.parametrize("any_head", [False, True])
def test_ranks_with_and_without_images_do_as_one(
    two, make_engine, on_ranks, qwen, new_objective, tmp_path, any_head
):
    """One rank gets the long samples, which are those with images, and the other one may get none of them."""
    goal, sgd = new_objective(old_log_probs_from_current=True), {"name": "sgd", "lr": 0.5}
    batch = qwen.batch.take([0, 4, 5])
    alone = make_engine(qwen.path, seed=3, **sgd)
    group = on_ranks(two, qwen.path, optim=sgd, budget=4096, any_head=any_head)
    one, both = (
        updated(engine, batch, goal, tmp_path / name, steps=1)
        for engine, name in ((alone, "one"), (group, "two"))
    )
    norms = (metrics["actor/grad_norm"] for (metrics,), _ in (one, both))
    assert math.isclose(*norms, rel_tol=1e-4)
    torch.testing.assert_close(both[1], one[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plain_head", [True, False])
def test_without_images_of_its_own_a_rank_gives_the_vision_tower_zeros(
    make_engine, qwen, plain_head
):
    runner = make_engine(qwen.path)._runner
    runner.vision_everywhere, runner._plain_head = True, plain_head
    text = qwen.batch.take([4, 5]).drop(["media"])
    runner(lay_out(text), [OUTPUTS["log_probs"]])["log_probs"].sum().backward()
    for parameter in vision_parameters(runner.trunk):
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter))


def test_what_can_not_be_looked_at_is_refused_in_words(make_engine, qwen, tiny, tmp_path):
    outputs = frozenset({"log_probs"})
    text_only = make_engine(tiny)
    low = qwen.batch["prompt_ids"].with_values(qwen.batch["prompt_ids"].values % 300)
    batch = qwen.batch.take([0]).with_columns(
        {"prompt_ids": low.take([0]), "response_ids": Ragged.from_list([np.arange(3)]),
         "response_mask": Ragged.from_list([np.ones(3, bool)])}
    )  # fmt: skip
    with pytest.raises(ModelError, match="takes no images"):
        text_only.forward(batch, outputs)
    with pytest.raises(ConfigError, match="no vision tower"):
        make_engine(tiny, config=Fsdp2Config(freeze_vision=True))
    gone = qwen.batch.take([0]).with_columns(
        {"media": [[{"kind": "image", "digest": "0" * 64, "path": str(tmp_path / "gone.png")}]]}
    )
    engine = make_engine(qwen.path)
    with pytest.raises(DataError, match=r"gone\.png'"):
        engine.forward(gone, outputs)
    (tmp_path / "gone.png").write_bytes(square((1, 2, 3)))
    with pytest.raises(DataError, match=r"gone\.png.* changed"):
        engine.forward(gone, outputs)


def test_text_alone_may_be_packed_and_scores_the_same(make_engine, model):
    engine = make_engine(model.path)
    text = model.batch.take([4, 5])
    found = engine.forward(text.drop(["media"]), frozenset({"log_probs"}))["log_probs"]
    with torch.no_grad():
        _, rows = plain(model.path, text)
    for ours, theirs in zip(found, rows, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


@pytest.mark.parametrize("at_least", [1, 5])
def test_samples_of_text_are_packed_beside_those_with_images(make_engine, qwen, at_least):
    plans = make_engine(qwen.path)._cut(qwen.batch, at_least=at_least)
    assert len(plans) >= at_least
    assert rows_of(plans, packed=False) == [0, 1, 2, 3]
    assert rows_of(plans, packed=True) == [4, 5]


def test_samples_that_stay_together_are_padded_where_one_has_an_image(make_engine, qwen):
    batch = qwen.batch.with_columns({"group_id": np.array([0, 0, 1, 1, 1, 2])})
    plans = make_engine(qwen.path)._cut(batch, unit="group")
    assert rows_of(plans, packed=False) == [0, 1, 2, 3, 4]
    assert rows_of(plans, packed=True) == [5]


def rows_of(plans, *, packed):
    return sorted(row for plan in plans if plan.packed == packed for row in plan.rows_B.tolist())


def test_a_critic_looks_too(make_engine, qwen):
    engine = make_engine(qwen.path, head="value")
    for parameter in engine._runner.model.value_head.parameters():
        torch.nn.init.ones_(parameter)  # a new head is 0, so that all values are 0
    one, blind = qwen.batch.take([0]), qwen.batch.take([0]).drop(["media"])
    seen, unseen = (engine.forward(b, frozenset({"values"}))["values"].values for b in (one, blind))
    assert np.abs(seen - unseen).max() > 1e-3


def conversations(directory, kept):
    """Examples with an image in the prompt and another in a later turn, with one in a later turn alone, and of text."""
    section = ModelSection(path=str(directory), dtype="float32")
    prompts = ImagePrompts(section, load_tokenizer(section))
    pictures = [open_image(reference.read(), "it") for reference in kept]
    mark, rng = prompts.placeholder, np.random.default_rng(1)
    asked, later = prompts.ids(f"a{mark}b", pictures[:1]), prompts.ids(f"c{mark}d", pictures[1:])
    words = [rng.integers(10, 400, n) for n in (5, 3, 4, 6, 7)]
    words[4][2] = prompts.image_token  # an image token of the model itself
    rows = [
        (asked, (words[0], later, words[1]), kept),
        (words[2], (words[3], later, words[0]), kept[1:]),
        (words[1], (words[4], words[2], words[3]), []),
        (asked, (words[4], words[2], words[3]), kept[:1]),
    ]
    ids = Ragged.from_list([np.concatenate(parts) for _, parts, _ in rows], dtype=np.int64)
    trained = [np.repeat([True, False, True], list(map(len, parts))) for _, parts, _ in rows]
    stands = [
        (np.concatenate(p) == prompts.image_token) & ~m
        for (_, p, _), m in zip(rows, trained, strict=True)
    ]
    return Batch(
        {
            "prompt_ids": Ragged.from_list([prompt for prompt, _, _ in rows], dtype=np.int64),
            "media": [[reference.as_json() for reference in media] for _, _, media in rows],
            "response_ids": ids,
            "response_mask": ids.with_values(np.concatenate(trained)),
            "image_mask": ids.with_values(np.concatenate(stands)),
            "temperature": np.ones(len(rows), np.float32),
            "sample_id": [f"s{i}" for i in range(len(rows))],
        }
    )  # fmt: skip


def plain_nll(path, batch):
    """The model and the mean −log π of the trained tokens, each example by itself in one forward pass, in float32."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    processor, token = AutoImageProcessor.from_pretrained(path), model.config.image_token_id
    total, columns = 0, ("prompt_ids", "response_ids", "response_mask", "media")
    for prompt, response, mask, media in zip(*(batch[name] for name in columns), strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        shown = torch.from_numpy(np.concatenate([np.ones(len(prompt), bool), ~mask]))[None]
        inputs = {}
        if media:
            pictures = [open_image(Path(one["path"]).read_bytes(), "it") for one in media]
            inputs = dict(processor(images=pictures, return_tensors="pt"))
            if hasattr(model.base_model, "get_rope_index"):
                inputs["mm_token_type_ids"] = ((ids == token) & shown).long()
        # An image token that the model produced is embedded as a token, and not replaced by an image.
        written = (ids == token) & ~shown
        embeds = model.get_input_embeddings()(ids)
        stand_in = ids.masked_fill(written, 11)
        hook = model.get_input_embeddings().register_forward_hook(lambda *_, e=embeds: e)
        logits = model(input_ids=stand_in, **inputs).logits[0, len(prompt) - 1 : -1]
        hook.remove()
        answer = torch.from_numpy(np.array(response))
        log_pi = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
        total = total - log_pi[torch.from_numpy(np.array(mask))].sum()
    return model, total / int(batch["response_mask"].values.sum())


@pytest.mark.parametrize("budget", [16384, 40])
def test_loss_and_gradient_of_examples_with_images_in_later_turns_are_those_of_transformers(
    make_engine, model, gradients, budget
):
    batch = conversations(model.path, model.kept)
    engine = make_engine(model.path, budget=budget)
    seen, metrics = gradients(engine, batch, objective_spec("nll"))
    oracle, loss = plain_nll(model.path, batch)
    loss.backward()
    assert math.isclose(metrics["actor/loss"], loss.item(), rel_tol=1e-5)
    expected = {n: p.grad for n, p in oracle.named_parameters() if p.grad is not None}
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (seen[name] - gradient).norm() <= 1e-5 * total, name


def test_images_behind_the_last_scored_token_are_fed_whole(make_engine, qwen):
    batch = conversations(qwen.path, qwen.kept).take([0])
    mask = batch["response_mask"]
    first = mask.with_values(mask.values & (np.arange(len(mask.values)) < 5))
    outputs = frozenset({"log_probs"})
    engine = make_engine(qwen.path)
    whole = engine.forward(batch, outputs)["log_probs"].values
    part = engine.forward(batch.with_columns({"response_mask": first}), outputs)["log_probs"].values
    np.testing.assert_allclose(part[:5], whole[:5], atol=1e-5)
