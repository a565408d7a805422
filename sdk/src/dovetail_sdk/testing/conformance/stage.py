"""The suite of stages."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set as AbstractSet
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from dovetail.batch import Batch
from dovetail.batch.columns import GLOSSARY, check_batch, glossary
from dovetail.interfaces import PHASES, OutputSpec, PlanFacts, Stage, StepContext
from dovetail.interfaces.rollout import ON_REQUEST
from dovetail.telemetry.timers import Timers
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.conformance.random_batches import without_tokens
from dovetail_sdk.testing.conformance.stage_step import (
    ControllerPlugins,
    Roles,
    not_finite,
    plan_facts,
    random_outputs,
    step_batch,
    with_masked_row,
)
from dovetail_sdk.testing.resumed import resumed_state
from dovetail_sdk.testing.scripted_run import ScriptedExperience

ALWAYS = frozenset(
    name for name, column in GLOSSARY.items() if column.owner in ("loader", "rollout", "reward")
) - {"media"}
"""Names of the columns in every batch of the suite: those of core that come from the dataset, the rollout or the reward, but no media."""


class StageConformance(PluginConformance):
    """Conformance suite for stages, the parts of a training step such as advantages or the policy update: subclass it and set `plugin`.

    The stage gets random batches and random model outputs.

    The plugins of a default config must be installed.
    """

    kind = "stage"
    plugin: ClassVar[type[Stage]]
    overrides: ClassVar[tuple[str, ...]] = ()
    """Overrides of the config with which the stage is tested, such as `algorithm.advantage=gae`."""
    required: ClassVar[Mapping[str, str]] = {}
    """Columns that other stages of the tested run require: column → the stage that requires it. Set it if the stage under test requires or
    provides columns only when other stages require some."""
    tolerance: ClassVar[float] = 1e-5
    """Largest difference that counts as rounding."""

    def facts(self) -> PlanFacts:
        """Return the facts of a run with the config overrides under test, which the stage's class methods receive."""
        return plan_facts(self.overrides, frozenset(self.required.items()))

    def asked(self, what: str) -> Any:
        """Call the stage's class method `what` with config and plan facts, and return its result."""
        return getattr(self.plugin, what)(self.make_config(), self.facts())

    def named_columns(self) -> frozenset[str]:
        return frozenset().union(*map(self.asked, ("requires", "provides", "rewrites")))

    def columns(self, seed: int, groups: int = 5, n: int = 4) -> Batch:
        """Return a random batch as input of the stage.

        It has the columns that the stage requires or rewrites and those in `ALWAYS`, but none that the stage provides.

        `advantages` and `returns` are per sample, [N], or per token, [T], as the config's estimator returns them.
        """
        facts = self.facts()
        batch = step_batch(
            ALWAYS | set(self.asked("requires")) | self.asked("rewrites"),
            seed=seed,
            groups=groups,
            n=n,
            by_token=facts.plugins["algorithm.advantage"].cls.level == "token",
            declared=tuple(self.known_columns().values()),
        )
        return batch.drop(self.asked("provides"))

    def outputs(self, role: str, batch: Batch, names: frozenset[str | OutputSpec]) -> Batch:
        """Return the random outputs with these names that a role's model gives in a forward pass of the batch; equal tokens get equal
        outputs.
        """
        return random_outputs(role, batch, names)

    def step(self, batch: Batch, *, number: int = 1) -> StepContext:
        """Return the context of a step that has collected this batch, with models for the roles that the stage names."""
        facts, timers = self.facts(), Timers()
        return StepContext(
            number=number,
            facts=facts,
            roles=Roles(self.asked("roles"), self.outputs),
            plugins=ControllerPlugins(facts),
            logger=self.make().context.logger,
            timer=timers,
            weight_version=1,
            first=number == 1,
            collected=ScriptedExperience.of(batch),
            updates=dict.fromkeys(("actor", *self.asked("roles")), 0),
        )

    def run(
        self, batch: Batch, *, stage: Stage | None = None, number: int = 1
    ) -> tuple[Batch, StepContext]:
        """Run the stage on a read-only batch; return the resulting batch (the given one if the stage skips the step) and the step's context."""
        if stage is None:
            stage = self.started()
        given, step = batch.read_only(), self.step(batch, number=number)
        return (given if stage.skips(given, step) else stage.run(given, step)), step

    def started(self) -> Stage:
        """Make and start the stage."""
        stage: Stage = self.make(seed=1)
        stage.start()
        return stage

    # Class methods

    def test_it_runs_in_a_phase_and_beside_others(self) -> None:
        assert self.plugin.phase in PHASES
        for names in (self.plugin.before, self.plugin.after):
            assert isinstance(names, tuple)
            assert all(isinstance(name, str) for name in names)
            assert self.plugin.name not in names

    def test_its_class_methods_give_the_same_twice_in_sets_of_names(self) -> None:
        for what in ("requires", "provides", "rewrites", "roles", "because"):
            assert self.asked(what) == self.asked(what), what
        required, roles = self.asked("requires"), self.asked("roles")
        assert isinstance(required, AbstractSet | Mapping)
        assert isinstance(roles, tuple)
        for names in (self.asked("provides"), self.asked("rewrites")):
            assert isinstance(names, frozenset)
        assert all(isinstance(name, str) for name in (*self.named_columns(), *roles))
        assert isinstance(self.asked("because"), str | None)

    def test_it_computes_with_the_roles_that_it_trains_or_moves(self) -> None:
        config, facts = self.make_config(), self.facts()
        trained = self.plugin.objectives(config, facts).keys()
        assert {*trained, *self.plugin.follows(config, facts)} <= set(self.asked("roles"))

    def test_a_check_writes_nothing(self) -> None:
        if self.plugin.phase != "check":
            pytest.skip("the stage belongs to another phase")
        assert not self.asked("provides")
        assert not self.asked("rewrites")

    def test_a_column_is_provided_or_rewritten_and_not_both(self) -> None:
        assert not self.asked("provides") & self.asked("rewrites")

    def test_a_column_that_no_training_changes_is_not_rewritten(self) -> None:
        constant = self.plugin.constant(self.make_config(), self.facts())
        assert isinstance(constant, frozenset)
        assert not constant & self.asked("rewrites")

    def test_a_column_that_it_provides_is_one_of_core_or_its_own(self) -> None:
        own = glossary(self.plugin.columns)
        assert self.asked("provides") <= own.keys(), "declare it in the class attribute `columns`"

    def test_it_does_not_require_what_it_provides(self) -> None:
        assert not self.asked("provides") & set(self.asked("requires"))

    def test_it_asks_the_rollout_for_what_a_rollout_can_give(self) -> None:
        stage = self.started()
        for number in (1, 2, 10):
            asked = stage.asks(number, self.facts())
            assert asked <= ON_REQUEST.keys()
            assert stage.asks(number, self.facts()) == asked

    # Results

    @pytest.mark.parametrize("seed", range(3))
    def test_it_returns_the_same_samples_and_changes_what_it_names(self, seed: int) -> None:
        self.assert_sound(self.columns(seed))

    def test_what_it_provides_is_there_unless_it_skips(self) -> None:
        stage, batch = self.started(), self.columns(0)
        if stage.skips(batch, self.step(batch)):
            pytest.skip("the stage skips this step")
        done, _ = self.run(batch, stage=stage)
        assert self.asked("provides") <= set(done.names)

    def test_a_batch_of_one_sample_works(self) -> None:
        self.assert_sound(self.columns(0).slice(0, 1))

    def test_a_batch_of_empty_responses_works(self) -> None:
        self.assert_sound(without_tokens(self.columns(0)))

    def test_a_batch_with_a_fully_masked_row_works(self) -> None:
        self.assert_sound(with_masked_row(self.columns(0), 1))

    def test_what_it_does_not_require_of_a_rollout_may_be_absent(self) -> None:
        absent = ON_REQUEST.keys() - set(self.asked("requires")) - self.asked("rewrites")
        self.assert_sound(self.columns(0).drop(absent))

    def assert_sound(self, batch: Batch) -> None:
        """Run the stage and assert that only declared columns changed, and that all values are finite and have the dtype and shape of their
        `Column`. The samples must be the same unless the stage declares that it changes them.
        """
        before = deepcopy(batch)
        done, _ = self.run(batch)
        assert batch.equals(before), "the stage changed its input batch"
        assert isinstance(done, Batch)
        added = set(done.names) - set(before.names)
        assert added <= self.asked("provides"), f"columns missing in `provides`: {sorted(added)}"
        if not self.plugin.changes_samples:
            assert len(done) == len(before)
            missing = set(before.names) - set(done.names)
            assert not missing, f"the stage removed columns: {sorted(missing)}"
            changed = {n for n in before.names if not done.select([n]).equals(before.select([n]))}
            wrong = changed - self.asked("rewrites")
            assert not wrong, f"changed columns missing in `rewrites`: {sorted(wrong)}"
        check_batch(done, self.known_columns())
        assert not not_finite(done)

    # Invariances

    @pytest.mark.parametrize("seed", range(3))
    def test_the_order_of_samples_does_not_matter(self, seed: int) -> None:
        if self.plugin.phase == "update":
            pytest.skip("mini-batches may depend on the order of samples")
        if self.plugin.changes_samples:
            pytest.skip("the stage declares changes_samples")
        batch = self.columns(seed)
        order = np.random.default_rng(seed + 100).permutation(len(batch))
        expected, _ = self.run(batch)
        got, _ = self.run(batch.take(order))
        for name in sorted((self.asked("provides") | self.asked("rewrites")) & set(got.names)):
            for mine, row in zip(got[name], order.tolist(), strict=True):
                self.assert_close(mine, expected[name][row])

    def assert_close(self, got: Any, expected: Any) -> None:
        """Assert that two values are equal, and floats within the tolerance."""
        if isinstance(got, np.ndarray | np.floating):
            np.testing.assert_allclose(got, expected, rtol=self.tolerance, atol=self.tolerance)
        else:
            assert got == expected

    def test_it_uses_the_roles_that_it_names(self) -> None:
        _, step = self.run(self.columns(0))
        assert isinstance(step.roles, Roles)
        assert step.roles.refused == []

    def test_optimizer_steps_are_counted_by_role(self) -> None:
        if self.plugin.phase != "update":
            pytest.skip("the stage belongs to another phase")
        _, step = self.run(self.columns(0))
        assert isinstance(step.roles, Roles)
        assert {
            role: taken for role, taken in step.updates.items() if taken
        } == step.roles.updates()

    def test_metrics_are_finite_and_named_after_a_part(self) -> None:
        stage, batch = self.started(), self.columns(0)
        done, step = self.run(batch, stage=stage)
        stage.step_counted(done, step)
        for name, value in step.metrics.items():
            assert re.fullmatch(r"[a-z0-9_]+/\S+", name), (
                f"the metric {name!r} is not of the form part/name"
            )
            assert isinstance(value, float | int), f"the metric {name} is a {type(value).__name__}"
            assert math.isfinite(value), f"{name} is {value}"

    # From step to step

    def test_a_step_without_samples_counts(self) -> None:
        stage = self.started()
        empty = self.columns(0).slice(0, 0)
        stage.step_counted(empty, self.step(empty))
        self.run(self.columns(1), stage=stage, number=2)

    def test_its_state_goes_through_a_checkpoint_and_brings_it_back(self, tmp_path: Path) -> None:
        first, second = self.started(), self.started()
        for number in (1, 2):
            done, step = self.run(self.columns(number), stage=first, number=number)
            first.step_counted(done, step)
        second.load_state(resumed_state(first, tmp_path / "first"))
        results = []
        for stage in (first, second):
            done, step = self.run(self.columns(3), stage=stage, number=3)
            stage.step_counted(done, step)
            results.append((done, step.metrics))
        (expected, metrics), (got, metrics_after) = results
        assert got.equals(expected)
        assert metrics_after == metrics
        np.testing.assert_equal(dict(second.state()), dict(first.state()))
