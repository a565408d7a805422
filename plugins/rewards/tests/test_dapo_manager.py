"""The DAPO manager's penalty, against the paper's three cases."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.interfaces import (
    FailureKind,
    PluginContext,
    RewardFunctions,
    RunningTime,
)
from dovetail_rewards.manager_config import DapoConfig
from dovetail_rewards.managers.dapo import DapoManager
from dovetail_sdk.testing import make_sample


def score(answer: Any, length: int | None, **config: Any) -> Any:
    context = PluginContext(reward_functions=RewardFunctions(default=lambda: answer))
    manager = DapoManager(DapoConfig(**config), context)
    manager.start()
    ids = None if length is None else np.arange(length)
    row = make_sample("s", response_ids=ids)
    try:
        return asyncio.run(manager.score([row], RunningTime()))[0]
    finally:
        manager.close()


def paper(length: int, longest: int, buffer: int, factor: float) -> float:
    """R_length of DAPO, eq. 13, times the factor."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer * factor
    return -factor


@given(
    length=st.integers(0, 40),
    longest=st.integers(1, 30),
    buffer=st.integers(1, 30),
    factor=st.floats(0, 4),
    value=st.floats(-5, 5),
)
def test_the_penalty_is_the_papers(length, longest, buffer, factor, value) -> None:
    outcome = score(value, length, max_response_length=longest, buffer=buffer, factor=factor)
    expected = paper(length, longest, buffer, factor)
    assert outcome.components["overlong"] == pytest.approx(expected, abs=1e-12)
    assert outcome.value == pytest.approx(value + expected, abs=1e-12)


def test_it_lies_on_the_last_token_of_token_rewards() -> None:
    answer = {"token_rewards": [1.0, 0.0, 0.5], "acc": 1.0}
    outcome = score(answer, 3, max_response_length=4, buffer=2, factor=1.0)
    assert outcome.value == 1.0
    assert outcome.token_rewards.tolist() == [1.0, 0.0, 0.0]
    assert outcome.components == {"acc": 1.0, "overlong": -0.5}


def test_a_failure_gets_no_penalty_and_an_unknown_length_is_one() -> None:
    config = {"max_response_length": 4, "buffer": 2}
    assert score(None, 9, **config).kind is FailureKind.INVALID_VALUE
    outcome = score(1.0, None, **config)
    assert outcome.kind is FailureKind.INVALID_VALUE
    assert "no response_ids" in outcome.message
