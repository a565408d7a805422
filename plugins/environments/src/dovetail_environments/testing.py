"""The conformance suite of environments. It needs the package dovetail-sdk."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from dovetail.interfaces import Failure, PluginContext, Prompt, Sample
from dovetail_environments.config import EnvironmentsConfig, EnvironmentSection
from dovetail_environments.environment import Environment, EnvironmentTask
from dovetail_environments.loop import EnvironmentsLoop
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML
from dovetail_sdk.testing.conformance import PluginConformance, draw_episodes

_NAME = "it"
_MOST = 6
"""Number of tasks that the suite checks."""


class _LoopOf(EnvironmentsLoop):
    """The agent loop with one environment, made from the class under test; this class need not be an installed plugin."""

    plugin: ClassVar[type[Environment]]

    def environment(self, name: str, section: EnvironmentSection) -> Environment:
        environment = self.plugin(section, PluginContext(role=name))
        environment.start()
        return environment


class EnvironmentConformance(PluginConformance):
    """Conformance suite for environments: subclass it and set `plugin`; override `solution` if a rule can solve the tasks."""

    kind = "environment"
    plugin: ClassVar[type[Environment]]
    turns: ClassVar[Sequence[str]] = ("one turn", "another")
    """The turns of a policy that ignores the task; after the last turn, the policy repeats them from the first."""
    best: ClassVar[float] = 1.0
    """The reward that an episode with the turns of `solution` must get."""

    def solution(self, task: EnvironmentTask) -> Sequence[str] | None:
        """Return the policy's turns that solve a task and earn the reward `best`; None if no rule solves the task."""
        return None

    def tasks(self, *, held_out: bool = False) -> Sequence[EnvironmentTask]:
        """Return the environment's first tasks, as many as the suite checks; with `held_out`, its first held-out tasks."""
        environment = self.make(role=_NAME)
        environment.start()
        try:
            return list(environment.tasks(_MOST, held_out=held_out))
        finally:
            environment.close()

    def draw(
        self, tasks: Sequence[EnvironmentTask], turns: Sequence[Sequence[str]], **settings: Any
    ) -> list[Sample]:
        """Run an episode of each task concurrently, with a policy that gives these turns.

        Args:
            tasks: the tasks of the environment.
            turns: the policy's turns for each task.
            settings: the further arguments of `draw_episodes`.
        """
        config = EnvironmentsConfig(
            name="environments", environments={_NAME: self.make_config()}, max_turns=20
        )
        loop_of = type("_Loop", (_LoopOf,), {"plugin": self.plugin})
        prompts = [
            Prompt(
                index=index,
                raw=[{"role": "user", "content": task.prompt}]
                if isinstance(task.prompt, str)
                else list(task.prompt),
                extra_info={"environment": _NAME, "task": dict(task.data)},
            )
            for index, task in enumerate(tasks)
        ]
        loop = loop_of(config, PluginContext(tokenizer=template_tokenizer(CHATML)))
        return draw_episodes(loop, prompts, said=lambda index: turns[index], **settings)

    def test_its_tasks_are_json_and_always_the_same(self) -> None:
        tasks = self.tasks()
        assert 0 < len(tasks) <= _MOST
        for task in tasks:
            assert task.prompt
            json.dumps([task.prompt, dict(task.data), task.ground_truth], allow_nan=False)
        assert tasks == self.tasks()

    def test_held_out_tasks_are_no_training_tasks(self) -> None:
        assert not [task for task in self.tasks(held_out=True) if task in self.tasks()]

    def test_every_episode_ends_with_a_finite_score(self) -> None:
        tasks = self.tasks()
        for sample in self.draw(tasks, [self.turns] * len(tasks), n=2):
            assert math.isfinite(_reward(sample))

    def test_an_episode_is_the_same_whatever_runs_beside_it(self) -> None:
        tasks = self.tasks()[:3]
        together = self.draw(tasks, [self.turns] * len(tasks))
        [alone] = self.draw(tasks[:1], [self.turns])
        assert _reward(alone) == _reward(together[0])
        assert alone.response_ids.tolist() == together[0].response_ids.tolist()

    def test_it_ends_at_the_limit_on_tokens(self) -> None:
        for sample in self.draw(self.tasks()[:2], [self.turns] * 2, tokens=1):
            assert not isinstance(sample.outcome, Failure), sample.outcome
            assert sample.response_length == 1

    def test_a_solution_earns_the_best_reward(self) -> None:
        solved = [(task, said) for task in self.tasks() if (said := self.solution(task))]
        if not solved:
            pytest.skip("no task of the environment has a solution: override `solution`")
        samples = self.draw([task for task, _ in solved], [said for _, said in solved])
        assert [_reward(sample) for sample in samples] == [self.best] * len(solved)


def _reward(sample: Sample) -> float:
    assert not isinstance(sample.outcome, Failure), sample.outcome
    assert sample.trajectory is not None
    return float(sample.trajectory.output["reward"])
