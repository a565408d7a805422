"""Conversion of requests to SGLang's form and of its answers, and metrics; SGLang is not needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dovetail.errors import RolloutError
from dovetail.interfaces import FinishReason, SamplingParams
from dovetail_rollout_sglang.calls import kept_mass, result_of, sampling_of, scores_of
from dovetail_rollout_sglang.server_metrics import server_metrics
from dovetail_serving import SampleCall


def answer(ids: list[int], kind: str = "stop", entries: Any = None) -> dict[str, Any]:
    about = {"finish_reason": {"type": kind}, "output_token_logprobs": entries}
    return {"output_ids": ids, "meta_info": about}


def test_stop_tokens_are_all_that_ends_a_sample() -> None:
    sampling = SamplingParams(max_new_tokens=8, stop_token_ids=(2, 9), top_k=0)
    asked = sampling_of(SampleCall(call_id="c", prompt_ids=[1], sampling=sampling))
    assert asked["stop_token_ids"] == [2, 9]
    assert asked["ignore_eos"] is True
    assert asked["top_k"] == -1
    assert "sampling_seed" not in asked
    seeded = sampling_of(SampleCall(call_id="c", prompt_ids=[1], sampling=sampling, seed=7))
    assert seeded["sampling_seed"] == 7


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("abort", FinishReason.ABORT),
    ],
)
def test_a_sample_comes_back_with_its_log_probabilities(kind: str, reason: FinishReason) -> None:
    entries = [[-0.5, 4, None], [-1.5, 5, None]]
    result = result_of(answer([4, 5], kind, entries), log_probs=True)
    assert result.finish_reason is reason
    assert result.response_ids.tolist() == [4, 5]
    assert result.log_probs is not None
    np.testing.assert_array_equal(result.log_probs, np.array([-0.5, -1.5], np.float32))


def test_of_a_truncated_sampler_both_log_probabilities_are_given() -> None:
    found = answer([4], entries=[[np.log(0.25), 4, None]])
    found["meta_info"]["output_top_logprobs"] = [[[np.log(0.5), 3, None], [np.log(0.25), 4, None]]]
    result = result_of(found, log_probs=True)
    assert result.log_probs is not None
    assert result.raw_log_probs is not None
    np.testing.assert_allclose(result.log_probs, np.log([0.25 / 0.75]), rtol=1e-6)
    np.testing.assert_allclose(result.raw_log_probs, np.log([0.25]), rtol=1e-6)
    np.testing.assert_allclose(kept_mass(np.log([0.5, 0.25]), 0.4), 0.5)


def test_answers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RolloutError, match="1 log-probabilities for 2 tokens"):
        result_of(answer([4, 5], entries=[[-0.5, 4, None]]), log_probs=True)
    with pytest.raises(RolloutError, match="finish reason"):
        result_of(answer([4], "bored"), log_probs=False)
    with pytest.raises(RolloutError, match=r"1 log-probabilities.* 3 tokens"):
        scores_of({"meta_info": {"input_token_logprobs": [[None, 1], [-1.0, 2]]}}, 3)


def test_the_first_token_of_a_sequence_has_no_score() -> None:
    entries = [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]
    scores = scores_of({"meta_info": {"input_token_logprobs": entries}}, 3)
    np.testing.assert_array_equal(scores, np.array([-1.0, -2.0], np.float32))


def test_metrics_are_what_grew_since_the_last_look() -> None:
    totals = {
        "new_tokens": 100.0,
        "prompt_tokens": 40.0,
        "cached_tokens": 10.0,
        "samples": 4.0,
        "busy_seconds": 2.0,
        "sample_seconds": 6.0,
        "running_max": 4.0,
    }
    delta = server_metrics()
    first = delta.since(totals)
    assert first["rollout/sglang/tokens_per_second"].value == 50.0
    assert first["rollout/sglang/running_requests"].value == 3.0
    assert delta.since(totals) == {}
    later = delta.since({**totals, "new_tokens": 130.0, "busy_seconds": 3.0})
    assert later["rollout/sglang/tokens_per_second"].value == 30.0
