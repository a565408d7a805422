"""Penalties on length and repetition, compared with plain formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError, RewardError
from dovetail.interfaces import PluginContext
from dovetail_rewards_extra.config import LengthPenaltyConfig, RepetitionPenaltyConfig
from dovetail_rewards_extra.shaping import LengthPenalty, RepetitionPenalty
from dovetail_rollouts import RewardCall
from dovetail_sdk.testing import make_sample


def length(text: str, **config: Any) -> dict[str, Any]:
    """Return the penalty on a text whose tokens are its characters."""
    function = LengthPenalty(LengthPenaltyConfig(**config), PluginContext())
    return dict(function.compute_score(None, text, None, response_ids=list(text.encode())))


def repetition(text: str, **config: Any) -> dict[str, Any]:
    function = RepetitionPenalty(RepetitionPenaltyConfig(**config), PluginContext())
    return dict(function.compute_score(None, text, None))


@given(
    x=st.integers(0, 60),
    limit=st.integers(1, 40),
    buffer=st.integers(0, 40),
    penalty=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_long_end_is_the_soft_overlong_punishment_of_dapo(x, limit, buffer, penalty) -> None:
    buffer = min(buffer, limit)
    if x <= limit - buffer and x < limit:
        expected = 0.0
    elif x < limit:
        expected = ((limit - buffer) - x) / buffer
    else:
        expected = -1.0
    config = {"limit": limit, "buffer": buffer, "penalty": penalty}
    for unit, text in (("words", "w " * x), ("characters", "c" * x), ("tokens", " " * x)):
        parts = length(text, unit=unit, **config)
        assert parts["score"] == pytest.approx(penalty * expected)
        assert parts["length"] == x


def test_tokens_are_those_of_the_sample() -> None:
    config = LengthPenaltyConfig(unit="tokens", limit=4, buffer=2)
    penalty = RewardCall(LengthPenalty(config, PluginContext()).compute_score)
    scores = [penalty(make_sample("s", response_ids=np.arange(n)))["score"] for n in range(6)]
    assert scores == [0.0, 0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(RewardError, match="response_ids"):
        penalty(make_sample("s"))


@pytest.mark.parametrize(
    ("words", "score"), [(0, -2.0), (1, -1.5), (2, -1.0), (4, 0.0), (8, 0.0), (9, -1.0), (10, -2.0)]
)
def test_too_short_costs_as_well(words, score) -> None:
    config = {"limit": 10, "buffer": 2, "minimum": 4, "penalty": 2.0}
    assert length("w " * words, **config)["score"] == pytest.approx(score)


@pytest.mark.parametrize(
    "config",
    [
        {"limit": 0},
        {"limit": 5, "buffer": 6},
        {"limit": 5, "buffer": 3, "minimum": 3},
        {"limit": 5, "penalty": -1.0},
    ],
)
def test_lengths_that_contradict_each_other_are_refused(config) -> None:
    with pytest.raises(ValueError, match=r"limit|buffer|minimum|penalty"):
        LengthPenaltyConfig(**config)


def test_a_config_file_is_told_which_length_contradicts() -> None:
    def load(**lengths: int) -> Any:
        section = {"name": "length_penalty", **lengths}
        return config_from_mapping(
            {
                "model": {"path": "m"},
                "data": {"train_files": ["d"]},
                "reward": {"function": section},
            }
        ).config.reward.function

    expected = LengthPenaltyConfig(name="length_penalty", limit=9, buffer=4, minimum=2)
    assert load(limit=9, buffer=4, minimum=2) == expected
    with pytest.raises(ConfigError, match=r"buffer=10 .*limit=9"):
        load(limit=9, buffer=10)
    with pytest.raises(ConfigError, match=r"reward\.function\.buffer = -1 .*>= 0"):
        load(limit=9, buffer=-1)


def repeated_share(pieces: list[str], n: int) -> float:
    """Return the share of n-grams that occurred before, counted one by one."""
    seen: list[list[str]] = []
    repeated = 0
    for i in range(len(pieces) - n + 1):
        run = pieces[i : i + n]
        repeated += run in seen
        seen.append(run)
    return repeated / len(seen) if len(seen) > 1 else 0.0


@given(
    pieces=st.lists(st.sampled_from("abc"), max_size=20),
    n=st.integers(1, 5),
    free=st.sampled_from([0.0, 0.25]),
)
def test_repetition_is_the_share_of_runs_that_were_there_before(pieces, n, free) -> None:
    share = repeated_share(pieces, n)
    expected = -2.0 * max(0.0, share - free) / (1 - free)
    config = {"n": n, "free": free, "penalty": 2.0}
    for unit, text in (("words", " ".join(pieces)), ("characters", "".join(pieces))):
        parts = repetition(text, unit=unit, **config)
        assert parts["score"] == pytest.approx(expected)
        assert parts["repeated"] == pytest.approx(share)


def test_case_and_spacing_hide_no_repetition() -> None:
    assert repetition("Ha ha\nHA  ha", n=1)["repeated"] == 0.75
