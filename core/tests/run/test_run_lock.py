"""The lock of a run: every plugin that takes part, those that rows find by their data source included."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.config import config_from_mapping
from dovetail.interfaces import RowSet, SourceData
from dovetail.planning.plan import make_plan
from dovetail.run.run import lock_of


def data(*sources: str | None) -> SourceData:
    """Prompts of these data sources, the last of them held out."""
    made: Any = [SimpleNamespace(data_source=source) for source in sources]
    train, val = (RowSet(prompts=prompts) for prompts in (made[:-1], made[-1:]))
    return SourceData(tokenizer=None, train=train, val=val)


def functions(lock: dict[str, Any]) -> list[str]:
    return [item["name"] for item in lock["plugins"] if item["kind"] == "reward_function"]


@pytest.mark.parametrize(
    ("reward", "sources", "found"),
    [
        ({}, ("openai/gsm8k", None, "openai/gsm8k"), ["gsm8k"]),
        ({}, ("of_nobody", "openai/gsm8k"), ["gsm8k"]),
        ({"functions": {"openai/gsm8k": "exact_match"}}, ("openai/gsm8k", None), ["exact_match"]),
        ({"function": "exact_match"}, ("openai/gsm8k", None), ["exact_match"]),
    ],
)
def test_functions_that_rows_find_are_in_it(
    reward: dict[str, Any], sources: tuple[str | None, ...], found: list[str]
) -> None:
    config = config_from_mapping({"model": {"path": "tiny"}, "reward": reward}).config
    plan = make_plan(config)
    assert functions(lock_of(config, plan, data(*sources))) == found
    given = [name for name in found if name != "gsm8k"]
    assert functions(lock_of(config, plan, None)) == given


def test_environments_of_roles_are_in_it_and_in_the_plan() -> None:
    runtime = {"name": "ray", "environments": {"rollout": sys.executable}}
    config = config_from_mapping({"model": {"path": "tiny"}, "runtime": runtime}).config
    plan = make_plan(config)
    assert f"rollout runs in {sys.executable}" in plan.placement.lines(plan.models)
    assert lock_of(config, plan, None)["environments"]["rollout"]["path"] == sys.executable
