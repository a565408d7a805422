"""The suite of stage sets: the plan of a run whose step is made of the set's stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import pytest

from dovetail.batch.columns import GLOSSARY
from dovetail.config import config_from_mapping
from dovetail.interfaces import Plugin, StageSet
from dovetail.interfaces.stage import PHASES
from dovetail.planning.plan import Plan, make_plan
from dovetail.plugins.kinds import KINDS
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.scripted_rollout import ScriptedRollout
from dovetail_sdk.testing.table_engine import TableEngine
from dovetail_sdk.testing.temporary import temporary_plugins


class StageSetConformance(PluginConformance):
    """Conformance suite for stage sets, each of which names the stages of a training step: subclass it and set `plugin`.

    The stages that the set names must be installed, or be in `plugins`.
    """

    kind = "stage_set"
    plugin: ClassVar[type[StageSet]]
    overrides: ClassVar[tuple[str, ...]] = ()
    """Config overrides of the run that is planned."""
    plugins: ClassVar[tuple[type[Plugin], ...]] = ()
    """Plugins that the run needs and that are not installed, such as stages."""

    @pytest.fixture
    def plan(self) -> Iterator[Plan]:
        """Yield the plan of a run with the stage set: the stages in order, models and placement, decided before the run starts."""
        own = attrs.asdict(self.make_config(), filter=lambda _, value: value is not None)
        given: dict[str, Any] = {
            "model": {"path": "tiny"},
            "rollout": {"name": "scripted", "n": 2},
            "actor": {"engine": "table"},
            "algorithm": {"stage_set": {**own, "name": self.plugin.name}},
        }
        with temporary_plugins(TableEngine, ScriptedRollout, self.plugin, *self.plugins):
            yield make_plan(config_from_mapping(given, self.overrides).config)

    def test_its_stages_are_in_the_step_in_their_order(self, plan: Plan) -> None:
        names = [name.partition("@")[0] for name in self.plugin.stages]
        assert len(set(names)) == len(names)
        own = [stage for stage in plan.stages if stage.of_set]
        assert own
        for phase in PHASES:
            listed = [stage.name for stage in own if stage.phase == phase]
            assert listed == [name for name in names if name in listed]

    def test_a_role_that_it_trains_has_an_optimizer(self, plan: Plan) -> None:
        trained = {role for stage in plan.stages for role in stage.objectives}
        assert trained == {model.role for model in plan.models if model.trained}

    def test_it_selects_plugins_by_key_paths_and_runs_some_of_them(self, plan: Plan) -> None:
        config, facts = plan.facts.plugins["algorithm.stage_set"].config, plan.facts
        selected = self.plugin.selects(config, facts)
        assert all(kind in KINDS for kind, _ in selected.values())
        there = {path for path, (_, section) in selected.items() if section is not None}
        assert there <= plan.facts.plugins.keys()
        assert self.plugin.run_by_stages(config, facts) <= selected.keys()

    def test_it_says_why_a_column_is_missing_or_that_the_column_is_none_of_its_own(
        self, plan: Plan
    ) -> None:
        config, facts = plan.facts.plugins["algorithm.stage_set"].config, plan.facts
        reasons = [self.plugin.lacks(config, facts, column) for column in GLOSSARY]
        assert all(reason is None or reason.strip() for reason in reasons)

    def test_its_check_accepts_the_step_that_it_makes(self, plan: Plan) -> None:
        config, facts = plan.facts.plugins["algorithm.stage_set"].config, plan.facts
        self.plugin.check(config, facts, plan.stages)
