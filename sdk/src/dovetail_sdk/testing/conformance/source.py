"""The suite of sources of experience: a run takes samples from the source, with a table of logits (`TableEngine`) as its policy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from dovetail.batch.columns import GLOSSARY
from dovetail.config import config_from_mapping
from dovetail.errors import DovetailError, PluginBrokenError
from dovetail.interfaces import (
    ExperienceSource,
    Outcome,
    Plugin,
    PluginConfig,
    RewardManager,
    Sample,
    Score,
    SourceData,
    Trainer,
)
from dovetail.interfaces.reward import RunningTime
from dovetail.planning.resolved_plugins import source_facts
from dovetail.run.build import build
from dovetail.run.data import load_data, plan_from_data
from dovetail.run.training_run import TrainingRun
from dovetail.sections import TrainerSection
from dovetail.telemetry.logging import get_logger
from dovetail.telemetry.run_directory import RunDirectory
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.scripted_rollout import ScriptedRollout
from dovetail_sdk.testing.table_engine import TableEngine
from dovetail_sdk.testing.temporary import temporary_plugins
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer

Start = Callable[..., TrainingRun]
_RUN = {
    "trainer": {"name": "one_by_one", "total_steps": 3},
    "data": {"train_batch_size": 2, "max_prompt_length": 64, "max_response_length": 8},
    "rollout": {"name": "scripted", "n": 2, "weight_check": {"every": 0}},
    "reward": {"manager": "lengths"},
    "actor": {"engine": "table"},
    "algorithm": {"policy_loss": "reinforce", "logprob_check": {"every": 0}},
    "runtime": {"name": "inline", "device": "cpu"},
    "tracking": [],
}


class Lengths(RewardManager):
    """Reward manager that scores a response by its length."""

    name, api = "lengths", ">=1.0,<2"

    @classmethod
    def needs_functions(cls, config: PluginConfig) -> bool:
        return False

    async def score(self, samples: Sequence[Sample], time: RunningTime) -> list[Outcome]:
        return [Score(value=float(sample.response_length)) for sample in samples]


class OneByOne(Trainer):
    """Trainer that publishes weights, collects samples and learns in every step."""

    name, api, Config = "one_by_one", ">=2.0,<3", TrainerSection

    def run(self, run: Any) -> None:
        while not run.position.finished:
            run.publish_weights()
            with run.step() as step:
                run.collect(step)
                run.learn(step)


class SourceConformance(PluginConformance):
    """Conformance suite for experience sources, which make the samples of each step: subclass it and set `plugin`."""

    kind = "source"
    plugin: ClassVar[type[ExperienceSource]]
    overrides: ClassVar[tuple[str, ...]] = ()
    """Config overrides of the run that reads from the source."""
    plugins: ClassVar[tuple[type[Plugin], ...]] = ()
    """Plugins that the run needs and that are not installed, such as a trainer."""
    rows: ClassVar[Sequence[Mapping[str, Any]]] = tuple(
        {"prompt": [{"role": "user", "content": f"{n} + 1 ="}], "data_source": "sums", "reward_model": {"ground_truth": str(n + 1)}}
        for n in range(8)
    )  # fmt: skip
    """Rows of the file that `data.train_files` names."""

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Start]:
        """Yield a function that starts a run with the experience source under test: `start("data.val_files=…", name="another")`.

        Its arguments are overrides of the config; `name` is the name of the run's directory, which must be new. Runs are closed at the end.
        """
        model = tiny_model_and_tokenizer(tmp_path / "model")
        self.file = tmp_path / "rows.jsonl"
        self.file.write_text("\n".join(json.dumps(row) for row in self.rows))
        section = attrs.asdict(self.make_config(), filter=lambda _, value: value is not None)
        given = {**_RUN, "source": {**section, "name": self.plugin.name}}
        given |= {"model": {"path": str(model)}}

        parts: tuple[type[Plugin], ...]
        parts = (TableEngine, ScriptedRollout, Lengths, OneByOne, self.plugin, *self.plugins)
        with temporary_plugins(*parts), ExitStack() as runs:

            def started(*overrides: str, name: str = "run") -> TrainingRun:
                named = (f"data.train_files={self.file}", f"output_dir={tmp_path}")
                config = config_from_mapping(given, [*named, *self.overrides, *overrides]).config
                data = load_data(config)
                plan = plan_from_data(config, data)
                directory = RunDirectory.create(tmp_path / name)
                run = build(config, data, plan, directory, get_logger())
                runs.callback(run.close)
                return run

            yield started

    def collected(self, run: TrainingRun, *, learn: bool) -> list[str]:
        """Run one step and return the ids of its samples. Without `learn`, assert that the run refuses to end the step after `collect`."""
        run.publish_weights()
        names: list[str] = []
        with nullcontext() if learn else pytest.raises(PluginBrokenError), run.step() as step:
            run.collect(step)
            names += step.experience.batch()["sample_id"]
            if learn:
                run.learn(step)
        return names

    # Planning

    def test_a_plan_says_how_samples_come_about_and_which_columns_they_have(
        self, start: Start
    ) -> None:
        plan = start().record.plan
        config, facts = plan.facts.plugins["source"].config, plan.facts
        parts = self.plugin.parts_of_step(config, facts)
        assert parts
        assert all(part.name and part.who and part.because for part in parts)
        assert self.plugin.gives(config, facts) <= self.known_columns().keys()
        assert (self.plugin.publication(config, facts) is None) != self.plugin.follows
        assert self.plugin.age(config, facts) >= 0
        for column in GLOSSARY.keys() - self.plugin.gives(config, facts):
            why = self.plugin.lacks(config, facts, column)
            assert why is None or all(why), column

    def test_its_own_processes_have_places_and_memory(self, start: Start) -> None:
        plan = start().record.plan
        described = plan.placement.source.described
        assert described.keys() == set(self.plugin.roles)
        memory = self.plugin.memory(plan.facts.plugins["source"].config, plan)
        rules = self.plugin.memory_rules(plan.facts.plugins["source"].config, plan)
        assert rules.keys() | memory.keys() <= set(self.plugin.roles)
        assert all(size >= 0 for role in memory.values() for size in role.values())

    def test_nothing_is_wrong_with_its_data(self, start: Start) -> None:
        run = start()
        facts = source_facts(run.record.config)
        config = facts.plugins["source"].config
        data = load_data(run.record.config)
        found = list(self.plugin.examine(config, facts, data, None))
        assert not [fault for fault in found if isinstance(fault, DovetailError)]

    def test_its_data_has_the_tokenizer_that_it_reads(self, start: Start) -> None:
        facts = source_facts(start().record.config)
        config = facts.plugins["source"].config
        tokenizer = self.plugin.read_tokenizer(config, facts)
        data = self.plugin.load(config, facts, tokenizer)
        assert isinstance(data, SourceData)
        assert data.tokenizer is tokenizer
        assert len(data.train) == len(data.train.prompts) > 0

    # Steps

    def test_a_step_has_the_rows_and_columns_that_its_plan_promises(self, start: Start) -> None:
        run = start()
        counts = run.record.plan.counts
        run.publish_weights()
        with run.step() as step:
            run.collect(step)
            batch = step.experience.batch()
            facts = run.record.plan.facts
            promised = self.plugin.gives(facts.plugins["source"].config, facts)
            assert promised <= set(batch.columns)
            assert len(batch) == counts.prompts_per_step * counts.of.samples
            assert step.tokens > 0
            run.learn(step)

    def test_every_row_is_trained_on_once(self, start: Start) -> None:
        run = start()
        steps = [self.collected(run, learn=True) for _ in range(3)]
        names = [name for step in steps for name in step]
        assert names
        assert len(set(names)) == len(names)

    def test_what_a_step_gives_back_the_next_one_gets(self, start: Start) -> None:
        run = start()
        self.collected(run, learn=True)
        first = self.collected(run, learn=False)
        assert self.collected(run, learn=True) == first

    def test_a_resumed_run_takes_what_an_unbroken_one_takes(self, start: Start) -> None:
        whole, broken = start(), start(name="broken")
        for run in (whole, broken):
            self.collected(run, learn=True)
        broken.save()
        broken.record.finish_save()
        resumed = start(name="resumed")
        resumed.restore(next(broken.record.directory.checkpoints.glob("step_*")))
        assert self.collected(resumed, learn=True) == self.collected(whole, learn=True)

    def test_it_comes_back_from_its_rest(self, start: Start) -> None:
        run = start()
        run.source.rest()
        assert self.collected(run, learn=True)

    def test_what_is_admitted_a_step_takes(self, start: Start) -> None:
        run = start()
        run.publish_weights()
        run.admit(1)
        assert run.source.outstanding == (1 if self.plugin.follows else 0)
        assert self.collected(run, learn=True)
        assert run.source.outstanding == 0

    def test_weights_are_published_where_it_follows_them(self, start: Start) -> None:
        run = start()
        self.collected(run, learn=True)
        before = run.position.weight_version
        run.publish_weights()
        assert run.position.weight_version == before + self.plugin.follows

    # What else a run asks

    def test_held_out_rows_are_measured_where_there_are_any(self, start: Start) -> None:
        assert start().source.validate(lambda _: {}) == {}
        run = start(f"data.val_files={self.file}", name="measured")
        run.publish_weights()
        metrics = run.validate()
        assert metrics
        assert all(math.isfinite(value) for value in metrics.values())

    def test_rows_that_no_training_changes_are_the_same_at_each_look(self, start: Start) -> None:
        source = start().source
        first, second = ([list(b["sample_id"]) for b in source.fixed()] for _ in range(2))
        assert first == second

    def test_its_parts_are_plugins_and_its_summary_has_an_accuracy(self, start: Start) -> None:
        source = start().source
        assert all(isinstance(part, Plugin) for part in source.parts.values())
        accuracy = {"accuracy_metric", "accuracy_before", "accuracy_after"}
        assert accuracy <= source.summary().keys()
