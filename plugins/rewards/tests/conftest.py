"""Fixtures of the reward tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from dovetail.flow.scorer import Scorer
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.reward import Outcome, RewardManager, RewardSample
from dovetail.interfaces.reward_calls import RewardFunctions
from dovetail_rewards.manager_config import NaiveConfig
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


@pytest.fixture
def run() -> Callable[..., dict[str, Outcome]]:
    """Scores samples with a manager, through the Scorer; `groups` are the numbers of samples in each group."""

    def score(
        manager: RewardManager,
        samples: Sequence[RewardSample],
        *,
        groups: Sequence[int] | None = None,
        **limits: Any,
    ) -> dict[str, Outcome]:
        sizes = groups or [1] * len(samples)
        named = [(group, size) for group, size in enumerate(sizes) for _ in range(size)]

        async def main() -> dict[str, Outcome]:
            scorer = Scorer(manager, **{"timeout": 30.0, **limits})
            for sample, (group, size) in zip(samples, named, strict=True):
                scorer.add(sample, group=group, group_size=size)
            return await scorer.finish()

        return asyncio.run(main())

    return score
