"""A config chooses what the actor or the critic minimises, and the plan follows from what that requires."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError, PlanError
from dovetail.planning.plan import Plan, make_plan
from dovetail_sdk.testing import PlannedObjective, temporary_plugins


class OfReference(PlannedObjective):
    """Reads the reference's log-probabilities and nothing that an estimator makes."""

    name = "of_reference"

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"response_mask", "ref_log_probs"})


class OfPairs(OfReference):
    """Needs pairs, which a rollout does not make."""

    name = "of_pairs"
    unit = "pair"


@pytest.fixture
def plan() -> Callable[..., Plan]:
    def made(*overrides: str, **sections: Any) -> Plan:
        with temporary_plugins(OfReference, OfPairs):
            config = {"model": {"path": "tiny"}, **sections}
            return make_plan(config_from_mapping(config, overrides).config)

    return made


def test_the_step_has_what_the_objective_requires_and_no_estimator(
    plan: Callable[..., Plan],
) -> None:
    made = plan("actor.objective=of_reference", "rollout.n=1")
    assert [stage.name for stage in made.stages if stage.phase != "check"] == [
        "score_ref",
        "update_actor",
    ]
    assert [model.role for model in made.models] == ["actor", "ref"]
    assert made.models[0].objective is not None
    assert made.models[0].objective.plugin.name == "of_reference"
    assert "of_reference" in made.stages[-1].because


def test_the_loss_of_the_algorithm_and_its_kl_are_left_out(plan: Callable[..., Plan]) -> None:
    made = plan("actor.objective=of_reference", "algorithm.kl={in_loss: {coef: 0.1}}")
    assert "algorithm.kl.in_loss" not in made.facts.required.values()
    assert not {"advantages", "entropies"} & made.facts.required.keys()


def test_a_critic_may_minimise_an_objective_of_its_own(plan: Callable[..., Plan]) -> None:
    made = plan("algorithm.preset=ppo", "critic.objective={name: value, clip: null}")
    critic = next(model for model in made.models if model.role == "critic")
    assert critic.objective is not None
    assert critic.objective.plugin.config.clip is None


def test_a_column_that_nothing_provides_is_refused(plan: Callable[..., Plan]) -> None:
    with pytest.raises(PlanError, match=r"of_pairs.*'pair_id'"):
        plan("actor.objective=of_pairs")


def test_an_output_that_the_model_lacks_is_refused(plan: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match=r"can't compute 'log_probs'.*values"):
        plan("algorithm.preset=ppo", "critic.objective=of_reference")
