"""The error if too few samples of a step have a score: the number of failures of each kind, and the first message of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from dovetail.errors import RewardError
from dovetail.interfaces import Failure, FailureKind
from dovetail_rollouts.sample_checks import check_failures

WRONG = Failure(kind=FailureKind.EXCEPTION, message="KeyError: 'answer'\n  in rewards.py, line 3")
LATE = Failure(kind=FailureKind.TIMEOUT, message="no outcome within 5 s")


def samples_of(make_sample: Any, outcomes: list[Failure | None]) -> list[Any]:
    return [
        make_sample(0, number)
        if outcome is None
        else attrs.evolve(make_sample(0, number), outcome=outcome)
        for number, outcome in enumerate(outcomes)
    ]


def said(samples: list[Any], share: float = 0.25) -> str:
    with pytest.raises(RewardError) as refused:
        check_failures(samples, share, 3, Path("run"))
    return refused.value.message


def test_every_cause_is_counted_the_most_frequent_first(make_sample: Any) -> None:
    other = attrs.evolve(WRONG, message="ValueError: later")
    samples = samples_of(make_sample, [LATE, WRONG, None, other, None, None])
    assert said(samples) == (
        "3 of 6 samples of step 3 could not be scored, more than reward.max_failure_share = 0.25 allows:\n"
        "  2 exception, the first: KeyError: 'answer'\n"
        "      in rewards.py, line 3\n"
        "  1 timeout: no outcome within 5 s"
    )


def test_where_nothing_is_scored_the_share_does_not_matter(make_sample: Any) -> None:
    assert "nothing to learn from:\n  2 timeout, the first:" in said(
        samples_of(make_sample, [LATE, LATE]), 1.0
    )


def test_a_share_within_the_limit_is_no_fault(make_sample: Any) -> None:
    check_failures(samples_of(make_sample, [LATE, None, None, None]), 0.25, 3, Path("run"))
