"""The streaming trainer on a scripted run: the prompts that it queues, its publications, and the age of its samples."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from dovetail.config import config_from_mapping
from dovetail.config.serialise import dump_yaml
from dovetail.errors import StopRequested
from dovetail.interfaces import PluginContext, StepContext
from dovetail.sections import TrainerSection
from dovetail_sdk.testing.scripted_run import PROMPTS, ScriptedRun
from dovetail_trainers.config import StreamingConfig
from dovetail_trainers.conformance import (  # noqa: F401
    TestOnPolicy,
    TestStreaming,
    TestSupervised,
)
from dovetail_trainers.on_policy import OnPolicyTrainer
from dovetail_trainers.streaming import StreamingTrainer


class WatchedRun(ScriptedRun):
    """A run that records the age of each step's samples, and the queued prompts.

    Attributes:
        ages: the age in versions of the oldest token of each step, in order.
        admitted: the number of prompts of each call of `admit`.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.ages: list[int] = []
        self.admitted: list[int] = []

    def admit(self, groups: int | None = None) -> None:
        self.admitted.append(PROMPTS if groups is None else groups)
        super().admit(groups)

    def collect(self, step: StepContext) -> None:
        super().collect(step)
        versions = step.experience.batch()["token_weight_versions"].values
        self.ages.append(int(self.position.weight_version - versions.min()))


def trained(steps: int, *, step: int = 0, **settings: Any) -> WatchedRun:
    """A run that the trainer has run to its end, from step `step` on."""
    config = StreamingConfig(name="streaming", **settings)
    run = WatchedRun(steps, step=step, max_staleness=StreamingTrainer.max_staleness(config))
    StreamingTrainer(config, PluginContext()).run(run)
    return run


def test_without_staleness_it_makes_the_calls_of_on_policy_besides_admit() -> None:
    config = TrainerSection(name="on_policy", validate_every=2, save_every=2)
    on_policy = ScriptedRun(5)
    OnPolicyTrainer(config, PluginContext()).run(on_policy)
    run = trained(5, max_staleness=0, validate_every=2, save_every=2)
    assert [call for call in run.calls if call != "admit"] == on_policy.calls
    assert run.ages == [0] * 5


@pytest.mark.parametrize("sync_every", [1, 2, 3])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_samples_are_as_old_as_allowed_and_no_older(max_staleness: int, sync_every: int) -> None:
    run = trained(20, max_staleness=max_staleness, sync_every=sync_every)
    assert max(run.ages) == max_staleness
    assert run.admitted[0] == (max_staleness + 1) * sync_every * PROMPTS
    assert sum(run.admitted) == 20 * PROMPTS


@pytest.mark.parametrize("over_sampling", [0.5, 4, -1, 7])
def test_over_sampling_lies_between_one_publication_and_what_staleness_allows(
    over_sampling: float,
) -> None:
    with pytest.raises(
        ValueError, match=r"at least sync_every = 2, .*sync_every = 4: leave over_sampling out"
    ):
        StreamingConfig(
            name="streaming", max_staleness=1, sync_every=2, over_sampling=over_sampling
        )
    fits = StreamingConfig(name="streaming", max_staleness=1, sync_every=2, over_sampling=2.5)
    assert StreamingTrainer.over_sampling(fits) == 2.5


def test_weights_are_sent_after_so_many_steps_and_after_the_last() -> None:
    calls = [c for c in trained(5, sync_every=2).calls if c in ("learn", "publish_weights")]
    one, two = ["learn", "publish_weights"], ["learn", "learn", "publish_weights"]
    assert calls == ["publish_weights", *two, *two, *one]


def test_a_resumed_run_publishes_at_the_same_steps_and_admits_no_more_than_is_left() -> None:
    run = trained(6, step=3, max_staleness=4, sync_every=2)
    assert run.learned == [4, 5, 6]
    assert [c for c in run.calls if c in ("learn", "publish_weights")][:3] == [
        "publish_weights",
        "learn",
        "publish_weights",
    ]
    assert run.admitted[0] == 3 * PROMPTS


def test_prompts_are_not_admitted_before_weights_are_published() -> None:
    run = WatchedRun(3, max_staleness=1, stop_at=1)
    trainer = StreamingTrainer(StreamingConfig(name="streaming"), PluginContext())
    with pytest.raises(StopRequested):
        trainer.run(run)
    assert run.position.admissible == 0
    run.publish_weights()
    assert run.position.admissible == 2 * PROMPTS


def settings(*overrides: str) -> Any:
    return config_from_mapping({"model": {"path": "tiny"}}, list(overrides))


def test_it_brings_a_correction_where_samples_may_be_old_and_the_config_says_nothing() -> None:
    loaded = settings("trainer=streaming")
    assert loaded.config.algorithm.rollout_correction.name == "decoupled_token_is"
    assert loaded.provenance["algorithm.rollout_correction.name"] == "trainer 'streaming'"
    for given, name in (("decoupled_geo_rs", "decoupled_geo_rs"), ("disabled", "disabled")):
        config = settings("trainer=streaming", f"algorithm.rollout_correction={given}").config
        assert config.algorithm.rollout_correction.name == name
    assert (
        settings("trainer={name: streaming, max_staleness: 0}").config.algorithm.rollout_correction
        is None
    )
    config = settings("trainer=streaming", "algorithm.rollout_correction=null").config
    assert config.algorithm.rollout_correction is None


def test_over_the_config_of_a_run_the_correction_and_the_rollout_follow_the_trainer() -> None:
    for first in (
        "trainer=on_policy",
        "trainer=streaming",
        "trainer={name: streaming, on_sync: keep}",
    ):
        loaded = settings(first, "rollout.n=2")
        stored = yaml.safe_load(dump_yaml(loaded.config, given=loaded.given))
        assert config_from_mapping(stored).config == loaded.config
        for now in ("trainer=on_policy", "trainer={name: streaming, on_sync: abort}"):
            assert config_from_mapping(stored, [now]).config == settings("rollout.n=2", now).config


def test_on_sync_abort_cuts_running_responses_short() -> None:
    assert not settings("trainer=streaming").config.rollout.partial_rollout
    rollout = settings("trainer={name: streaming, on_sync: abort}").config.rollout
    assert (rollout.partial_rollout, rollout.keep_cache) == (True, False)


def test_on_sync_keep_leaves_running_responses_in_the_engine() -> None:
    rollout = settings("trainer={name: streaming, on_sync: keep}").config.rollout
    assert (rollout.partial_rollout, rollout.keep_cache) == (True, True)
