"""Further models: roles of the config's own, in the plan and for the stages that compute with them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError, PlanError
from dovetail.interfaces import Stage
from dovetail.planning.plan import Plan, make_plan
from dovetail_console.memory import estimate_memory
from dovetail_sdk.testing import temporary_plugins, tiny_model_and_tokenizer


class Teach(Stage):
    """Computes with a role `teacher`."""

    name = "teach"
    api = ">=1.0,<2"
    phase = "transform"

    @classmethod
    def roles(cls, config: Any, facts: Any) -> Collection[str]:
        return ("teacher",)

    def run(self, batch: Any, step: Any) -> Any:
        return batch


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_and_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture
def plan(tiny: str) -> Callable[..., Plan]:
    def made(*overrides: str, prompts: int | None = None) -> Plan:
        with temporary_plugins(Teach):
            loaded = config_from_mapping({"model": {"path": tiny}}, overrides)
            return make_plan(loaded.config, prompts=prompts)

    return made


def test_a_frozen_role_is_there_for_the_stage_that_names_it(plan: Callable[..., Plan]) -> None:
    made = plan("algorithm.stages=[teach]", "roles.teacher={path: /models/teacher, offload: true}")
    teacher = next(model for model in made.models if model.role == "teacher")
    assert (teacher.path, teacher.key, teacher.trained) == (
        "/models/teacher",
        "roles.teacher",
        False,
    )
    assert teacher.engine.name == "fsdp2"
    assert teacher.training.offload
    assert teacher.because == "the stage teach computes with it"
    assert "teacher" in made.placement.pools[0].roles


def test_a_role_with_an_objective_is_trained_in_every_step(plan: Callable[..., Plan]) -> None:
    made = plan(
        "algorithm.advantage=gae",
        "roles.second={head: value, objective: value, epochs: 2, mini_batch_size: 4}",
        "data.train_batch_size=8",
        prompts=24,
    )
    second = next(model for model in made.models if model.role == "second")
    assert second.trained
    assert second.head == "value"
    assert second.path == made.models[0].path
    stage = next(stage for stage in made.stages if stage.name == "update_roles")
    assert stage.roles == ("second",)
    assert "second minimises value" in stage.because
    assert {"returns", "values"} <= stage.reads.keys()
    assert made.total_updates("second") == 3 * 2 * 2
    assert [s.name for s in made.stages][-3:] == ["update_critic", "update_roles", "update_actor"]


def test_memory_counts_what_a_role_takes(plan: Callable[..., Plan]) -> None:
    overrides = ("algorithm.stages=[teach]", "roles.teacher.optim=adamw")
    frozen = plan(*overrides)
    taken = estimate_memory(frozen).phases["scores of teacher"]
    assert taken["teacher weights"] == taken["actor weights"]
    assert "teacher gradients" not in taken
    trained = plan(
        *overrides, "roles.teacher={head: value, objective: value}", "algorithm.advantage=gae"
    )
    taken = estimate_memory(trained).phases["update of teacher"]
    assert taken["teacher optimizer"] == 2 * taken["teacher weights"]


def test_a_stage_whose_role_has_no_model_is_refused(plan: Callable[..., Plan]) -> None:
    with pytest.raises(PlanError, match=r"'teach'.*'teacher'.*only actor, ref, critic") as caught:
        plan("algorithm.stages=[teach]")
    assert "roles.teacher.path=" in str(caught.value.hint)


def test_a_role_that_no_stage_computes_with_is_refused(plan: Callable[..., Plan]) -> None:
    with pytest.raises(PlanError, match=r"roles\.teacher is not used"):
        plan("roles.teacher.path=/models/teacher")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("roles.actor={}", "settings to actor"),
        ("roles.rollout={}", "rollout.* are reserved"),
        ("roles.reward={}", "other metrics"),
        ("roles={Big Teacher: {}}", "lower-case letters"),
        ("roles.teacher={pth: x}", "pth"),
        ("roles.teacher={mini_batch_size: 7}", "does not divide data.train_batch_size"),
        ("roles.teacher={max_tokens_per_micro_batch: 8}", "too small"),
        ("profile={tool: torch, roles: techer}", "can be profiled"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(
    plan: Callable[..., Plan], override: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan("algorithm.stages=[teach]", override)


def test_an_objective_that_the_head_can_not_serve_is_refused(plan: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match=r"role 'second' can't compute 'values'"):
        plan("algorithm.advantage=gae", "roles.second.objective=value")
