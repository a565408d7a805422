"""The source `examples`: the examples that a step takes after a step that ended early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.config import config_from_mapping
from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.interfaces import PluginContext
from dovetail.interfaces.source import StepAsk
from dovetail.sections import PluginSection
from dovetail_datasets.example_rows import Example, TrainedResponse
from dovetail_datasets.examples_source import ExamplesSource
from dovetail_datasets.samplers import SequentialSampler

CONFIG = {
    "model": {"path": "nowhere"},
    "data": {"train_batch_size": 2},
    "trainer": {"name": "on_policy", "samples_per_step": 0},
}


def example(index: int) -> Example:
    answer = TrainedResponse(ids=np.array([7, 8]), mask=np.array([True, True]))
    return Example(
        index=index,
        prompt_ids=np.array([index]),
        raw="",
        where=f"row {index}",
        answers=(answer,),
        lost=3 * (index == 1),
    )


class Steps:
    """The source over six examples, and the steps that it collects for."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        sampler = SequentialSampler(PluginSection(), PluginContext())
        examples = [example(i) for i in range(6)]
        loader = PromptLoader(examples, sampler, 2, self.ledger)
        nothing = SimpleNamespace(write_samples=lambda *_: None, samples_logged=lambda **_: None)
        trainer = SimpleNamespace(
            title="trainer 'supervised'",
            config=None,
            cls=SimpleNamespace(examples=lambda config: "conversations"),
            ref=SimpleNamespace(kind="trainer"),
        )
        plugins = {"trainer": trainer}
        site: Any = SimpleNamespace(
            config=config_from_mapping(CONFIG).config,
            plan=SimpleNamespace(facts=SimpleNamespace(plugins=plugins, required={})),
            data=SimpleNamespace(
                train=SimpleNamespace(one_of_each=lambda: examples[:1], streamed=""), val=None
            ),
            loader=loader,
            ledger=self.ledger,
            directory=nothing,
            hooks=nothing,
        )
        self.source = ExamplesSource(PluginSection(), PluginContext())
        self.source.open(site)

    def collect(self, number: int) -> list[int]:
        """Collect for a step, and return the rows that it took."""
        self.metrics: dict[str, float] = {}
        step: Any = SimpleNamespace(number=number, metrics=self.metrics, tokens=0)
        return [
            e.index
            for e in self.source.collect(step, StepAsk(step=number, due=number, groups=2)).examples
        ]

    def learn(self, number: int) -> None:
        self.source.settle(number, self.ledger.taken(number), {})

    def fail(self, number: int) -> None:
        self.source.give_back(number, sound=False)


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_the_examples_of_a_step_that_ended_early_are_the_next_ones(steps: Steps) -> None:
    assert steps.collect(1) == [0, 1]
    steps.fail(1)
    assert steps.collect(1) == [0, 1]
    steps.learn(1)
    assert steps.collect(2) == [2, 3]


def test_a_step_that_ends_before_it_collects_gives_nothing_back(steps: Steps) -> None:
    steps.collect(1)
    steps.learn(1)
    steps.fail(2)
    assert steps.collect(2) == [2, 3]


def test_examples_that_were_given_back_outlast_a_step_that_collects_nothing(steps: Steps) -> None:
    steps.collect(1)
    steps.fail(1)
    steps.fail(1)
    assert steps.collect(1) == [0, 1]


def test_the_examples_of_a_step_that_were_cut_are_counted(steps: Steps) -> None:
    counts = []
    for number in (1, 2):
        steps.collect(number)
        steps.learn(number)
        counts.append(
            [steps.metrics[f"data/{name}"] for name in ("truncated_share", "lost_token_share")]
        )
    assert counts == [[1 / 2, 3 / 9], [0, 0]]
