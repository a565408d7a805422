"""The plan of a run on a dataset's examples: nothing of a rollout or of rewards, and columns by the kind of example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import PlanError
from dovetail.interfaces import (
    Examples,
    Run,
    Trainer,
)
from dovetail.planning.plan import Plan, make_plan
from dovetail.run.run import describe, lock_of
from dovetail.sections import TrainerSection
from dovetail_console.memory import estimate_memory
from dovetail_sdk.testing import PlannedObjective, temporary_plugins, tiny_model_and_tokenizer

ROLLOUT_KINDS = {"rollout", "weight_transport", "reward_manager", "reward_function"}


@attrs.frozen(kw_only=True)
class OfExamplesConfig(TrainerSection):
    """Says what to train on."""

    examples: str = "conversations"
    """A kind of example."""


class OfExamples(Trainer):
    """Is only planned with."""

    name = "of_examples"
    api = ">=2.1,<3"
    Config = OfExamplesConfig

    @classmethod
    def examples(cls, config: Any) -> Examples:
        return config.examples

    def run(self, run: Run) -> None:
        raise NotImplementedError


class OfPairs(PlannedObjective):
    """Compares a pair's answers by the reference."""

    name = "of_pairs"
    unit = "pair"

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"response_mask", "chosen", "ref_log_probs"})


MakePlan = Callable[..., Plan]


@pytest.fixture
def plan() -> Iterator[MakePlan]:
    """Plans a run on conversations; its plugins are there as long as the test."""

    def made(*overrides: str, prompts: int | None = None, **sections: Any) -> Plan:
        config = {
            "model": {"path": "tiny"},
            "trainer": "of_examples",
            "actor": {"objective": "planned"},
            **sections,
        }
        return make_plan(config_from_mapping(config, overrides).config, prompts=prompts)

    with temporary_plugins(OfExamples, PlannedObjective, OfPairs):
        yield made


PAIRS = ("trainer.examples=preferences", "actor.objective=of_pairs")


def test_a_step_takes_examples_and_updates_the_actor(plan: MakePlan) -> None:
    made = plan()
    assert [part.name for part in made.collection] == ["conversations"]
    assert [stage.name for stage in made.stages] == ["update_actor"]
    assert made.publication is None
    assert not made.generates
    assert [model.role for model in made.models] == ["actor"]


def test_nothing_of_a_rollout_or_of_rewards_is_selected_placed_or_locked(plan: MakePlan) -> None:
    made = plan("reward.function=math")
    assert not {ref.kind for ref in made.refs.values()} & ROLLOUT_KINDS
    assert not made.placement.source.described
    assert all("rollout" not in pool.roles for pool in made.placement.pools)
    lock = lock_of(made.facts.config, made, None)
    assert not {entry["kind"] for entry in lock["plugins"]} & {
        *ROLLOUT_KINDS,
        "advantage",
        "policy_loss",
    }
    assert describe(made)["publication"] is None


def test_a_plugin_of_a_rollout_that_is_not_usable_here_is_not_asked(plan: MakePlan) -> None:
    """vLLM's own part may be missing, and its weight transport may not fit."""
    made = plan("rollout.name=vllm", "rollout.n=8", "algorithm.logprob_check.every=1")
    assert made.counts.samples_per_step == made.counts.prompts_per_step


def test_pairs_count_as_one_and_have_two_answers(plan: MakePlan) -> None:
    made = plan(*PAIRS, "data.train_batch_size=4", "trainer.total_epochs=3", prompts=9)
    assert (made.counts.prompts_per_step, made.counts.samples_per_step) == (4, 8)
    assert made.counts.steps == 9 * 3 // 4
    rows = dict(made.counts.rows())
    assert rows["a step"] == "4 preference pairs × 2 = 8 answers"
    assert rows["training preference pairs"] == "9"
    with pytest.raises(PlanError, match=r"16 preference pairs \(32 answers\),.*only 9"):
        plan(*PAIRS, "data.train_batch_size=16", prompts=9)


def test_pairs_have_the_columns_that_an_objective_of_pairs_requires(plan: MakePlan) -> None:
    made = plan(*PAIRS)
    assert {"chosen", "pair_id"} <= made.collection[0].provides
    assert [stage.name for stage in made.stages] == ["score_ref", "update_actor"]
    assert {"chosen", "pair_id", "ref_log_probs"} <= made.stages[-1].reads.keys()
    assert not {"scores", "finish_reason", "token_weight_versions"} & made.collection[0].provides


@pytest.mark.parametrize(
    ("overrides", "column", "fix"),
    [
        (["actor.objective=of_pairs"], "chosen", "trainer.examples=preferences"),
        (
            ["actor.objective=null"],
            "scores",
            "set actor.objective to",
        ),
    ],
    ids=["an objective of pairs on conversations", "a policy loss without rewards"],
)
def test_a_column_that_examples_do_not_have_is_refused(
    plan: MakePlan, overrides: list[str], column: str, fix: str
) -> None:
    says = f"requires the column '{column}' .* trainer 'of_examples' trains on conversations of the dataset"
    with pytest.raises(PlanError, match=says) as caught:
        plan(*overrides)
    assert fix in str(caught.value.hint)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["algorithm.sample_filters=[equal_rewards]"],
            "algorithm.sample_filters applies to generated samples",
        ),
        (
            ["trainer.examples=images"],
            "returned 'images'; expected one of 'prompts', 'conversations'",
        ),
        (["algorithm.kl.in_reward={coef: 0.1}"], "algorithm.kl.in_reward requires the column"),
    ],
)
def test_what_makes_no_sense_on_examples_is_refused(
    plan: MakePlan, overrides: list[str], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        plan(*overrides)


def test_memory_holds_no_rollout(plan: MakePlan, tmp_path: Any) -> None:
    made = plan(model={"path": str(tiny_model_and_tokenizer(tmp_path, vocab_size=300))})
    (taken,) = estimate_memory(made).phases.values()
    assert {
        "actor weights",
        "actor gradients",
        "actor optimizer",
        "actor activations",
    } <= taken.keys()
