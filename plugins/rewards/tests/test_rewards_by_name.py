"""The package as an installed plugin: functions found by data_source, the manager scoring with them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dovetail.errors import ConfigError
from dovetail.interfaces import PluginContext, Prompt, RewardManager, Sample
from dovetail.plugins import make_plugin
from dovetail.plugins.load import ref_for
from dovetail.sections import PluginSection, RewardSection
from dovetail_rewards.config import ExactMatchConfig
from dovetail_rollouts import Scorer, check_sources, configured_functions
from dovetail_sdk.testing import make_sample


def row(source: str | None, truth: object) -> Prompt:
    return Prompt(
        index=0,
        prompt_ids=np.arange(2),
        raw="",
        data_source=source,
        ground_truth=truth,
        where="f, row 0",
    )


def score(section: RewardSection, *samples: Sample, timeout: float = 60.0) -> dict[str, object]:
    functions = configured_functions(section, PluginContext())
    context = PluginContext(reward_functions=functions)
    manager = make_plugin(
        ref_for("reward_manager", section.manager or PluginSection(name="naive")), context
    )
    assert isinstance(manager, RewardManager)
    manager.start()

    async def main() -> dict[str, object]:
        scorer = Scorer(manager, timeout=timeout)
        for sample in samples:
            scorer.add(sample, group=0, group_size=len(samples))
        return dict(await scorer.finish())

    try:
        return asyncio.run(main())
    finally:
        manager.close()


def sample(name: str, text: str, source: str | None, truth: str, **extra: str) -> Sample:
    return make_sample(name, text, data_source=source, ground_truth=truth, extra_info=extra)


def test_an_unknown_source_names_the_installed_ones() -> None:
    functions = configured_functions(RewardSection(), PluginContext())
    with pytest.raises(ConfigError, match="nearest: 'openai/gsm8k'") as error:
        check_sources(functions, [row("openai/gsm8", "18")])
    assert "exact_match" in str(error.value)


def test_each_source_takes_its_function_with_its_options() -> None:
    section = RewardSection(
        functions={
            "form": ExactMatchConfig(name="exact_match", extract="<a>.*</a>", miss_score=-1.0)
        },
        function=PluginSection(name="exact_match"),
    )
    outcomes = score(section, sample("a", "4", "form", ""), sample("b", "4", "other", "4"))
    assert [outcome.value for outcome in outcomes.values()] == [-1.0, 1.0]
