"""Fixtures of the reward tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.reward import RewardSample
from dovetail.interfaces.reward_calls import RewardFunctions
from dovetail_rewards.config import NaiveConfig
from dovetail_rewards.managers.naive import NaiveManager
from dovetail_sdk.testing import release_hung


@pytest.fixture
def manager() -> Iterator[Callable[..., NaiveManager]]:
    """Makes started managers around one function, or around functions by source."""
    made: list[NaiveManager] = []

    def make(function: Any = None, **config: Any) -> NaiveManager:
        by_source = function if isinstance(function, dict) else None
        default = None if by_source is not None else function
        functions = RewardFunctions(by_source, default)
        made.append(NaiveManager(NaiveConfig(**config), PluginContext(reward_functions=functions)))
        made[-1].start()
        return made[-1]

    yield make
    release_hung()
    for one in made:
        one.close()


@pytest.fixture
def sample() -> Callable[..., RewardSample]:
    """Makes samples."""

    def make(name: str = "s0", text: str = "4", **fields: Any) -> RewardSample:
        defaults: dict[str, Any] = {"prompt": "2 + 2 =", "ground_truth": "4"}
        return RewardSample(sample_id=name, solution_str=text, **{**defaults, **fields})

    return make
