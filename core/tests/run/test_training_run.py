"""Steps of a run over scripted workers: what is asked, trained, sent, accounted for and saved, and what a fault leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import attrs
import numpy as np
import pytest

from dovetail.errors import (
    CheckpointError,
    NumericsError,
    PluginBrokenError,
    StopRequested,
    WorkerError,
)
from dovetail.interfaces import Run, Trainer
from dovetail.sections import TrainerSection

RATIO = "algorithm.policy_loss=ppo_clip"
"""With two updates a step, it requires old log-probabilities."""


def test_a_step_trains_sends_and_accounts(compose):
    made = compose()
    made.take(2)
    actor = made.roles["actor"]
    assert made.run.position.step == 2
    assert [batch["group_id"].tolist() for batch in actor.trained] == [[0, 0], [1, 1]] * 2
    assert made.engine.versions == [1, 2, 3]
    assert made.run.position.weight_version == 3
    assert made.ledger.counts()["used"] == 4
    assert made.metrics["actor/updates"] == 2
    assert "actor/early_stop" not in made.metrics
    assert actor.passes == []
    assert made.events.stages == ["advantage", "update_actor"] * 2


def test_weights_that_have_not_moved_are_not_sent(compose):
    made = compose()
    made.run.publish_weights()
    made.run.publish_weights()
    assert made.engine.versions == [1]


def test_memory_is_measured_around_the_updates_and_the_largest_rank_counts(compose):
    made = compose()
    made.take(2)
    assert made.roles["actor"].asked_at == [0, 2, 2, 4]  # of two updates a step
    assert made.metrics["actor/rss_bytes"] == 2.0


def test_what_to_lower_is_said_where_memory_runs_out(compose):
    made = compose()
    made.roles["actor"].script = [WorkerError("actor.update() failed: torch.OutOfMemoryError: …")]
    with pytest.raises(WorkerError, match=r"→ lower actor\.max_tokens_per_micro_batch \("):
        made.take(1)


def test_each_stage_is_timed_under_its_name(compose):
    made = compose(RATIO)
    made.take(1)
    timed = set(made.run.record.timers.metrics())
    stages = {"score_actor", "advantage", "update_actor"}
    assert timed >= {"time/rollout", *(f"time/{stage}" for stage in stages)}
    assert "time/logprob_check" not in timed


def test_the_hook_update_finished_gets_the_metrics_of_updates_alone(compose):
    made = compose()
    made.take(1)
    [metrics] = made.events.updates
    assert metrics["actor/updates"] == 2
    assert "actor/approx_kl" in metrics
    assert {name.split("/")[0] for name in metrics} == {"actor"}


def test_while_the_critic_warms_up_it_alone_is_trained_and_prompts_count_as_used(compose):
    made = compose("algorithm.advantage=gae", "critic.warmup_steps=1")
    actor = made.roles["actor"]
    with made.run.record.running():
        made.run.publish_weights()
        made.step()
        assert made.metrics["actor/updates"] == 0
        assert (actor.trained, made.engine.versions) == ([], [1])
        made.step()
    assert made.metrics["actor/updates"] == 2
    assert made.engine.versions == [1, 2]
    [first, second] = made.roles["critic"].trained
    assert len(first) == len(second) == 4
    assert "values" in first
    assert made.ledger.counts()["used"] == 4


def test_early_stopping_is_reported(compose, worker_group):
    made = compose("actor.max_kl=0.1", actor=worker_group(script=[0.5]))
    made.take(1)
    assert made.metrics["actor/early_stop"] == 1
    assert made.metrics["actor/updates"] == 1


@pytest.mark.parametrize(("good", "saved"), [(0, True), (1, False)])
def test_an_engine_that_refuses_a_mini_batch_leaves_a_file_and_whole_steps_saved(
    compose, worker_group, tmp_path, good, saved
):
    """Nothing was changed before the step's first update; after it the weights are half a step's."""
    fault = NumericsError("the loss is nan", sample_ids=["train.e0.p2.a0.s1"])
    made = compose(actor=worker_group(script=[0.0, 0.0, *[0.0] * good, fault]))
    with pytest.raises(NumericsError, match=r"faults/step_2\.json"):
        made.take(2)
    file = json.loads((tmp_path / "run" / "faults" / "step_2.json").read_text())
    assert file["samples"][0]["response"] == "2"
    assert made.run.position.step == 1
    assert made.store.has(1) == saved


def test_columns_that_are_not_finite_stop_the_step_before_any_update(compose, worker_group):
    made = compose(RATIO, actor=worker_group(output=np.nan))
    with pytest.raises(NumericsError, match=r"old_log_probs is.*in 4 of 4 samples"):
        made.take(1)
    assert made.roles["actor"].trained == []
    assert made.ledger.counts()["used"] == 0
    assert len(made.ledger.open()) == 2  # to be generated again


def test_the_check_asks_for_log_probs_when_it_is_due_and_leaves_no_column(compose):
    made = compose("algorithm.logprob_check={every: 3, samples: 3}")
    made.take(3)
    asked = [request.sampling.log_probs for request in made.engine.requests]
    assert asked == [True] * 2 + [False] * 2 + [True] * 2
    assert asked == [request.sampling.raw_log_probs for request in made.engine.requests]
    actor = made.roles["actor"]
    assert actor.passes == [(3, frozenset({"log_probs"}))] * 2
    assert made.metrics["logprob_check/prob_diff_mean"] == 0
    assert not any("rollout_log_probs" in batch for batch in actor.trained)
    assert made.events.stages.count("logprob_check") == 2


def test_the_check_measures_every_step_where_both_sides_are_there_anyway(compose):
    made = compose(RATIO, "algorithm.rollout_correction=decoupled_token_is")
    made.take(2)
    assert made.metrics["logprob_check/tokens"] == 6
    actor = made.roles["actor"]
    assert actor.passes == [(4, frozenset({"log_probs"}))] * 2
    assert actor.trained
    assert all("rollout_log_probs" in batch for batch in actor.trained)


def test_a_check_that_stops_changes_nothing_and_names_its_samples(compose, worker_group):
    made = compose(
        "algorithm.logprob_check={every: 1, stop_above: 0.1}", actor=worker_group(output=-2.0)
    )
    with pytest.raises(NumericsError, match=r"stop_above.*faults/step_1\.json"):
        made.take(1)
    assert made.roles["actor"].trained == []
    assert len(made.ledger.open()) == 2


def test_a_check_that_warns_lets_the_step_go_on(compose, worker_group):
    gate = "algorithm.logprob_check={every: 1, warn_above: 0.01, stop_above: null}"
    made = compose(gate, actor=worker_group(output=-2.0))
    made.take(1)
    assert made.run.position.step == 1
    assert any("warn_above" in warning for warning in made.logger.warnings)


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_kl_controller_learns_of_steps_that_count_alone(compose, worker_group, abandoned):
    made = compose(
        "algorithm.kl.in_reward={coef: 0.5, controller: {name: adaptive, target: 0.1, horizon: 8}}",
        actor=worker_group(output=-1.0),
        ref=worker_group(output=-2.0),
    )
    controller: Any = made.run.plugins["algorithm.kl.in_reward.controller"]
    if abandoned:
        made.events.after = lambda stage: stage == "advantage" and made.stop.request("a test")
        with pytest.raises(StopRequested):
            made.take(1)
        assert made.events.stages[-1] == "advantage"
        assert controller.value == 1.0
        return
    made.take(1)
    assert controller.value == pytest.approx(1 + 0.2 * 4 / 8)
    assert made.metrics["reward/kl_penalty"] == pytest.approx(1.0)
    assert made.metrics["reward/kl_coef"] == 0.5


# -- trainers that do not do what they should --------------------------------------------------------


class Driven(Trainer):
    """A trainer whose class attribute `drive` says what it does."""

    name = "driven"
    api = ">=2.0,<3"
    Config = TrainerSection

    @staticmethod
    def drive(run: Run) -> None:
        raise NotImplementedError

    def run(self, run: Run) -> None:
        type(self).drive(run)


def steps_of(*calls: str, publish: bool = True, steps: int = 1) -> Callable[[Run], None]:
    """What drives a run by these of its methods in each step."""

    def drive(run: Run) -> None:
        if publish:
            run.publish_weights()
        for _ in range(steps):
            with run.step() as step:
                for call in calls:
                    getattr(run, call)(*[step] * (call in ("collect", "learn")))

    return drive


def forgets_the_with(run: Run) -> None:
    run.publish_weights()
    run.collect(run.step())  # type: ignore[arg-type]


def publishes_beside_collect(run: Run) -> None:
    run.publish_weights()
    made: Any = run
    generate = made.source._collector.collect

    def collect(*arguments: Any) -> Any:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(run.publish_weights).result()
        return generate(*arguments)

    made.source._collector.collect = collect
    with run.step() as step:
        run.collect(step)


@pytest.mark.parametrize(
    ("drive", "words", "finished"),
    [
        (steps_of("collect"), "step 1 without `run.learn", 0),
        (
            steps_of("collect", "learn", steps=2),
            "for step 2 with",
            1,
        ),
        (steps_of("collect", "collect"), "twice in step 1", 0),
        (steps_of("collect", publish=False), "for step 1 with", 0),
        (steps_of("learn"), "collects in step 1", 0),
        (steps_of("collect", "learn", "learn"), "twice from step 1", 1),
        (steps_of(steps=0), "returned at step 0 of 3", 0),
        (steps_of("collect", "learn", "save"), "calls `run.save()` inside step 1", 1),
        (steps_of("collect", "validate"), "calls `run.validate()` inside step 1", 0),
        (forgets_the_with, "not the current step", 0),
        (publishes_beside_collect, "`run.publish_weights` while `run.collect` is under way", 0),
    ],
)
def test_a_trainer_that_misuses_the_run_is_named(compose, drive, words, finished):
    made = compose(trainer=type("Driven", (Driven,), {"drive": staticmethod(drive)}))
    with pytest.raises(PluginBrokenError) as caught:
        made.run.train()
    assert words in str(caught.value)
    assert "trainer/driven (" in str(caught.value)
    assert made.run.position.step == finished
    assert made.run.record.summary()["status"] == "failed"
    assert made.ledger.counts()["used"] == 2 * finished
    assert made.store.has(1) == bool(finished)


def test_a_trainer_that_finds_every_step_done_need_not_take_one(compose):
    made = compose(trainer=type("Idle", (Driven,), {"drive": staticmethod(steps_of(steps=0))}))
    made.run.record.state = attrs.evolve(made.run.record.state, step=3)
    made.run.train()
    assert made.run.position.finished


@pytest.mark.parametrize("save_last", [True, False])
def test_what_a_trainer_did_not_save_is_saved_unless_the_config_says_otherwise(compose, save_last):
    trainer = type("Brief", (Driven,), {"drive": staticmethod(steps_of("collect", "learn"))})
    made = compose(f"trainer.save_last={save_last}", trainer=trainer)
    made.run.train()
    assert made.run.record.summary()["status"] == "completed"
    assert made.store.has(1) == save_last


@pytest.mark.parametrize("inside", [False, True])
def test_a_stop_that_a_trainer_catches_stops_the_run_all_the_same(compose, inside):
    """It may catch it in the block of a step, or around it."""

    def step_of(run: Run) -> None:
        with run.step() as step:
            with suppress(StopRequested) if inside else nullcontext():
                run.collect(step)
                run.learn(step)
            run.publish_weights()

    def catches(run: Run) -> None:
        run.publish_weights()
        for _ in range(3):
            with suppress(StopRequested):
                step_of(run)

    made = compose(trainer=type("Deaf", (Driven,), {"drive": staticmethod(catches)}))
    made.events.after = lambda stage: len(made.events.stages) == 3 and made.stop.request("a test")
    with pytest.raises(StopRequested):
        made.run.train()
    assert made.events.stages == ["advantage", "update_actor", "advantage"]
    assert made.run.record.summary()["status"] == "stopped"
    assert made.store.has(1)


def test_a_state_that_no_checkpoint_can_keep_ends_the_run_before_its_first_step(compose):
    members = {
        "drive": staticmethod(steps_of("collect", "learn")),
        "state": lambda self: {"seen": {1, 2}},
    }
    made = compose(trainer=type("Unkept", (Driven,), members))
    with pytest.raises(CheckpointError, match=r"trainer.*'seen'.*set"):
        made.run.train()
    assert made.events.stages == []
