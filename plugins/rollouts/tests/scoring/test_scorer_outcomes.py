"""The scorer returns one valid outcome for every sample, whatever a manager does, and never a number for a failure."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.interfaces import Failure, FailureKind, Score
from dovetail_rollouts import Scorer


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("boom"), "RuntimeError: boom"),
        (SystemExit(1), "SystemExit(1)"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (TimeoutError("inner"), "TimeoutError: inner"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
def test_a_manager_that_raises_fails_every_sample_of_the_call(scripted, error, text) -> None:
    def answer(*_: Any) -> Any:
        raise error

    outcomes, _ = scripted.run(scripted.Manager(answer, unit="group"), ["a0", "a1"], group_size=2)
    assert [o.kind for o in outcomes.values()] == [FailureKind.CRASH] * 2
    assert outcomes["a0"].message.startswith("reward manager 'scripted' raised ")
    assert text in outcomes["a0"].message


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([], "returned 0 outcomes for 2 samples"),
        ([Score(value=1.0)] * 3, "returned 3 outcomes for 2 samples"),
        (None, "returned NoneType"),
        (1.0, "returned float"),
        ("ab", "returned str"),
        ({"a0": 1.0, "a1": 1.0}, "returned dict"),
    ],
)
def test_an_answer_of_the_wrong_form_fails_the_whole_call(scripted, answer, text) -> None:
    outcomes, _ = scripted.run(
        scripted.Manager(lambda *_: answer, unit="group"), ["a0", "a1"], group_size=2
    )
    assert all(isinstance(outcome, Failure) for outcome in outcomes.values())
    assert text in outcomes["a1"].message


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (1.0, "1.0 (float)"),
        (None, "None (NoneType); expected"),
        (Score(value=math.nan), "the value nan"),
        (Score(value=math.inf), "the value inf"),
        (Score(value=1e39), "the value 1e+39"),
        (Score(value="1.0"), "the value '1.0'"),
        (Score(value=None), "the value None"),
        (Score(value=1.0, components={"acc": math.nan}), "the component acc = nan"),
        (Score(value=1.0, components=None), "raised AttributeError"),
        (Score(value=1.0, token_rewards=np.ones(2)), "2 token rewards for 3 response tokens"),
        (Score(value=3.0, token_rewards=np.array([1, np.nan, 2])), "not all finite"),
        (Score(value=1.0, token_rewards=np.array([0, 0, 2.0])), "sum to 2, but the value 1"),
        (Score(value=1.0, token_rewards=np.ones((3, 1))), "shape (3, 1)"),
        (Score(value=1.0, token_rewards=np.array(["a", "b", "c"])), "dtype <U1"),
    ],
)
def test_an_invalid_outcome_is_a_failure_that_shows_it(scripted, outcome, text) -> None:
    async def main() -> Any:
        scorer = Scorer(scripted.Manager(lambda *_: [outcome]), timeout=5.0)
        scorer.add(scripted.sample("a", response_ids=np.arange(3)), group=0, group_size=1)
        return await scorer.finish()

    result = scripted.until_done(main())["a"]
    assert isinstance(result, Failure)
    assert text in result.message


numbers = st.one_of(
    st.floats(), st.integers(), st.booleans(), st.none(), st.text(max_size=3), st.complex_numbers()
)
answers = st.one_of(
    numbers,
    st.builds(lambda v: Score(value=v), numbers),
    st.builds(lambda v, c: Score(value=v, components={"c": c}), numbers, numbers),
    st.builds(
        lambda k, r: Failure(kind=k, message="", retryable=r),
        st.sampled_from(FailureKind),
        st.booleans(),
    ),
    st.just(RuntimeError("boom")),
)


@given(script=st.lists(answers, max_size=10), retries=st.integers(0, 2))
def test_every_sample_gets_one_outcome_and_no_failure_becomes_a_number(
    scripted, script, retries
) -> None:
    def answer(samples: Any, *_: Any) -> Any:
        chosen = script[int(samples[0].sample_id)]
        if isinstance(chosen, Exception):
            raise chosen
        return [chosen]

    async def main() -> Any:
        scorer = Scorer(scripted.Manager(answer), timeout=5.0, retries=retries, backoff=0.0)
        for i in range(len(script)):
            scorer.add(scripted.sample(str(i)), group=i, group_size=1)
        return await scorer.finish()

    outcomes = scripted.until_done(main())
    assert list(outcomes) == [str(i) for i in range(len(script))]
    for chosen, outcome in zip(script, outcomes.values(), strict=True):
        if not isinstance(outcome, Failure):
            assert isinstance(chosen, Score)
            assert outcome.value == chosen.value
            assert math.isfinite(np.float32(outcome.value))
            assert all(math.isfinite(part) for part in outcome.components.values())
