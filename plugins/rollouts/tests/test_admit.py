"""Samples generated ahead of the step that takes them: their weights, their accounting, their return to the queue, and restoring."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import attrs
import pytest

from dovetail.errors import PluginBrokenError, StopRequested
from dovetail.hooks import hookimpl
from dovetail.interfaces import Failure, FailureKind, Run, Trainer
from dovetail.sections import TrainerSection


class OneStepOff(Trainer):
    """A trainer that has the next step's samples generated while a step learns."""

    name = "one_step_off"
    api = ">=2.0,<3"
    Config = TrainerSection

    @classmethod
    def max_staleness(cls, config: Any) -> int:
        return 1

    def run(self, run: Run) -> None:
        run.publish_weights()
        run.admit()
        while not run.position.finished:
            one_step(run)


class FarAhead(OneStepOff):
    name = "far_ahead"

    @classmethod
    def max_staleness(cls, config: Any) -> int:
        return 9


class Watched(OneStepOff):
    """Records the weight version that was published before each prompt was queued, and the versions of its samples."""

    name = "watched"
    published: dict[int, int]
    versions: dict[int, set[int]]

    def run(self, run: Run) -> None:
        made: Any = run
        self.published, self.versions = {}, {}

        def admit() -> None:
            before = set(made.loader._ledger.open())
            run.admit()
            new = {prompt for _, prompt, _ in set(made.loader._ledger.open()) - before}
            self.published |= dict.fromkeys(new, run.position.weight_version)
            # A publication completes only requests that have reached the engine, so wait until all are complete.
            made.source._service.generate(list(made.source._service._admitted))

        run.publish_weights()
        admit()
        while not run.position.finished:
            with run.step() as step:
                run.collect(step)
                for sample in made._current.collected.samples:
                    found = self.versions.setdefault(sample.prompt.index, set())
                    found.update(sample.completion.weight_versions.tolist())
                admit()
                run.learn(step)
                run.publish_weights()


def one_step(run: Run) -> None:
    with run.step() as step:
        run.collect(step)
        run.admit()
        run.learn(step)
        run.publish_weights()


def asked(made: Any) -> list[int]:
    """The prompt of each request."""
    return [request.streams[0].prompt for request in made.engine.requests]


def trained(made: Any) -> list[int]:
    """The prompt of each sample that the actor was trained on."""
    batches = made.roles["actor"].trained
    return [prompt for batch in batches for prompt in batch["prompt_id"].tolist()]


def test_one_step_off_uses_every_prompt_once(compose) -> None:
    made = compose(trainer=OneStepOff)
    made.run.train()
    assert made.run.position.step == 3
    assert sorted(asked(made)) == list(range(6))
    assert trained(made) == [prompt for prompt in range(6) for _ in range(2)]
    made.ledger.check()
    assert made.ledger.counts()["used"] == 6
    assert made.engine.versions == [1, 2, 3, 4]


@pytest.mark.parametrize(("trainer", "due"), [(OneStepOff, 2), (FarAhead, 3)])
def test_a_group_is_due_while_its_weights_are_young_enough_and_by_the_last_step(
    compose, trainer: type[Trainer], due: int
) -> None:
    made = compose(trainer=trainer)
    made.run.publish_weights()
    made.run.admit()
    assert made.run.source._service.kept(lambda groups: [group.due for group in groups]) == [
        due,
        due,
    ]


def test_requests_have_the_priority_of_the_step_that_takes_their_groups(compose) -> None:
    made = compose(trainer=FarAhead)
    with made.run.record.running():
        made.run.publish_weights()
        made.run.admit(3)
        with made.run.step() as step:
            made.run.collect(step)
            made.run.admit(2)
            made.run.learn(step)
            made.run.admit(1)
        # Wait until these groups are generated.
        made.run.source._service.generate(list(made.run.source._service._admitted))
    assert [request.priority for request in made.engine.requests] == [1, 1, 2, 2, 3, 3]


def test_samples_have_the_version_that_was_published_before_they_were_admitted(compose) -> None:
    made = compose(trainer=Watched)
    made.run.train()
    trainer = made.run.trainer
    assert trainer.published == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2}
    assert trainer.versions == {prompt: {v} for prompt, v in trainer.published.items()}
    made.ledger.check()


@pytest.fixture
def begun(compose) -> Any:
    """A function that makes a run that has published its weights."""

    def begin(*overrides: str, trainer: type[Trainer] = OneStepOff, **given: Any) -> Any:
        made = compose(*overrides, trainer=trainer, **given)
        made.run.publish_weights()
        return made

    return begin


def test_more_than_the_trainers_staleness_allows_is_refused(begun) -> None:
    made = begun()
    made.run.admit(4)
    with pytest.raises(
        PluginBrokenError, match=r"admits 1 prompts while 4 are outstanding"
    ) as error:
        made.run.admit(1)
    assert "max_staleness = 1" in str(error.value)
    assert "trainer/one_step_off" in str(error.value)
    assert len(made.ledger.open()) == 4


def test_a_step_that_is_not_followed_by_a_publication_counts_against_the_bound(begun) -> None:
    made = begun()
    made.run.admit(2)
    with made.run.record.running(), made.run.step() as step:
        made.run.collect(step)
        made.run.admit(2)
        with pytest.raises(PluginBrokenError, match="admits 2 prompts while 4 are outstanding"):
            made.run.admit(2)
        made.run.learn(step)
        made.run.publish_weights()
        made.run.admit(2)


@pytest.mark.parametrize("partial", ["true", "false"])
def test_replicas_sleep_while_a_step_learns_and_generate_ahead_before_and_after(
    compose, partial: str
) -> None:
    made = compose("rollout.offload=true", f"rollout.partial_rollout={partial}", trainer=FarAhead)
    made.engine.script = attrs.evolve(made.engine.script, delay=0.02)
    seen: list[tuple[frozenset[str], set[str]]] = []
    made.events.after = lambda _: seen.append((made.engine.asleep, set(made.engine._running)))

    def run() -> None:
        made.run.publish_weights()
        made.run.admit(6)
        for _ in range(3):
            one_step(made.run)
        made.run.save()

    with made.run.record.running():
        run()
    assert seen == [(frozenset({"weights", "kv_cache"}), set())] * len(seen)
    assert len(seen) >= 3
    assert trained(made) == [prompt for prompt in range(6) for _ in range(2)]
    made.ledger.check()


def test_responses_go_on_under_weights_that_are_published_meanwhile(compose) -> None:
    made = compose("rollout.partial_rollout=true", trainer=FarAhead)
    made.engine.script = attrs.evolve(made.engine.script, delay=0.05)
    with made.run.record.running():
        made.run.publish_weights()
        made.run.admit(6)
        for _ in range(3):
            with made.run.step() as step:
                made.run.collect(step)
                made.run.learn(step)
                made.run.publish_weights()
    assert trained(made) == [prompt for prompt in range(6) for _ in range(2)]
    made.ledger.check()


def test_admitting_is_refused_before_weights_are_published(compose) -> None:
    made = compose(trainer=OneStepOff)
    with pytest.raises(PluginBrokenError, match="with weights"):
        made.run.admit()
    assert made.ledger.open() == []


def test_nothing_is_admitted_beyond_the_last_step(begun) -> None:
    made = begun(trainer=FarAhead)
    made.run.admit(4)
    made.run.admit(100)
    assert [prompt for _, prompt, _ in made.ledger.open()] == list(range(6))
    made.run.admit()
    with made.run.record.running():
        for _ in range(3):
            one_step(made.run)
        made.run.admit()
    assert sorted(asked(made)) == list(range(6))
    made.ledger.check()


def test_a_step_takes_what_is_admitted_and_generates_only_what_it_lacks(begun) -> None:
    made = begun()
    made.run.admit(1)
    with made.run.record.running(), made.run.step() as step:
        made.run.collect(step)
        assert sorted(asked(made)) == [0, 1]
        assert made.ledger.taken(1) == [(0, 0, 0), (0, 1, 0)]
        made.run.learn(step)


def test_a_step_that_fails_gives_its_groups_back_and_the_next_takes_the_same_samples(begun) -> None:
    made = begun()
    made.run.admit(4)
    seen = []
    with made.run.record.running():
        for fails in (True, True, False):
            try:
                with made.run.step() as step:
                    made.run.collect(step)
                    seen.append(made.run._current.collected.samples)
                    assert len(made.ledger.taken(1)) == 2
                    if fails:
                        raise ValueError("torn")
                    made.run.learn(step)
                    made.run.publish_weights()
            except ValueError:
                assert made.ledger.taken(1) == []
        one_step(made.run)
    first, second, third = ([(s.sample_id, id(s.completion)) for s in samples] for samples in seen)
    assert first == second == third
    assert asked(made)[:4] == [0, 1, 2, 3]
    assert sorted(asked(made)) == list(range(6))
    assert trained(made) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_restored_run_issues_what_was_in_flight_first_and_nothing_twice(
    compose, tmp_path
) -> None:
    made = compose(trainer=OneStepOff)
    with made.run.record.running():
        made.run.publish_weights()
        made.run.admit()
        one_step(made.run)
        assert made.ledger.open() == [(0, 2, 0), (0, 3, 0)]
        made.run.source._service.generate(list(made.run.source._service._admitted))
        for group in made.run.source._service._admitted:
            group.finished, group.samples = False, []  # as if generation had not begun
        made.run.save()
    [path] = (tmp_path / "run" / "checkpoints").glob("*1*")

    again = compose(trainer=OneStepOff, directory="again")
    again.run.restore(path)
    assert again.run.position.step == 1
    again.run.train()
    assert asked(again)[:2] == [2, 3]
    assert sorted(asked(again)) == [2, 3, 4, 5]
    assert trained(made) + trained(again) == [prompt for prompt in range(6) for _ in range(2)]
    again.ledger.check()
    assert again.ledger.counts()["used"] == 6


class Epochs:
    """An observer that records the epoch that each step reports."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    @hookimpl
    def step_finished(self, metrics: Mapping[str, float]) -> None:
        self.seen.append(metrics["data/epoch"])


def test_epochs_count_what_steps_took_and_not_what_was_admitted(begun) -> None:
    made, epochs = begun(trainer=FarAhead), Epochs()
    made.observers.add(epochs)
    made.run.admit(6)
    assert made.run.position.epoch == 0
    with made.run.record.running():
        for _ in range(3):
            one_step(made.run)
    assert epochs.seen == pytest.approx([1 / 3, 2 / 3, 1.0])


# -- rewards that fail ---------------------------------------------------------------------------

REFILL = ("reward.on_failure=refill", "reward.max_failure_share=0.5")


def failing(made: Any, *refused: str) -> None:
    """Make the scoring of samples with these names fail."""
    score = made.manager.score
    failure = Failure(kind=FailureKind.EXCEPTION, message="no")

    async def scored(samples: Any, time: Any) -> list[Any]:
        found = await score(samples, time)
        names = [sample.sample_id for sample in samples]
        return [failure if name in refused else o for name, o in zip(names, found, strict=True)]

    made.manager.score = scored


def test_a_refilled_prompt_is_used_once_under_its_latest_attempt(begun) -> None:
    made = begun(*REFILL)
    failing(made, "train.e0.p1.a0.s0")
    made.run.admit()
    with made.run.record.running():
        one_step(made.run)
        assert made.metrics["reward/refilled"] == 1
        assert made.ledger.counts()["used"] == 2
        assert made.ledger.counts()["dropped"] == {}
        one_step(made.run)
    assert trained(made) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert asked(made).count(1) == 2
    attempts = [batch["attempt"].tolist() for batch in made.roles["actor"].trained]
    assert attempts == [[0, 0], [1, 1], [0, 0], [0, 0]]


def test_a_refill_that_is_stopped_is_completed_by_the_next_step(begun) -> None:
    made = begun(*REFILL)
    failing(made, "train.e0.p1.a0.s0")
    generate = made.run.source._service.generate

    def stops(groups: Any) -> None:
        made.run.source._service.generate = generate
        raise StopRequested("a test")

    made.run.source._service.generate = stops
    with suppress(StopRequested), made.run.step() as step:
        made.run.collect(step)
    assert made.ledger.open() == [(0, 0, 0), (0, 1, 0)]
    with made.run.record.running():
        one_step(made.run)
    assert made.ledger.counts()["used"] == 2
    assert trained(made) == [0, 0, 1, 1]
    assert [r.request_id for r in made.engine.requests][:3] == [
        "train.e0.p0.a0",
        "train.e0.p1.a0",
        "train.e0.p1.a1",
    ]
