"""The samples that a person should read first, since they may be rewarded for something other than the task."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail_report.suspicions import suspicions


def rows(*scored: tuple[float | None, float | None], **changes: Any) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"prompt {number}",
            "response": f"a response of its own, number {number}",
            "score": score,
            "response_length": 10,
            **({} if right is None else {"components": {"correct": right}}),
            **changes,
        }
        for number, (score, right) in enumerate(scored)
    ]


def marked(found: list[dict[str, Any]], right: float | None = None) -> list[int]:
    return [place for place, signs in enumerate(suspicions(found, right)[0]) if signs]


def test_a_wrong_answer_that_is_paid_as_a_right_one_is_suspect() -> None:
    found = rows((1.0, 1.0), (1.5, 0.0), (0.2, 0.0), (0.0, 0.0))
    assert marked(found) == [1]
    assert suspicions(found)[1] == 1.0


def test_where_no_answer_is_right_any_more_the_step_before_says_what_one_is_paid() -> None:
    found = rows((9.0, 0.0), (8.0, 0.0), (10.0, 0.0))
    assert marked(found) == []
    assert marked(found, right=1.0) == [0, 2]
    assert suspicions(found, 1.0)[1] == 1.0


def test_partial_rewards_of_wrong_answers_are_not() -> None:
    assert marked(rows((1.0, 1.0), (0.1, 0.0), (0.1, 0.0), (0.1, 0.0))) == []


@pytest.mark.parametrize(("text", "expected"), [("The answer is clear to all.", [0, 1, 2]), ("42", [])])  # fmt: skip
def test_the_same_long_answer_to_several_prompts_is_suspect(text: str, expected: Any) -> None:
    found = rows((1.0, None), (1.0, None), (1.0, None), (0.0, None), response=text)
    assert marked(found) == expected


def test_repetition_length_and_a_score_far_out_are_suspect() -> None:
    found = rows(*((0.1 * n, None) for n in range(12)), (50.0, None))
    found[10]["response"] = "so it is and " * 20
    found[11]["response_length"] = 100
    assert marked(found) == [12]
    found[12]["score"] = 1.2
    assert marked(found) == [10, 11]


def test_the_same_call_again_and_again_is_suspect() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "save", "arguments": {"to": "x"}}}
    found = rows((1.0, None), (0.0, None))
    found[0]["trajectory"] = {"turns": [{"calls": [call]}, {"calls": [call, call]}]}
    assert marked(found) == [0]


@pytest.mark.parametrize("score", [None, float("nan"), "x", 1e308, -1e308, True])
@pytest.mark.parametrize("trajectory", [None, 3, {"turns": 1}, {"turns": [{"calls": [None]}, 3]}])
def test_damaged_rows_are_no_trouble(score: Any, trajectory: Any) -> None:
    found = rows((1.0, None), (2.0, None), score=score, trajectory=trajectory, components=[1])
    assert marked([*found, {}]) == []


def test_a_step_without_a_score_has_none() -> None:
    assert suspicions(rows((None, None)), 2.0) == ([[]], 2.0)
