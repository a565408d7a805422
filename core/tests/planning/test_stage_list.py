"""The list of a step's stages: what is active and why, in which order, with which versions, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError, PlanError, PluginBrokenError
from dovetail.planning.plan import Plan, make_plan
from dovetail.plugins.index import default_index

HEAD = """
from dovetail.interfaces import Stage
from dovetail.batch.columns import Column

BONUS = Column("test.bonus", "float32", "dense", "a bonus", "stage")


class Base(Stage):
    api = ">=1.0,<2"
    columns = (BONUS,)

    def run(self, batch, step):
        return batch

"""


@pytest.fixture
def plan(tmp_path: Path):
    """Make a plan with stages from the bodies of classes, each by its name."""

    def made(*overrides: str, **bodies: str) -> Plan:
        file = tmp_path / "own_stages.py"
        classes = [
            f"class {name}(Base):\n    name = {name.lower()!r}\n{body}"
            for name, body in bodies.items()
        ]
        file.write_text(HEAD + "\n\n".join(classes))
        stages = [{"path": str(file), "attribute": name} for name in bodies]
        mapping = {"model": {"path": "tiny"}, "algorithm": {"stages": stages}}
        return make_plan(config_from_mapping(mapping, overrides).config)

    return made


def stage(phase: str, *lines: str, **sets: str) -> str:
    """The body of a class: its phase, further lines, and class methods that return sets of columns."""
    methods = [
        f"    @classmethod\n    def {name}(cls, config, facts):\n        return frozenset({columns.split()!r})\n"
        for name, columns in sets.items()
    ]
    return "\n".join([f"    phase = {phase!r}", *(f"    {line}" for line in lines), *methods])


def names(made: Plan) -> list[str]:
    return [stage.name for stage in made.stages]


PPO = (
    "algorithm.preset=ppo",
    "algorithm.kl.in_reward.coef=0.01",
    "algorithm.overlong_penalty.buffer=16",
    "actor.epochs=2",
    "algorithm.rollout_correction=decoupled_k3_rs_token_tis",
)


def test_core_stages_come_in_the_order_of_their_phases(plan):
    assert names(plan(*PPO)) == [
        *("score_actor", "score_ref", "score_critic", "logprob_check"),
        *("rollout_correction", "overlong_penalty", "kl_penalty"),
        *("advantage", "update_critic", "update_actor"),
    ]


def test_a_plain_config_has_no_stage_that_nothing_requires(plan):
    assert names(plan()) == ["logprob_check", "advantage", "update_actor"]


def test_each_stage_reads_the_last_version_before_it(plan):
    found = {stage.name: stage.reads for stage in plan(*PPO).stages}
    assert found["overlong_penalty"]["scores"] == 1
    assert found["kl_penalty"]["scores"] == 2
    assert found["advantage"]["scores"] == 3
    assert found["update_actor"]["rollout_is_weights"] == 1


def test_what_a_stage_requires_brings_the_stage_that_provides_it(plan):
    made = plan(Own=stage("transform", requires="ref_log_probs"))
    assert names(made)[0] == "score_ref"
    assert [model.role for model in made.models] == ["actor", "ref"]
    assert "'own'" in made.facts.required["ref_log_probs"]


def test_a_role_that_a_stage_computes_with_has_a_model(plan):
    body = stage("transform") + (
        "\n    @classmethod\n    def roles(cls, config, facts):\n        return ('ref',)\n"
    )
    made = plan(Own=body)
    assert made.models[1].role == "ref"
    assert "own" in made.models[1].because


def test_a_stage_with_the_name_of_one_of_cores_takes_its_place(plan):
    made = plan(Advantage=stage("estimate", provides="advantages"))
    assert names(made) == names(plan())
    [own] = [stage for stage in made.stages if stage.name == "advantage"]
    assert own.ref.path is not None
    assert own.because == "algorithm.stages[0], in place of the stage set's"
    assert made.stages[-1].reads["advantages"] == 1


def test_a_stage_of_core_that_the_config_names_is_there_already(plan):
    mapping = {"model": {"path": "tiny"}, "algorithm": {"stages": ["advantage"]}}
    with pytest.raises(
        PlanError, match=r"algorithm\.stages\[0\] names stage 'advantage'"
    ) as caught:
        make_plan(config_from_mapping(mapping, ()).config)
    assert caught.value.hint == "remove algorithm.stages[0]"


def test_a_stage_stands_behind_those_of_its_phase(plan):
    made = plan(*PPO, Own=stage("transform", provides="test.bonus"))
    assert names(made).index("own") == names(made).index("kl_penalty") + 1


def test_before_and_after_place_a_stage(plan):
    made = plan(
        *PPO,
        First=stage("transform", 'before = ("overlong_penalty", "kl_penalty")', rewrites="scores"),
        Last=stage("transform", 'after = ("middle", "absent")', rewrites="test.bonus"),
        Middle=stage("transform", provides="test.bonus"),
    )
    order = names(made)
    assert order.index("first") < order.index("overlong_penalty")
    assert order.index("middle") < order.index("last")
    assert {s.name: s.reads for s in made.stages}["overlong_penalty"]["scores"] == 2


def test_stages_that_the_config_names_say_so(plan):
    made = plan(Own=stage("transform"))
    assert next(s for s in made.stages if s.name == "own").because == "algorithm.stages[0]"


@pytest.mark.parametrize(
    ("bodies", "facts"),
    [
        (
            {"One": stage("transform", provides="advantages")},
            ["'advantages'", "two providers", "'one'", "'advantage'", "rewrites"],
        ),
        (
            {"One": stage("transform", requires="test.bonus")},
            ["'test.bonus'", "'one'"],
        ),
        (
            {
                "One": stage("transform", requires="test.bonus"),
                "Two": stage("transform", provides="test.bonus"),
            },
            ["'one'", "'two'", "place 'two' before 'one' in algorithm.stages"],
        ),
        (
            {"One": stage("transform", requires="scorez")},
            ["'scorez'", "'scores'"],
        ),
        (
            {"One": stage("transform", requires="advantages")},
            ["'advantages'", "'one'", "'advantage'", "runs after", "phase"],
        ),
        (
            {
                "One": stage("transform", rewrites="scores"),
                "Two": stage("transform", rewrites="scores"),
            },
            ["'one'", "'two'", "'scores'", "after"],
        ),
        (
            {"One": stage("transform", provides="test.unknown")},
            ["'test.unknown'", "'one'", "columns"],
        ),
        (
            {"One": stage("check", rewrites="scores")},
            ["'one'", "check", "scores", "'transform'"],
        ),
        (
            {
                "One": stage("transform", 'before = ("two",)'),
                "Two": stage("transform", 'before = ("one",)'),
            },
            ["'one'", "'two'", "contradict"],
        ),
        (
            {"One": stage("score", 'after = ("advantage",)')},
            ["'one'", "'advantage'", "phase"],
        ),
        (
            {"One": stage("transform"), "Two": stage("transform", "name = 'one'")},
            ["'one'", "two stages", "algorithm.stages[1]"],
        ),
        (
            {"Advantage": stage("estimate")},
            ["'advantages'", "'advantage'", "stage of that name, does not provide it"],
        ),
    ],
    ids=[
        *(
            "two providers",
            "no provider",
            "reader first",
            "misspelt",
            "read before written",
            "no order",
        ),
        *("undeclared", "check that writes", "contradiction", "phases", "same name"),
        "in place of the stage set's, without its column",
    ],
)
def test_a_list_that_is_not_sound_is_refused_with_plugins_and_fix(plan, bodies, facts):
    with pytest.raises(PlanError) as caught:
        plan(**bodies)
    text = f"{caught.value} {caught.value.hint}"
    assert [fact for fact in facts if fact not in text] == []


def test_installed_stages_that_declare_the_same_column_are_named(plan, monkeypatch):
    index = default_index()
    entries = tuple(
        replace(entry, manifest=replace(entry.manifest, columns=({"name": "other.bonus"},)))
        if entry.name in ("kl_penalty", "overlong_penalty")
        else entry
        for entry in index.entries()
    )
    monkeypatch.setattr(
        "dovetail.planning.stage_list.default_index", lambda: replace(index, all_entries=entries)
    )
    with pytest.raises(PlanError) as caught:
        plan(One=stage("transform", requires="other.bonus"))
    text = f"{caught.value} {caught.value.hint}"
    facts = ["'other.bonus'", "'one'", "stage/kl_penalty", "stage/overlong_penalty"]
    assert [fact for fact in facts if fact not in text] == []


@pytest.mark.parametrize(
    ("method", "returns", "facts"),
    [
        ("requires", "'scores'", ["`requires`", "'one'", "returned 'scores'", "{'scores'}"]),
        ("rewrites", "'scores'", ["`rewrites`", "'one'", "returned 'scores'", "{'scores'}"]),
        ("provides", "None", ["`provides`", "'one'", "returned None"]),
        ("roles", "'ref'", ["`roles`", "'one'", "returned 'ref'"]),
        ("roles", "('crtic',)", ["'one'", "'crtic'", "'critic'"]),
        ("requires", "config.nothing", ["`requires`", "'one'", "AttributeError", "own_stages.py"]),
        ("because", "1 / 0", ["`because`", "'one'", "ZeroDivisionError"]),
    ],
)
def test_an_answer_to_the_planner_that_is_none_names_the_stage(plan, method, returns, facts):
    lines = ["@classmethod", f"def {method}(cls, config, facts):", f"    return {returns}"]
    with pytest.raises((PlanError, PluginBrokenError)) as caught:
        plan(One=stage("transform", *lines))
    text = str(caught.value)
    assert [fact for fact in facts if fact not in text] == []


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ('after = ("kl_penalty")', ["after = 'kl_penalty'", "('kl_penalty',)"]),
        ("before = (3,)", ["before = (3,)", "str"]),
        ("columns = BONUS", ["columns = Column(", "Column"]),
        ('columns = ("bonus",)', ["columns = ('bonus',)", "Column"]),
    ],
)
def test_class_attributes_that_are_no_tuples_are_refused_when_the_class_is_loaded(
    plan, line, facts
):
    with pytest.raises(ConfigError) as caught:
        plan(One=stage("transform", line))
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_an_unknown_phase_is_refused_when_the_class_is_loaded(plan):
    with pytest.raises((PluginBrokenError, ConfigError), match="transfrom"):
        plan(One=stage("transfrom"))
