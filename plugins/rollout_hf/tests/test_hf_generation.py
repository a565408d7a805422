"""Generation by HfRollout: samples depend only on their stream and the weights, and batches are full."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.interfaces import FinishReason

DECODERS = ("fused", "transformers")


@pytest.fixture(scope="session")
def reference(model_directory):
    return AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()


def test_greedy_follows_the_most_likely_token(start, generate, request_of, reference) -> None:
    request = request_of(1, n=1, temperature=0.0, log_probs=True)
    (completion,) = generate(start(), request).values()
    ids = torch.tensor(request.prompt_ids)
    for token in completion.response_ids:
        with torch.inference_mode():
            assert reference(ids[None]).logits[0, -1].argmax() == token
        ids = torch.cat([ids, torch.tensor([token])])
    assert completion.log_probs.tolist() == [0.0] * 8


def test_both_decoders_draw_the_same_samples(start, generate, request_of) -> None:
    requests = [request_of(i, n=4, length=3 + i, max_new_tokens=16) for i in range(4)]
    fused, plain = (generate(start(decoder=d), *requests) for d in DECODERS)
    for key in fused:
        assert fused[key].response_ids.tolist() == plain[key].response_ids.tolist()


@pytest.mark.parametrize("limit", [3, 8, 64])
def test_a_sample_does_not_depend_on_its_batch_mates(start, generate, request_of, limit) -> None:
    """Alone or in a crowd, with other lengths, early stops, compaction and late admission."""
    requests = [
        request_of(
            i, n=3, length=2 + i, max_new_tokens=4 + 5 * (i % 4), ignore_eos=False, temperature=1.0
        )
        for i in range(8)
    ]
    crowd = generate(start(max_batch_size=limit), *requests)
    lonely = start()
    for request in requests:
        for key, completion in generate(lonely, request).items():
            assert crowd[key].response_ids.tolist() == completion.response_ids.tolist()
            assert crowd[key].finish_reason == completion.finish_reason


def test_samples_of_one_prompt_differ_and_epochs_do_too(start, generate, request_of) -> None:
    completions = generate(start(), request_of(0, n=4), request_of(0, n=4, epoch=1))
    assert len({tuple(c.response_ids) for c in completions.values()}) == 8


def test_generating_twice_gives_the_same_bits(start, generate, request_of) -> None:
    rollout = start(max_batch_size=6)
    requests = [
        request_of(i, n=3, length=2 + i, log_probs=True, ignore_eos=False, max_new_tokens=20)
        for i in range(5)
    ]
    first, second = generate(rollout, *requests), generate(rollout, *requests)
    for key in first:
        assert first[key].response_ids.tobytes() == second[key].response_ids.tobytes()
        assert first[key].log_probs.tobytes() == second[key].log_probs.tobytes()


# Ends


def test_responses_end_at_end_of_sequence_or_length(start, generate, request_of) -> None:
    rollout = start()
    eos = rollout._model.config.eos_token_id
    completions = generate(
        rollout, *(request_of(i, n=16, ignore_eos=False, max_new_tokens=200) for i in range(4))
    )
    reasons = {c.finish_reason for c in completions.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for completion in completions.values():
        ids = completion.response_ids.tolist()
        if completion.finish_reason is FinishReason.STOP:
            assert ids.index(eos) == len(ids) - 1
        else:
            assert len(ids) == 200
            assert eos not in ids


def test_stop_tokens_and_stop_strings(start, generate, request_of) -> None:
    rollout = start()
    tokenizer = rollout._stops._tokenizer
    free = generate(rollout, request_of(2, n=8, max_new_tokens=40))
    token = int(free["p2.e0", 0].response_ids[5])
    text = tokenizer.decode(free["p2.e0", 1].response_ids.tolist())
    string = text[6:9]
    by_token = generate(rollout, request_of(2, n=8, max_new_tokens=40, stop_token_ids=(token,)))
    by_string = generate(rollout, request_of(2, n=8, max_new_tokens=40, stop=(string,)))
    assert by_token["p2.e0", 0].finish_reason is FinishReason.STOP
    assert by_string["p2.e0", 1].finish_reason is FinishReason.STOP
    for key, completion in free.items():
        ids = completion.response_ids.tolist()
        end = ids.index(token) + 1 if token in ids else 40
        assert by_token[key].response_ids.tolist() == ids[:end]
        end = next((i for i in range(1, 41) if string in tokenizer.decode(ids[:i])), 40)
        assert by_string[key].response_ids.tolist() == ids[:end]


# Batching


def test_each_prompt_is_prefilled_once_for_all_its_samples(
    start, generate, request_of, monkeypatch
) -> None:
    rollout = start(decoder="transformers")
    shapes = []
    forward = rollout._model.forward
    monkeypatch.setattr(
        rollout._model,
        "forward",
        lambda **kw: shapes.append(tuple(kw["input_ids"].shape)) or forward(**kw),
    )
    generate(rollout, *(request_of(i, n=5, max_new_tokens=4) for i in range(3)))
    # One pass over three prompts, which gives the first tokens; then three steps of fifteen rows.
    assert shapes == [(3, 6), (15, 1), (15, 1), (15, 1)]


def test_prefill_keeps_its_token_budget(start, generate, request_of, monkeypatch) -> None:
    rollout = start(max_prefill_tokens=20)
    shapes = []
    prefill = rollout.decoder.prefill
    monkeypatch.setattr(
        rollout.decoder,
        "prefill",
        lambda ids, *rest: shapes.append(tuple(ids.shape)) or prefill(ids, *rest),
    )
    completions = generate(
        rollout, *(request_of(i, n=2, length=n) for i, n in enumerate((9, 3, 30, 10)))
    )
    assert len(completions) == 8
    assert shapes == [(1, 30), (2, 10), (1, 3)]


def test_finished_rows_leave_the_batch(start, generate, request_of, monkeypatch) -> None:
    rollout = start()
    rows = []
    step = rollout.decoder.step
    monkeypatch.setattr(
        rollout.decoder,
        "step",
        lambda tokens, column: rows.append(len(tokens)) or step(tokens, column),
    )
    generate(rollout, request_of(0, n=6, max_new_tokens=3), request_of(1, n=2, max_new_tokens=9))
    assert rows == [8, 8, 2, 2, 2, 2, 2, 2]


def test_a_group_larger_than_the_batch_is_generated_in_parts(start, generate, request_of) -> None:
    completions = generate(start(max_batch_size=4), request_of(0, n=11), request_of(1, n=3))
    whole = generate(start(), request_of(0, n=11), request_of(1, n=3))
    assert {k: c.response_ids.tolist() for k, c in completions.items()} == {
        k: c.response_ids.tolist() for k, c in whole.items()
    }


def test_short_samples_arrive_before_long_ones_are_finished(start, request_of) -> None:
    rollout = start()

    async def run():
        order = []

        async def one(request):
            async for completion in rollout.submit(request):
                order.append(completion.request_id)

        await asyncio.gather(
            one(request_of(0, n=2, max_new_tokens=400)), one(request_of(1, n=1, max_new_tokens=2))
        )
        return order

    assert asyncio.run(run()) == ["p1.e0", "p0.e0", "p0.e0"]
