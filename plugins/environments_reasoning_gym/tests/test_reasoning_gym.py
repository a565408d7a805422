"""Tasks of reasoning-gym: the task's own answers score 1, and two tasks are learned."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.errors import ConfigError
from dovetail.interfaces import PluginContext
from dovetail_environments_reasoning_gym.config import ReasoningGymConfig
from dovetail_environments_reasoning_gym.conformance import TestReasoningGym
from dovetail_environments_reasoning_gym.reasoning_gym_tasks import ReasoningGym

pytest.importorskip(
    "reasoning_gym", reason="reasoning-gym is not installed here; `make proofs` has it"
)
pytestmark = pytest.mark.proofs
__all__ = ["TestReasoningGym"]


def made(**settings: Any) -> ReasoningGym:
    config = ReasoningGymConfig(name="reasoning_gym", **settings)
    return ReasoningGym(config, PluginContext(role="puzzles", seed=3))


def test_tasks_are_of_each_dataset_in_turn_and_follow_from_the_seed() -> None:
    environment = made(datasets={"chain_sum": {"max_terms": 3}, "coin_flip": {}}, tasks=7)
    tasks = environment.tasks(7, held_out=False)
    assert [task.data["dataset"] for task in tasks] == ["chain_sum", "coin_flip"] * 3 + [
        "chain_sum"
    ]
    assert len({task.prompt for task in tasks}) == 7
    other = ReasoningGym(environment.config, PluginContext(seed=4))
    assert [t.prompt for t in other.tasks(7, held_out=False)] != [t.prompt for t in tasks]


def test_no_held_out_question_is_asked_in_training_where_a_dataset_has_few() -> None:
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = made(datasets={"chain_sum": few}, tasks=60, held_out=20)
    asked = {task.prompt for task in environment.tasks(60, held_out=False)}
    held_out = [task.prompt for task in environment.tasks(20, held_out=True)]
    assert held_out
    assert not asked & set(held_out)
    assert len(held_out) == len(set(held_out))


@pytest.mark.parametrize(
    ("datasets", "said"),
    [
        ({"chain_sums": {}}, "did you mean 'chain_sum'?"),
        ({"chain_sum": {"terms": 3}}, "terms"),
        ({"chain_sum": {"min_terms": 5, "max_terms": 2}}, "max_terms"),
    ],
)
def test_what_reasoning_gym_does_not_have_is_refused_with_its_reason(
    datasets: Any, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        made(datasets=datasets).tasks(2, held_out=False)
    assert said in f"{caught.value} {caught.value.hint}"
    assert "environments.puzzles.datasets" in str(caught.value)


def test_datasets_have_to_be_named() -> None:
    with pytest.raises(ValueError, match="chain_sum"):
        made()
