"""HfRollout's scores of given sequences, and its metrics."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.errors import RolloutError
from dovetail_rollout_hf import scoring


@pytest.mark.parametrize("at_once", [1, 1 << 26])
def test_scores_are_those_of_plain_passes_however_many_sequences_go_together(
    start, model_directory, monkeypatch, at_once
) -> None:
    monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 300, length) for length in (5, 2, 17, 5, 5, 2)]
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float64).eval()
    scored = asyncio.run(start().score(sequences))
    for ids_L, log_probs_L in zip(sequences, scored, strict=True):
        ids = torch.from_numpy(ids_L)
        with torch.inference_mode():
            plain = model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected_L = plain.gather(-1, ids[1:, None])[:, 0].numpy()
        assert log_probs_L.dtype == np.float32
        np.testing.assert_allclose(log_probs_L, expected_L, atol=1e-5)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([7], "sequence 1 of 2 can't.*number of tokens is 1; expected 2"),
        ([7, 300], "token ids outside 0 … 299"),
        ([-1, 7], "token ids outside 0 … 299"),
        ([7] * 4097, "its 4097 tokens.*model's 4096 positions"),
    ],
)
def test_what_can_not_be_scored_is_refused_in_words(start, sequence, message) -> None:
    with pytest.raises(RolloutError, match=message):
        asyncio.run(start().score([np.array([1, 2]), np.array(sequence)]))


def test_scoring_goes_on_beside_generation(start, request_of) -> None:
    rollout = start()

    async def run():
        async def one():
            return [c async for c in rollout.submit(request_of(0, max_new_tokens=200))]

        return await asyncio.gather(one(), rollout.score([np.array([1, 2, 3])]))

    completions, (scored_L,) = asyncio.run(run())
    assert [len(c.response_ids) for c in completions] == [200, 200]
    assert scored_L.shape == (2,)


def test_figures_count_tokens_and_how_full_the_batch_was(start, generate, request_of) -> None:
    rollout = start(max_batch_size=8)
    assert "rollout/generated_tokens" in rollout.metrics()
    # Ten steps: four with six rows, six with two. Two prompts of six tokens, each computed once for all of its samples.
    generate(rollout, request_of(0, n=4, max_new_tokens=4), request_of(1, n=2, max_new_tokens=10))
    figures = {name: metric.value for name, metric in rollout.metrics().items()}
    assert figures == {
        "rollout/generated_tokens": 36,
        "rollout/prefill_tokens": 12,
        "rollout/running_samples": 3.6,
        "rollout/batch_occupancy": 0.45,
    }
    assert rollout.metrics()["rollout/generated_tokens"].value == 0


def test_an_engine_that_does_not_run_has_no_figures(start) -> None:
    rollout = start()
    rollout.close()
    assert rollout.metrics() == {}
