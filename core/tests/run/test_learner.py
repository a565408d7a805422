"""What the learner refuses of a stage: it changes what it declares and nothing else, and gives what others require of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dovetail.batch import Batch, Column
from dovetail.errors import ColumnError, NumericsError, PluginBrokenError
from dovetail.interfaces import Stage, StepContext
from dovetail_sdk.testing import temporary_plugins

MINE = "algorithm.stages=[mine]"
BONUS = Column("bonus", "float32", "dense", "a bonus", "stage")


def stage(run: Any, **members: Any) -> type[Stage]:
    """A stage of the phase `transform` that provides the column `bonus`, float32 [N]."""
    given = {
        "name": "mine",
        "api": ">=1.0,<2",
        "phase": "transform",
        "columns": (BONUS,),
        "provides": classmethod(lambda cls, config, facts: frozenset({"bonus"})),
        "run": run,
    }
    return type("Mine", (Stage,), {**given, **members})


def bonus(self: Stage, batch: Batch, step: StepContext) -> Batch:
    """What it should do."""
    return batch.with_columns({"bonus": np.ones(len(batch), np.float32)})


def changed_scores(self: Stage, batch: Batch, step: StepContext) -> Batch:
    return bonus(self, batch, step).with_columns({"scores": batch["scores"] * 2})


def other_column(self: Stage, batch: Batch, step: StepContext) -> Batch:
    return batch.with_columns({"values": batch["token_rewards"]})


def fewer_samples(self: Stage, batch: Batch, step: StepContext) -> Batch:
    return bonus(self, batch, step).take(np.arange(2))


def other_order(self: Stage, batch: Batch, step: StepContext) -> Batch:
    return bonus(self, batch, step).take(np.array([1, 0, 2, 3]))


def lost_column(self: Stage, batch: Batch, step: StepContext) -> Batch:
    return bonus(self, batch, step).drop(["scores"])


def float64(self: Stage, batch: Batch, step: StepContext) -> Batch:
    return batch.with_columns({"bonus": np.ones(len(batch))})


def two_dimensions(self: Stage, batch: Batch, step: StepContext) -> Batch:
    return batch.with_columns({"bonus": np.ones((len(batch), 1), np.float32)})


def writes_in_place(self: Stage, batch: Batch, step: StepContext) -> Batch:
    batch["scores"][:] = 0
    return bonus(self, batch, step)


def raises(self: Stage, batch: Batch, step: StepContext) -> Batch:
    raise KeyError("mine")


def nothing(self: Stage, batch: Batch, step: StepContext) -> Any:
    return None


def not_finite(self: Stage, batch: Batch, step: StepContext) -> Batch:
    return batch.with_columns({"bonus": np.full(len(batch), np.nan, np.float32)})


def test_a_stage_of_a_plugin_runs_where_it_belongs(compose):
    with temporary_plugins(stage(bonus)):
        made = compose(MINE)
        made.take(1)
    assert made.events.stages == ["mine", "advantage", "update_actor"]
    assert all((batch["bonus"] == 1).all() for batch in made.roles["actor"].trained)
    assert "time/mine" in made.run.record.timers.metrics()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (changed_scores, "changed the column 'scores', which"),
        (other_column, "wrote the column 'values', which"),
        (fewer_samples, "returned 2 samples for 4"),
        (other_order, "changed the column"),
        (lost_column, "removed the column 'scores'"),
        (float64, "'bonus' has dtype float64, not float32"),
        (two_dimensions, "'bonus' has shape [4, 1], not [4]"),
        (nothing, "returned NoneType"),
        (writes_in_place, "read-only"),
        (raises, "raised KeyError: 'mine' ("),
    ],
)
def test_a_stage_that_does_not_do_what_it_declares_is_named_before_any_update(compose, run, words):
    with temporary_plugins(stage(run)):
        made = compose(MINE)
        with pytest.raises(PluginBrokenError) as caught:
            made.take(1)
    assert words in str(caught.value)
    assert "stage/mine (" in str(caught.value)
    assert made.roles["actor"].trained == []
    assert made.run.position.step == 0
    assert len(made.ledger.open()) == 2


def rewriting(values: Any) -> type[Stage]:
    """A stage that declares `scores` as rewritten, and writes what a function makes of them."""
    return stage(
        lambda self, batch, step: batch.with_columns({"scores": values(batch["scores"])}),
        provides=classmethod(lambda cls, config, facts: frozenset()),
        rewrites=classmethod(lambda cls, config, facts: frozenset({"scores"})),
    )


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (lambda scores: scores.astype(np.float64), PluginBrokenError, "float64"),
        (lambda scores: scores * np.float32(np.nan), NumericsError, "not finite in 4"),
    ],
)
def test_a_rewritten_column_is_checked_before_any_update(compose, values, error, words):
    with temporary_plugins(rewriting(values)):
        made = compose(MINE)
        with pytest.raises(error, match=words):
            made.take(1)
    assert made.roles["actor"].trained == []


def test_a_stage_that_rewrites_what_another_requires_may_not_skip(compose):
    cls = rewriting(lambda scores: scores)
    cls.skips = lambda self, batch, step: True
    with temporary_plugins(cls):
        made = compose(MINE)
        with pytest.raises(PluginBrokenError, match=r"requires.*column 'scores'"):
            made.take(1)


def test_a_column_of_a_plugin_that_is_not_finite_stops_the_step(compose):
    with temporary_plugins(stage(not_finite)):
        made = compose(MINE)
        with pytest.raises(NumericsError, match="not finite in 4 of 4 samples"):
            made.take(1)
    assert made.roles["actor"].trained == []


def test_scores_that_a_stage_makes_infinite_are_put_down_to_it_and_not_to_the_reward(compose):
    def infinite(self: Stage, batch: Batch, step: StepContext) -> Batch:
        return batch.with_columns({"scores": batch["scores"] + np.float32("inf")})

    rewrites = classmethod(lambda cls, config, facts: frozenset({"scores"}))
    with temporary_plugins(stage(infinite, rewrites=rewrites, provides=Stage.provides)):
        made = compose(MINE)
        with pytest.raises(NumericsError, match="scores is not") as caught:
            made.take(1)
    assert "stage/mine (" in str(caught.value.hint)
    assert "reward" not in str(caught.value.hint)


def test_a_stage_that_reads_what_it_does_not_require_is_named_with_the_fix(compose):
    def reads(self: Stage, batch: Batch, step: StepContext) -> Batch:
        return batch.with_columns({"bonus": batch["ref_log_probs"]})

    with temporary_plugins(stage(reads)):
        made = compose(MINE)
        with pytest.raises(ColumnError, match="no column 'ref_log_probs'") as caught:
            made.take(1)
    assert "stage/mine (" in caught.value.message
    assert "`requires`" in str(caught.value.hint)


def test_arrays_can_be_written_to_again_once_a_stage_has_run(compose):
    with temporary_plugins(stage(bonus)):
        made = compose(MINE)
        made.take(1)
    assert all(batch["scores"].flags.writeable for batch in made.roles["actor"].trained)


def test_an_error_after_a_step_counts_names_the_stage_and_the_step_is_saved(compose):
    def step_counted(self: Stage, batch: Batch, step: StepContext) -> None:
        raise ValueError("too late")

    with temporary_plugins(stage(bonus, step_counted=step_counted)):
        made = compose(MINE)
        with pytest.raises(PluginBrokenError, match="ValueError: too late") as caught:
            made.take(1)
    assert "stage/mine (" in str(caught.value)
    assert made.store.has(1)


def reader(**members: Any) -> type[Stage]:
    """A stage that requires the column `bonus`."""
    given = {
        "name": "reader",
        "api": ">=1.0,<2",
        "phase": "transform",
        "after": ("mine",),
        "requires": classmethod(lambda cls, config, facts: frozenset({"bonus"})),
        "run": lambda self, batch, step: batch,
    }
    return type("Reader", (Stage,), {**given, **members})


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"skips": lambda self, batch, step: True}, "skips a step"),
        ({"run": lambda self, batch, step: batch}, "returned no column 'bonus', which reader"),
    ],
)
def test_a_stage_that_leaves_out_what_another_requires_is_named(compose, members, words):
    with temporary_plugins(stage(**{"run": bonus} | members), reader()):
        made = compose("algorithm.stages=[mine, reader]")
        with pytest.raises(PluginBrokenError) as caught:
            made.take(1)
    assert words in str(caught.value)
    assert "stage/mine (" in str(caught.value)


def test_a_stage_that_another_does_not_require_may_skip_a_step(compose):
    with temporary_plugins(stage(bonus, skips=lambda self, batch, step: step.number == 1)):
        made = compose(MINE)
        made.take(2)
    assert made.events.stages == ["advantage", "update_actor", "mine", "advantage", "update_actor"]


def test_every_stage_learns_of_a_step_that_counts_and_of_no_other(compose):
    counted: list[tuple[int, int]] = []

    def step_counted(self: Stage, batch: Batch, step: StepContext) -> None:
        counted.append((step.number, step.updates["actor"]))

    def fails_in_step_2(self: Stage, batch: Batch, step: StepContext) -> Batch:
        if step.number == 2:
            raise NumericsError("too large")
        return bonus(self, batch, step)

    with temporary_plugins(stage(fails_in_step_2, step_counted=step_counted)):
        made = compose(MINE)
        with pytest.raises(NumericsError, match="too large"):
            made.take(2)
    assert counted == [(1, 2)]
    assert made.store.has(1)
