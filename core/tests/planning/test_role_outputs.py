"""What a role's objective needs of its model is compared with what its engine gives, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError
from dovetail.interfaces import (
    OUTPUTS,
    Objective,
    OutputSpec,
    PluginRef,
    TrainEngine,
    check_outputs,
)
from dovetail.planning.plan import Plan, make_plan
from dovetail_sdk.testing import TableEngine, temporary_plugins

TOP_K = OutputSpec(name="top_k", inner=(4,), reads=frozenset({"top_k_ids"}))


class Bare(TableEngine):
    """Gives log-probabilities, and the first four logits of every token."""

    name = "bare"

    @classmethod
    def outputs(cls, config: Any, head: Any) -> dict[str, OutputSpec]:
        return {"log_probs": OUTPUTS["log_probs"], "top_k": TOP_K}


def planned(*overrides: str) -> Plan:
    with temporary_plugins(Bare):
        given = {"model": {"path": "tiny"}, "actor": {"engine": "bare"}}
        return make_plan(config_from_mapping(given, overrides).config)


def test_a_role_has_its_objective() -> None:
    (actor,) = planned("algorithm.entropy.measure=false").models
    assert actor.objective is not None
    assert actor.objective.plugin.name == "policy"
    assert actor.objective.output_names == {"log_probs"}


def test_an_output_that_the_engine_lacks_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        planned("algorithm.entropy.coef=0.01")
    assert "engine 'bare' of role 'actor' can't compute 'entropies'" in caught.value.message
    assert "log_probs, top_k" in caught.value.message


@pytest.mark.parametrize(
    "wanted", [OutputSpec(name="top_k", inner=(8,)), OutputSpec(name="top_k", dtype="float16")]
)
def test_an_output_of_another_shape_or_dtype_is_refused(wanted: OutputSpec) -> None:
    check_outputs(Bare, None, "lm", "actor", ["log_probs", TOP_K])
    with pytest.raises(ConfigError, match="'top_k' as float"):
        check_outputs(Bare, None, "lm", "actor", [wanted])


def test_columns_that_an_output_reads_are_required() -> None:
    class Distilled(Objective):
        name = "distilled"
        unit = "pair"

        @classmethod
        def outputs(cls, config: Any) -> tuple[OutputSpec, ...]:
            return (TOP_K,)

    spec = Distilled.spec(PluginRef(kind="objective", name="distilled"), {})
    assert spec.requires == {"top_k_ids", "pair_id"}
    assert spec.unit == "pair"


def test_a_reference_is_no_reference_of_its_own() -> None:
    class Adapted(TableEngine):
        @classmethod
        def outputs(cls, config: Any, head: Any) -> dict[str, OutputSpec]:
            return dict(OUTPUTS)

    check_outputs(Adapted, None, "lm", "actor", ["ref_log_probs"])
    with pytest.raises(ConfigError, match="'ref_log_probs'"):
        check_outputs(Adapted, None, "lm", "ref", ["ref_log_probs"], trained=False)


@pytest.mark.parametrize(
    ("role", "head", "wanted", "fix"),
    [
        ("judge", "lm", "values", "set roles.judge.head=value"),
        ("judge", "value", "log_probs", "set roles.judge.head=lm"),
        ("critic", "value", "log_probs", "set critic.objective to"),
        ("actor", "lm", "values", "come from the role critic"),
    ],
)
def test_a_role_whose_head_does_not_give_an_output_learns_which_key_to_set(
    role: str, head: Any, wanted: str, fix: str
) -> None:
    class ByHead(TableEngine):
        @classmethod
        def outputs(cls, config: Any, head: Any) -> dict[str, OutputSpec]:
            return {
                name: OUTPUTS[name] for name in (["values"] if head == "value" else ["log_probs"])
            }

    with pytest.raises(ConfigError) as caught:
        check_outputs(ByHead, None, head, role, [wanted])
    assert fix in str(caught.value.hint)


def test_an_engine_gives_what_its_head_does() -> None:
    assert TrainEngine.outputs(None, "value").keys() == {"values"}
    assert "ref_log_probs" not in TrainEngine.outputs(None, "lm")
